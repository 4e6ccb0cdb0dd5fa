"""The reference policy in the real trainer: what it says, what it leaves alone, and when it moves."""

from __future__ import annotations

import pickle

import pytest
import torch
from processes import run_ranks
from tiny import random_trajectories, write_model

VOCAB_SIZE = 131
SMALL_BATCHES = "batching.max_tokens_per_microbatch=180"
TP2_PP2 = ["parallel.tensor=2", "parallel.pipeline=2", SMALL_BATCHES]
RUNS = {  # processes, settings, overrides
    "tp2 pp2 ema": (4, {"mode": "ema", "beta": 0.5, "evaluate": True}, TP2_PP2),
    "tp2 bf16 ema": (2, {"mode": "ema", "beta": 0.5}, ["parallel.tensor=2", "model.precision=bf16"]),
    "dp2 overlap": (2, {"mode": "ema", "beta": 0.5}, [SMALL_BATCHES]),
    "hard": (1, {"mode": "hard", "every": 2}, [SMALL_BATCHES]),
    "frozen": (1, {"mode": "frozen"}, ["batching.layout=padded", SMALL_BATCHES]),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    root = tmp_path_factory.mktemp("reference")
    folder = write_model(root / "model", vocab_size=VOCAB_SIZE, tied=True)
    (root / "trajectories.pkl").write_bytes(pickle.dumps(random_trajectories(10, VOCAB_SIZE, seed=4)))
    return root, folder


def expected_references(settings: dict, policies: list[dict]) -> list[dict]:
    """The reference of each step in float64; step 2 of 4 was skipped, so that policies[2] is policies[1]."""
    reference, out, updates = policies[0], [policies[0]], 0
    for step, policy in enumerate(policies[1:], start=1):
        if step != 2:
            updates += 1
            beta = {"ema": settings.get("beta"), "frozen": 1.0}.get(settings["mode"])
            if settings["mode"] == "hard":
                beta = 0.0 if updates % settings["every"] == 0 else 1.0
            reference = {name: beta * reference[name] + (1 - beta) * policy[name] for name in policy}
        out.append(reference)
    return out


def hf_logprobs(folder, weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        table = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
    return table.gather(-1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize("run", RUNS)
def test_reference(case, run: str) -> None:
    root, folder = case
    processes, settings, overrides = RUNS[run]
    out = root / f"{run.replace(' ', '_')}.pt"
    overrides = [*overrides, "trainer.steps=4", "optimizer.learning_rate=0.01"]
    arguments = (folder, root / "trajectories.pkl", out, VOCAB_SIZE, settings, *overrides)
    run_ranks(processes, "reference", *arguments, distributed_optimizer="overlap" in run)
    report = torch.load(out)
    steps, ranks = report["steps"], report["ranks"]
    # Bit for bit the policy again, gradients and optimizer too, after an error inside too; back from a checkpoint.
    assert all(all(r["identical"]) and all(r["raised"]) and r["restored"] for r in ranks)
    assert {r["updates"] for r in ranks} == {3}  # four steps, one skipped
    policies = [step["policy"] for step in steps]
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(policies[:-1], policies[1:], strict=True)]
    assert moved == [True, False, True]
    rounding = 2**-8 if "bf16" in run else 1e-6
    for step, right in zip(steps, expected_references(settings, policies), strict=True):
        for name, value in right.items():
            assert ((step["reference"][name] - value).abs() <= rounding * value.abs() + 1e-9).all(), name
    check_tied(ranks, tensor=2 if "tp2" in run else 1)
    if "bf16" in run:
        return
    last = [row for r in ranks for row in r["rows"][-1]]
    later_tokens, logprobs = last[0]
    trajectories = pickle.loads((root / "trajectories.pkl").read_bytes())
    (tokens,) = (t.token_ids for t in trajectories if t.token_ids[1:].tolist() == later_tokens.tolist())
    tokens = torch.from_numpy(tokens)
    right = hf_logprobs(folder, steps[-1]["reference"], tokens)
    assert ((logprobs[:-1].double() - right).abs() <= 1e-5 * right.abs().clamp(min=1)).all()
    wrong = hf_logprobs(folder, policies[-1], tokens)  # the policy's own
    assert (wrong - right).abs().max() > 1e-3 or settings["mode"] == "hard"  # just copied
    if settings.get("evaluate"):
        assert steps[-1]["reference_entropy"] > 0 > steps[-1]["reference_logprob"]
    assert steps[0]["reference_distance"] == 0
    difference = sum((policies[-1][n] - right_n).square().sum() for n, right_n in steps[-1]["reference"].items())
    norm = sum(p.square().sum() for p in policies[-1].values())
    assert steps[-1]["reference_distance"] == pytest.approx(float((difference / norm).sqrt()), rel=1e-4)


def test_saved_at_tp2_pp2_restored_at_other_sizes(case, tmp_path) -> None:
    """Tied embeddings and a vocabulary that is padded to 256 rows at TP=2 and to 200 at TP=1."""
    root, folder = case
    reports = []
    for name, processes, sizes in (
        ("saved", 4, ["parallel.tensor=2", "parallel.pipeline=2"]),
        ("pp2", 2, ["parallel.pipeline=2", "model.vocab_divisible_by=200"]),
        ("one", 1, ["model.vocab_divisible_by=200"]),
    ):
        settings = {"mode": "ema", "beta": 0.5}
        arguments = (folder, root / "trajectories.pkl", tmp_path / f"{name}.pt", VOCAB_SIZE, settings)
        overrides = [*sizes, "trainer.steps=1" if reports else "trainer.steps=3", "optimizer.learning_rate=0.01"]
        checkpoint = tmp_path / "saved.checkpoint" if reports else None
        run_ranks(processes, "reference", *arguments, *overrides, checkpoint=checkpoint)
        reports.append(torch.load(tmp_path / f"{name}.pt"))
    saved, *others = (report["final"] for report in reports)
    first = reports[0]["steps"][0]["reference"]
    assert any(not torch.equal(saved[name], first[name]) for name in saved)
    for other in others:
        assert other.keys() == saved.keys()
        assert all(torch.equal(other[name], saved[name]) for name in saved)
    assert reports[0]["refused"] == "reference.beta=0.5: the checkpoint's reference has 0.123"


def check_tied(ranks: list[dict], tensor: int) -> None:
    """One embedding, on the first stage and on the last."""
    found = [e for r in ranks for e in r["embeddings"]]
    assert len(found) == len(ranks)
    shards = {tuple(e.flatten()[:8].tolist()) for e in found}
    assert len(shards) == tensor  # the tensor-parallel ranks' halves, whatever the stage
