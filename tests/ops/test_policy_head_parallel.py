"""The fused output layer over tensor-parallel ranks: real gloo groups of two and four, held to one rank in float64.

Four processes run every case once, as two groups of two and as one of four, and leave what each of them got; the tests
put the shards together.
"""

from __future__ import annotations

import datetime
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from plain_policy_head import linear_logprob
from processes import fork_server
from torch import Tensor

from nemo_flashrl.ops import fused_linear_gated_policy_loss, fused_linear_logprob, fused_linear_policy_loss
from nemo_flashrl.ops import tensor_parallel as collectives
from nemo_flashrl.ops.head import Head

WORLD, H, PAD = 4, 24, 128
WAYS = ["logprob", "single", "recomputed", "held", "given"]
# name: T, true vocabulary, rows over all ranks, chunk, largest logit
SHAPES = {
    "even": (48, 1024, 1024, 16, 3.0),
    "ranks of padding": (44, 101, PAD * 4, 12, 3.0),  # at TP=4 three ranks own padding alone, at TP=2 one
    "prime vocabulary": (52, 509, 512, 20, 3.0),
    "peaked": (40, 256, 256, 1000, 80.0),  # beyond what needs no shift, on some ranks
    "one token a rank": (4, 256, 256, 1, 3.0),
    "no tokens": (0, 256, 256, 16, 3.0),
}
# With an entropy term or not, and in what the sums are
SUMS = [(True, torch.float64), (True, torch.float32), (False, torch.float32)]
VARIANTS = {
    "plain": {},
    "sequence parallel": {"sequence_parallel": True},
    "own parts": {"reduce_hidden_gradient": False},
    "masked": {"sequence_parallel": True},  # rows without a coefficient are masked, and hold NaN; many temperatures
    "masked, accelerator": {"sequence_parallel": True},  # the same where the host may not look at a number
}


def temperature_of(shape: str, variant: str) -> float | Tensor:
    tokens = SHAPES[shape][0]
    return torch.linspace(0.7, 1.0, tokens).double() if variant.startswith("masked") else 0.8


