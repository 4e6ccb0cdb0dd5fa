"""The no-grad score pass in the real trainer: transformers' log-probs at every TP x PP, and nothing else moved."""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from tiny import random_trajectories, write_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_flashrl.models.scoring import disagreement, probe_tolerance
from nemo_flashrl.weight_sync.probe import Probe, probe_token_ids

VOCAB_SIZE = 131  # padded to 256 rows
TEMPERATURE = 0.7
LAYOUTS = {
    "tp2 sequence": (2, ["parallel.tensor=2", "parallel.sequence=true", "batching.max_tokens_per_microbatch=200"]),
    "tp2 padded": (2, ["parallel.tensor=2", "batching.layout=padded", "batching.max_tokens_per_microbatch=300"]),
    "pp2 padded": (2, ["parallel.pipeline=2", "batching.layout=padded", "batching.max_tokens_per_microbatch=256"]),
    "tp2 pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2", "batching.max_tokens_per_microbatch=180"]),
    "dp2": (2, ["batching.max_tokens_per_microbatch=200"]),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A folder, and of each trajectory, by its later tokens, the log-probs and entropies of plain float64 torch."""
    root = tmp_path_factory.mktemp("scoring")
    folder = write_model(root / "model", vocab_size=VOCAB_SIZE)
    trajectories = random_trajectories(10, VOCAB_SIZE, seed=4)
    (root / "trajectories.pkl").write_bytes(pickle.dumps(trajectories))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    expected = {}
    with torch.no_grad():
        for trajectory in trajectories:
            ids = torch.from_numpy(trajectory.token_ids)[None]
            logits = model(ids).logits[0]
            table = torch.log_softmax(logits / TEMPERATURE, -1)
            logprobs = table[:-1].gather(-1, ids[0, 1:, None])[:, 0]
            untempered = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
            assert (untempered - logprobs).abs().max() > 0.1  # the wrong answer would show
            expected[tuple(trajectory.token_ids[1:])] = (logprobs, -(table.exp() * table).sum(-1)[:-1])
    return root, folder, expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_transformers(case, layout: str) -> None:
    root, folder, expected = case
    processes, overrides = LAYOUTS[layout]
    out = root / f"{layout.replace(' ', '_')}.pt"
    arguments = (folder, root / "trajectories.pkl", out, VOCAB_SIZE, f"rollout.temperature={TEMPERATURE}", *overrides)
    run_ranks(processes, "scoring", *arguments)
    report = torch.load(out)
    assert all(report["same"])  # modes and random states of every rank, after an error too
    assert {tuple(tokens.tolist()) for tokens, *_ in report["rows"]} == expected.keys()
    for tokens, *scores in report["rows"]:
        for values, right in zip(scores, expected[tuple(tokens.tolist())], strict=True):
            assert ((values[:-1].double() - right).abs() <= 1e-5 * right.abs().clamp(min=1)).all()


def test_dropout_is_refused_before_the_first_update(case) -> None:
    root, folder, _ = case
    out = root / "refusal"
    run_ranks(2, "agreement", folder, root / "trajectories.pkl", out, VOCAB_SIZE, "parallel.pipeline=2")
    message = (
        r"model configuration hidden_dropout=0.1, attention_dropout=0.1: a token's log-prob is -\d+\.\d+ in the "
        r"training pass and -\d+\.\d+ in the no-grad pass; set dropout and jitter to 0"
    )
    assert all(re.fullmatch(message, (out.parent / f"refusal{rank}").read_text()) for rank in range(2))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_two_attention_kernels_agree_in_bf16_and_dropout_does_not(tmp_path: Path, family: str) -> None:
    """One token is off by far more than the bound of fp32."""
    folder = write_model(tmp_path, family, dtype=torch.bfloat16, attention_dropout=0.1)
    token_ids = torch.randint(0, 515, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation=kernel)
        for kernel in ("sdpa", "eager", "eager")
    ]
    torch.manual_seed(0)
    one, other, noisy = (
        torch.tensor(logprobs_of(model.train(model is models[2]), model.lm_head.weight, token_ids)).double()
        for model in models
    )
    assert (one - other).abs().max() > 10e-3
    share, in_training, without = disagreement(torch.stack([other, one]), torch.bfloat16, 2)
    assert 0.05 < share < 0.8
    assert abs(in_training - without) == (one - other).abs().max()
    assert disagreement(torch.stack([noisy, one]), torch.bfloat16, 2)[0] > 5
    apart = torch.tensor([[-2.0, -3.0], [-2.0, -3.002]], dtype=torch.float64)
    assert disagreement(apart, torch.float32, 2) == (pytest.approx(2), -3.0, -3.002)
    assert disagreement(apart[:, :0], torch.bfloat16, 2)[0] == 0
    assert disagreement(torch.full((2, 1), math.nan).double(), torch.bfloat16, 2)[0] == math.inf


@pytest.mark.parametrize("tied", [False, True])
def test_a_stale_head_is_beyond_rounding(tmp_path: Path, tied: bool) -> None:
    """Two programs of one bf16 model, one rounding each layer and one nothing; then the first with an old head."""
    folder = write_model(tmp_path, tied=tied, dtype=torch.bfloat16)
    token_ids = probe_token_ids(515)
    rounding, exact = (AutoModelForCausalLM.from_pretrained(folder, dtype=d).eval() for d in (torch.bfloat16, None))
    exact.float()
    head = rounding.lm_head.weight.detach()
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    old_head = head + (0.1 * head.float().std() * noise).to(torch.bfloat16)
    first = Probe(token_ids, logprobs_of(exact, exact.lm_head.weight, token_ids), 0.0)
    first.tolerance = probe_tolerance(torch.bfloat16, 2, first.logprobs)
    first.largest = first.distance(logprobs_of(rounding, head, token_ids))
    assert 0 < first.largest < first.tolerance / 2
    stale = first.distance(logprobs_of(rounding, old_head, token_ids))
    assert stale > first.tolerance
    later = probe_tolerance(torch.bfloat16, 2, first.logprobs, replace(first, largest=0.01))
    assert later == pytest.approx(0.03)  # three times what the first sync measured, where that is less
    assert probe_tolerance(torch.float32, 48, first.logprobs) == 1e-4
    assert probe_tolerance(torch.bfloat16, 24, [-13.0, -7.0]) == pytest.approx(0.19, abs=0.002)  # spread 3


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, head: torch.Tensor, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """Of `token_ids[1:]`, with the head given."""
    logits = model.model(torch.tensor([token_ids])).last_hidden_state[0, :-1] @ head.T
    return tuple(torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist())
