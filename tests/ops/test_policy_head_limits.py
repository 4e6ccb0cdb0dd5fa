"""The fused output layer: what it keeps, what it takes on paper and at the allocator, and what it refuses."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_logprob, fused_linear_policy_loss
from nemo_flashrl.ops.chunks import plan_chunks
from nemo_flashrl.ops.memory import picked_chunk_tokens, policy_head_memory

H, V, CHUNK = 16, 101, 10


def constant_loss(coefficient: float):
    return lambda logprobs, tokens: (coefficient * logprobs, torch.full_like(logprobs, coefficient))


def test_no_logits_and_no_graph_outlive_a_microbatch():
    hidden, weight = torch.randn(100, H).requires_grad_(), torch.randn(V, H).requires_grad_()
    targets = torch.randint(V, (100,))
    limit = CHUNK * V  # numbers in one chunk of logits
    seen = []

    def loss(logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        sizes = [x.numel() for x in gc.get_objects() if type(x) is Tensor and x.shape[-1:] == (V,)]
        seen.append(max(sizes))
        return logprobs, torch.ones_like(logprobs)

    total, logprobs = fused_linear_policy_loss(hidden, weight, targets, loss, chunk_tokens=CHUNK)
    assert len(seen) == 10 and max(seen) == limit
    total.backward()
    recomputed = fused_linear_logprob(hidden, weight, targets, chunk_tokens=CHUNK)
    assert (recomputed - logprobs).abs().max() <= 1e-6
    recomputed.sum().backward()
    alive = [weakref.ref(total.grad_fn), weakref.ref(recomputed.grad_fn)]
    del total, logprobs, recomputed
    assert [graph() for graph in alive] == [None, None]  # reference counts alone free them
    gc.collect()
    assert not any(type(x) is Tensor and x.shape[-1:] == (V,) for x in gc.get_objects())


def most_bytes(call) -> int:
    """What the allocator holds at most for it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("direct", "budget"), [(False, None), (True, None), (False, 0), (False, 3_000_000), (True, 2**30)]
)
@pytest.mark.parametrize("tokens", [300, 500])
def test_the_memory_formula_is_what_the_allocator_sees(tokens, direct, budget):
    hidden, weight = torch.randn(tokens, 64).requires_grad_(), torch.randn(3000, 64).requires_grad_()
    targets = torch.randint(3000, (tokens,))
    main_grad = torch.zeros(3000, 64) if direct else None

    def call() -> None:
        settings = {"chunk_tokens": 100, "grad_weight": main_grad}
        if budget is None:
            loss, _ = fused_linear_policy_loss(hidden, weight, targets, constant_loss(1.0), **settings)
        else:
            keep = torch.ones(tokens, dtype=torch.bool)
            loss, _ = fused_linear_gated_policy_loss(
                hidden,
                weight,
                targets,
                lambda logprobs, entropies: keep,
                lambda logprobs, keep, part: constant_loss(1.0)(logprobs, part),
                logits_budget_bytes=budget,
                **settings,
            )
        loss.backward()

    call()
    hidden.grad = weight.grad = None
    peak = most_bytes(call)
    plan = policy_head_memory(
        tokens,
        64,
        3000,
        chunk_tokens=100,
        element_bytes=4,
        direct_weight_gradient=direct,
        logits_budget_bytes=budget or 0,
    )
    assert plan.peak <= peak * 1.001 and peak <= plan.peak * 1.03


def test_a_gradient_that_is_handed_over_in_bf16_is_there_twice():
    """Summed in fp32 and rounded at the end, when a chunk's logits are gone."""
    hidden, weight = torch.randn(300, 256, dtype=torch.bfloat16), torch.randn(12000, 256, dtype=torch.bfloat16)
    hidden, weight, targets = hidden.requires_grad_(), weight.requires_grad_(), torch.randint(12000, (300,))

    def call() -> None:
        loss, _ = fused_linear_policy_loss(hidden, weight, targets, constant_loss(1.0), chunk_tokens=10)
        loss.backward()
        hidden.grad = weight.grad = None

    call()
    plan = policy_head_memory(300, 256, 12000, chunk_tokens=10, element_bytes=2, direct_weight_gradient=False)
    assert plan.peak == 6 * 12000 * 256 + 2 * 300 * 256 + 8 * 300
    assert most_bytes(call) == pytest.approx(plan.peak, rel=0.05)


