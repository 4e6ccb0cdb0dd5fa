"""Loss and gradients of the real trainer's step: the same at every TP x PP x DP, and as plain torch in float64."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from processes import run_ranks
from tiny import random_trajectories, write_model

from nemo_flashrl.algorithms import flash_reinforce_loss

VOCAB_SIZE = 131  # padded to 256 rows at TP=1 and TP=2: rank 1 of two owns three tokens and padding
OFF_POLICY_NOISE = 1.5  # nats, standard deviation: rows of odd index are sampled on-policy, the others this far from it
PADDED = "batching.layout=padded"
LAYOUTS = {  # processes, overrides; every row splits the 12 trajectories into microbatches in another way
    "one process": (1, ["batching.max_tokens_per_microbatch=256"]),
    "tp2": (2, ["parallel.tensor=2", "batching.max_tokens_per_microbatch=10000"]),
    "tp2 sequence": (2, ["parallel.tensor=2", "parallel.sequence=true", "model.head_chunk_tokens=7"]),
    "pp2": (
        2,
        [
            "parallel.pipeline=2",
            "batching.max_tokens_per_microbatch=128",
            "model.head_logits_budget_mib=0",
            "model.head_chunk_tokens=31",
        ],
    ),
    "one process padded": (1, [PADDED, "batching.max_tokens_per_microbatch=300"]),
    "tp2 sequence padded": (2, [PADDED, "parallel.tensor=2", "parallel.sequence=true"]),
    "pp2 padded": (2, [PADDED, "parallel.pipeline=2", "batching.max_tokens_per_microbatch=256"]),
    "dp2 padded": (2, [PADDED, "batching.max_tokens_per_microbatch=200"]),
    "dp2": (2, ["batching.max_tokens_per_microbatch=200"]),
    "tp2 pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2", "batching.max_tokens_per_microbatch=180"]),
}


def hf_logprobs(model, trajectory) -> torch.Tensor:
    """[S - 1], float64: the log-prob of token t + 1 at position t."""
    ids = torch.from_numpy(trajectory.token_ids)[None]
    return torch.log_softmax(model(ids).logits.double(), -1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A model, trajectories of which about half pass the gate, and the plain float64 loss and gradients."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("parity")
    folder = write_model(root / "model", vocab_size=VOCAB_SIZE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    rng = np.random.default_rng(5)
    trajectories = []
    for index, trajectory in enumerate(random_trajectories(12, VOCAB_SIZE, seed=3)):
        with torch.no_grad():
            logprobs = np.concatenate([[0.0], hf_logprobs(model, trajectory).numpy()])
        noise = rng.normal(0, 0.001 if index % 2 else OFF_POLICY_NOISE, len(logprobs))
        behavior = np.where(trajectory.action_mask, np.minimum(logprobs + noise, -1e-3), 0).astype(np.float32)
        trajectory.behavior_logprobs[:] = behavior
        trajectories.append(trajectory)
    (root / "trajectories.pkl").write_bytes(pickle.dumps(tuple(trajectories)))
    return root, folder, *plain_step(model, trajectories)


def plain_step(model, trajectories):
    length = max(len(t.token_ids) for t in trajectories) - 1
    logprobs = torch.zeros(len(trajectories), length, dtype=torch.float64)
    behavior, mask = torch.zeros_like(logprobs), torch.zeros(logprobs.shape, dtype=torch.bool)
    rows = []
    for i, t in enumerate(trajectories):
        own = len(t.token_ids) - 1
        rows.append(torch.nn.functional.pad(hf_logprobs(model, t), (0, length - own)))
        behavior[i, :own] = torch.from_numpy(t.behavior_logprobs[1:])
        mask[i, :own] = torch.from_numpy(t.action_mask[1:])
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    loss, stats = flash_reinforce_loss(torch.stack(rows), behavior, rewards, mask)
    loss.backward()
    return loss.item(), stats, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients(case, layout: str) -> None:
    root, folder, loss, stats, gradients = case
    assert 3 <= int(stats["admitted"].sum()) <= 9  # the gate decides something
    processes, overrides = LAYOUTS[layout]
    out = root / f"{layout.replace(' ', '_')}.pt"
    run_ranks(processes, "parity", folder, root / "trajectories.pkl", out, VOCAB_SIZE, *overrides)
    step = torch.load(out)
    assert step["stats"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert step["stats"]["admitted"] == int(stats["admitted"].sum())
    assert step["gradients"].keys() == gradients.keys()
    for name, expected in gradients.items():
        error = (step["gradients"][name].double() - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_replays_dropout(case, recompute: str) -> None:
    """TP=2, dropout on in attention (differs from rank to rank) and between layers (equal): the same gradients."""
    root, folder, *_ = case
    steps = []
    for mode, dropout in (("none", 0.1), (recompute, 0.1), ("none", 0.0)):
        out = root / f"recompute_{mode}_{dropout}.pt"
        overrides = ["parallel.tensor=2", f"model.recompute={mode}"]
        arguments = (folder, root / "trajectories.pkl", out, VOCAB_SIZE, *overrides)
        run_ranks(2, "parity", *arguments, dropout=dropout, gate=False)
        steps.append(torch.load(out))
    assert steps[1]["stats"]["loss"] == pytest.approx(steps[0]["stats"]["loss"], rel=1e-6)
    for name, expected in steps[0]["gradients"].items():
        assert (steps[1]["gradients"][name] - expected).norm() < 1e-5 * expected.norm(), name
    off = steps[2]["stats"]["loss"]
    assert abs(steps[0]["stats"]["loss"] - off) > 1e-3 * abs(off)  # dropout was on


def test_dividing_by_the_admitted_would_show(case) -> None:
    """The counterexample: B counts rejected trajectories too."""
    _, _, loss, stats, _ = case
    wrong = loss * 12 / int(stats["admitted"].sum())
    assert abs(wrong - loss) > 0.1 * abs(loss)