def problem(shape: str, dtype=torch.float64) -> dict[str, Tensor]:
    tokens, vocab_size, rows, _, peak = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(shape))
    hidden = torch.randn(tokens, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, H, generator=generator, dtype=torch.float64)
    weight *= peak / (hidden @ weight[:vocab_size].t()).abs().max() if tokens else 1
    coefficient = torch.randn(tokens, generator=generator, dtype=torch.float64)
    coefficient[torch.rand(tokens, generator=generator) < 0.4] = 0
    coefficient[: tokens // 4] = 0  # nothing is live in the first shard at TP=4
    return {
        "hidden": hidden.to(dtype),
        "weight": weight.to(dtype),
        "targets": torch.randint(vocab_size, (tokens,), generator=generator),
        "coefficient": coefficient,
        "slope": torch.where(coefficient != 0, 0.2, 0.0).double(),
    }


def call(way: str, hidden: Tensor, weight: Tensor, inputs: dict[str, Tensor], entropy: bool, settings: dict):
    """(loss, log-probs) of sum(coefficient * logp + slope * entropy)."""
    coefficient = inputs["coefficient"].to(weight.dtype)
    slope = inputs["slope"].to(weight.dtype) if entropy else None

    def loss(logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        live = coefficient[tokens] != 0
        return torch.where(live, coefficient[tokens] * logprobs, 0), coefficient[tokens]

    targets = inputs["targets"]
    if way == "logprob":
        result = fused_linear_logprob(hidden, weight, targets, return_entropy=entropy, **settings)
        logprobs, entropies = result if entropy else (result, None)
        total = loss(logprobs, slice(0, len(targets)))[0].sum() + ((slope * entropies).sum() if entropy else 0)
        return total, logprobs
    if way == "single":
        return fused_linear_policy_loss(hidden, weight, targets, loss, entropy_weight=slope, **settings)
    if way == "given":
        with torch.no_grad():
            given = fused_linear_logprob(hidden, weight, targets, return_entropy=True, **settings)
        settings = settings | {"logprobs": given[0], "entropies": given[1]}
    settings = settings | {"logits_budget_bytes": 2**30 if way == "held" else 0}
    return fused_linear_gated_policy_loss(
        hidden,
        weight,
        targets,
        lambda logprobs, entropies: coefficient != 0,
        lambda logprobs, keep, tokens: loss(logprobs, tokens),
        entropy_weight=slope,
        **settings,
    )


def shard(inputs: dict[str, Tensor], rank: int, size: int, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    hidden = inputs["hidden"].chunk(size)[rank] if sequence_parallel and len(inputs["hidden"]) else inputs["hidden"]
    return hidden.clone().requires_grad_(), inputs["weight"].chunk(size)[rank].clone().requires_grad_()


class Counter:
    """Counts collectives and the bytes a rank sends in them, by what they carry."""

    def __init__(self) -> None:
        self.calls = {"statistics": 0, "hidden": 0, "scatter": 0, "reduce": 0}
        self.bytes = dict(self.calls)
        self._all_gather, self._reduce_scatter = collectives._all_gather, collectives._reduce_scatter
        self._all_reduce = dist.all_reduce
        collectives._all_gather = self.all_gather
        collectives._reduce_scatter = self.reduce_scatter
        collectives.dist.all_reduce = self.all_reduce

    def add(self, kind: str, tensor: Tensor) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += tensor.numel() * tensor.element_size()

    def all_gather(self, out: Tensor, tensor: Tensor, **settings):
        self.add("statistics" if tensor.dim() == 3 else "hidden", tensor)
        return self._all_gather(out, tensor, **settings)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, **settings):
        self.add("scatter", tensor)
        return self._reduce_scatter(out, tensor, **settings)

    def all_reduce(self, tensor: Tensor, **settings):
        self.add("reduce", tensor)
        return self._all_reduce(tensor, **settings)

    def stop(self) -> tuple[dict, dict]:
        collectives._all_gather, collectives._reduce_scatter = self._all_gather, self._reduce_scatter
        collectives.dist.all_reduce = self._all_reduce
        return self.calls, self.bytes


def counted(group, entropy: bool, sequence_parallel: bool) -> dict:
    inputs = problem("even", torch.float32)
    inputs["coefficient"] = torch.ones(48)
    hidden, weight = shard(inputs, dist.get_rank(group), 2, sequence_parallel)
    settings = {"tp_group": group, "chunk_tokens": 16, "sequence_parallel": sequence_parallel}
    results = {}
    for way in ("logprob", "single"):
        counter = Counter()
        total, _ = call(way, hidden, weight, inputs, entropy, settings)
        results[way, "forward"] = counter.stop()
        counter = Counter()
        total.backward()
        results[way, "backward"] = counter.stop()
    return results


def lost_gradient(group) -> Tensor:
    """Counterexample: the target's logit summed by an ordinary all-reduce, which autograd does not see."""
    inputs = problem("even")
    hidden, weight = shard(inputs, dist.get_rank(group), 2, False)
    logits = hidden @ weight.t()
    columns = inputs["targets"] - dist.get_rank(group) * 512
    owned = (columns >= 0) & (columns < 512)
    target = torch.where(owned, logits.gather(1, columns.clamp(0, 511)[:, None]).squeeze(1), 0).detach()
    sums = logits.exp().sum(1)
    total = sums.detach().clone()
    dist.all_reduce(target, group=group)
    dist.all_reduce(total, group=group)
    logprobs = target - (total + sums - sums.detach()).log()
    (inputs["coefficient"] * logprobs).sum().backward()
    return weight.grad


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=120),
    )
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[rank // 2], 4: dist.group.WORLD}
    results = {}
    for size, shape, variant, way, (entropy, dtype) in itertools.product(groups, SHAPES, VARIANTS, WAYS, SUMS):
        _, vocab_size, _, chunk, _ = SHAPES[shape]
        inputs, extra = problem(shape, dtype), VARIANTS[variant]
        if variant.startswith("masked"):
            extra = extra | {"mask": inputs["coefficient"] != 0}
            inputs["hidden"][inputs["coefficient"] == 0] = float("nan")
        settings = {"tp_group": groups[size], "vocab_size": vocab_size, "chunk_tokens": chunk}
        settings["temperature"] = temperature_of(shape, variant)
        Head.may_look = "accelerator" not in variant
        own = shard(inputs, rank % size, size, extra.get("sequence_parallel", False))
        total, logprobs = call(way, *own, inputs, entropy, settings | extra)
        total.backward()
        result = (total.detach(), logprobs.detach(), own[0].grad, own[1].grad)
        results[size, shape, variant, way, entropy, dtype] = result
    Head.may_look = True
    for entropy in (False, True):
        for sequence_parallel in (False, True):
            results["count", entropy, sequence_parallel] = counted(groups[2], entropy, sequence_parallel)
    results["lost"] = lost_gradient(groups[2])
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    fork_server()
    torch.multiprocessing.start_processes(worker, (str(folder),), WORLD, start_method="forkserver")
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def expected(shape: str, entropy: bool, temperature: float | Tensor):
    inputs = problem(shape)
    hidden, weight = (inputs[name].clone().requires_grad_() for name in ("hidden", "weight"))
    logprobs, entropies = linear_logprob(
        hidden, weight, inputs["targets"], vocab_size=SHAPES[shape][1], temperature=temperature
    )
    total = (inputs["coefficient"] * logprobs).sum() + (entropy * inputs["slope"] * entropies).sum()
    total.backward()
    return total.detach(), logprobs.detach(), hidden.grad, weight.grad


def relative(actual: Tensor, right: Tensor) -> float:
    return float((actual.double() - right).norm() / right.norm().clamp(min=1e-300))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_together_are_one_rank(results, shape, variant, size):
    for entropy, dtype in SUMS:
        total, logprobs, grad_hidden, grad_weight = expected(shape, entropy, temperature_of(shape, variant))
        bound = 1e-13 if dtype == torch.float64 else 80 * 2**-22 if shape == "peaked" else 1e-6  # 80: rounded logits
        if variant.startswith("masked"):
            logprobs = torch.where(problem(shape)["coefficient"] != 0, logprobs, 0)
        for way, first in itertools.product(WAYS, range(0, WORLD, size)):
            group = range(first, first + size)
            ranks = [results[rank][size, shape, variant, way, entropy, dtype] for rank in group]
            for rank in ranks:
                assert torch.equal(rank[0], ranks[0][0]) and torch.equal(rank[1], ranks[0][1])
            assert ((ranks[0][1] - logprobs).abs() <= 2 * bound * logprobs.abs().clamp(min=1)).all()
            assert ranks[0][0] == pytest.approx(total.item(), rel=20 * bound, abs=bound)
            grads = [rank[2] for rank in ranks]
            if variant == "plain":
                assert all(torch.equal(grad, grads[0]) for grad in grads)
                hidden = grads[0]
            else:
                hidden = sum(grads) if variant == "own parts" else torch.cat(grads)
            assert relative(hidden, grad_hidden) <= bound
            assert relative(torch.cat([rank[3] for rank in ranks]), grad_weight) <= bound


def test_an_ordinary_all_reduce_loses_the_target(results):
    inputs = problem("even")
    weight = inputs["weight"].clone().requires_grad_()
    (inputs["coefficient"] * linear_logprob(inputs["hidden"], weight, inputs["targets"])[0]).sum().backward()
    wrong = torch.cat([results[0]["lost"], results[1]["lost"]])
    assert relative(wrong, weight.grad) > 0.5


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_exchange_a_chunk_of_at_most_16_bytes_a_token(results, entropy, sequence_parallel):
    # 48 tokens are 3 chunks. 12 bytes a token: maximum, sum, target's logit; the entropy's sum makes 16.
    counts = results[0]["count", entropy, sequence_parallel]
    for way in ("logprob", "single"):
        calls, sent = counts[way, "forward"]
        assert calls["statistics"] == 3
        assert sent["statistics"] == 48 * (16 if entropy else 12)
        # hidden states a chunk at a time, this rank's half of the tokens; their gradient in fp32
        assert (calls["hidden"], sent["hidden"]) == ((3, 24 * H * 4) if sequence_parallel else (0, 0))
        forms_gradient = way == "single"
        assert calls["scatter"] == (3 if forms_gradient and sequence_parallel else 0)
        assert calls["reduce"] == (3 if forms_gradient and not sequence_parallel else 0)
        calls, sent = counts[way, "backward"]
        assert calls["statistics"] == 0
        assert calls["reduce"] + calls["scatter"] == (0 if forms_gradient else 3)
        assert sent["reduce"] + sent["scatter"] == (0 if forms_gradient else 48 * H * 4)