def test_the_plan_of_a_large_job():
    # T=32768 H=4096 V=128256 bf16, weight gradient summed into main_grad. By hand at TP=1, chunk 1024, in MiB:
    # logits 501, gradient of hidden 256, chunk states 16 + 8, vectors 1/4.
    peaks = [
        policy_head_memory(32768, 4096, 128256, tensor_parallel=ranks, chunk_tokens=chunk).peak / 2**20
        for ranks, chunk in ((1, 1024), (2, 2048), (4, 2048), (8, 2048))
    ]
    assert peaks == pytest.approx([781.25, 725.25, 402.75, 241.5], abs=0.01)
    assert policy_head_memory(32768, 4096, 128256).naive == pytest.approx(31.3 * 2**30, rel=0.01)


def test_a_chunk_is_picked_by_device_and_shape():
    # 2^28 bytes are 523, 2093 and 4186 tokens of fp32 logits at TP 1, 4, 8. main_grad's 8 V H bytes at 85% of 3.35 TB/s
    # take as long as 983 tokens' 2 C V H FLOP at 700 TFLOP/s.
    assert [picked_chunk_tokens(128256 // ranks) for ranks in (1, 4, 8)] == [1024, 2048, 4096]
    assert pytest.approx(2 * 983 / 700e12, rel=1e-3) == 8 / (0.85 * 3.35e12)
    assert picked_chunk_tokens(128256, on_gpu=False) == 512


def test_a_shard_with_fewer_selected_tokens_is_filled_up_with_others():
    selected = torch.zeros(12, dtype=torch.bool)
    selected[[0, 3, 4, 5, 7, 10]] = True
    first, second = plan_chunks(12, 4, selected, num_shards=2, shard=1)
    assert first.tokens.tolist() == [0, 3, 7, 10] and first.real is None and first.local.tolist() == [1, 4]
    assert second.tokens.tolist() == [4, 5, 6, 8] and second.real.tolist() == [True, True, False, False]
    assert second.local.tolist() == [0, 2]
    values = torch.arange(12.0)
    assert second.take(values, 9).tolist() == [4, 5, 9, 9]
    second.put(values, torch.tensor([40.0, 50.0, float("nan"), 80.0]))
    assert values.tolist() == [0, 1, 2, 3, 40, 50, 6, 7, 8, 9, 10, 11]
    rows = torch.full((6, 1), float("nan"))  # tokens 6 to 11
    assert second.take_rows(rows).tolist() == [[0], [0]]
    written = torch.zeros(6, 1)
    written[0] = 6  # by another walk, which had selected it
    first.put_rows(written, torch.tensor([[7.0], [10.0]]))
    second.put_rows(written, torch.full((2, 1), float("nan")))
    assert written[:, 0].tolist() == [6, 7, 0, 0, 10, 0]


GOOD = {"hidden": torch.zeros(4, H), "weight": torch.zeros(V, H), "targets": torch.zeros(4, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 2, H)}, r"flatten \[S, B, H\]"),
        ({"hidden": torch.zeros(4, H + 1)}, "same H"),
        ({"weight": torch.zeros(V, H, dtype=torch.float16)}, "same floating dtype"),
        ({"targets": torch.zeros(5, dtype=torch.int64)}, "give int64 of 4 ids"),
        ({"targets": torch.zeros(4, dtype=torch.int32)}, "give int64 of 4 ids"),
        ({"targets": torch.tensor([0, 1, V, 0])}, rf"targets\[2\]={V} is outside the vocabulary of {V}"),
        ({"targets": torch.tensor([0, -1, 0, 0])}, r"targets\[1\]=-1"),
        ({"targets": torch.tensor([0, 95, 0, 0]), "vocab_size": 90}, "outside the vocabulary of 90"),
        ({"vocab_size": V + 1}, f"vocab_size={V + 1}"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"temperature": 0.0}, "temperature=0.0: give a finite number above 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"chunk_tokens": 0}, "chunk_tokens=0: give at least 1"),
        ({"mask": torch.ones(4)}, r"mask has shape \(4,\) and dtype torch.float32"),
        ({"grad_weight": torch.zeros(V, H + 1)}, "grad_weight has shape"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(change, message):
    arguments = GOOD | change
    with pytest.raises(ValueError, match=message):
        fused_linear_logprob(**arguments)
    with pytest.raises(ValueError, match=message):
        fused_linear_policy_loss(loss=constant_loss(1.0), **arguments)
    with pytest.raises(ValueError, match=message):
        gate = lambda logprobs, entropies: torch.ones(4, dtype=torch.bool)  # noqa: E731
        fused_linear_gated_policy_loss(gate=gate, loss=lambda logprobs, keep, tokens: (logprobs, logprobs), **arguments)
