"""Techniques of different rooms in one step of the real trainer: reference, token mask, normalisation with clip, length
penalty, a filter, and turns, over context ranks; against the formulas in float64."""

from __future__ import annotations

import pickle
import statistics

import numpy as np
import pytest
import torch
from doubles import text_tokenizer
from plain import hf_logprobs, worst_error
from processes import run_ranks
from tiny import write_model

from nemo_flashrl.records import Trajectory

VOCAB_SIZE = 256
SETTINGS = [
    "advantage.clip=0.8",
    "advantage.turn_coefficient=0.25",
    "advantage.turn_discount=0.5",
    "selection.tokens=code",
    "selection.malformed=leave_out",
    "length_penalty.coefficient=0.2",
    "length_penalty.unit=turns",
    "length_penalty.limit=1",
    "length_penalty.decay_steps=4",
    "reference.mode=frozen",
    "kl.coefficient=0.3",
]
SAY, CODE = "so ", "print('é')\n"
# Reward, rewards of turns, and each turn as code or talk; the first of the second group is malformed.
EPISODES = [
    (1.0, (0.0, 1.0), (CODE, SAY)),
    (0.0, (0.0,), (CODE + CODE,)),
    (0.0, (0.5, 0.0, 0.0), (SAY, CODE, CODE)),
    (3.0, (3.0,), (CODE,)),
    (1.0, (1.0,), (CODE,)),
    (0.0, (0.0, 0.0), (CODE, CODE)),
    (2.0, (0.0, 2.0), (CODE, CODE + CODE)),
    (1.0, (1.0,), (SAY,)),  # without code
]


def make_trajectory(index: int, random: np.random.Generator) -> tuple[Trajectory, np.ndarray]:
    """The trajectory, and which of its tokens are code."""
    reward, turn_rewards, said = EPISODES[index]
    tokens, owner, code = random.integers(0, 90, 3).tolist(), [-1] * 3, [False] * 3
    for number, text in enumerate(said):
        is_code = text != SAY
        pieces = [("```\n", False), (text, True), ("```", False)] if is_code else [(text, False)]
        for piece, inside in [*pieces, (None, False)]:
            own = [5, 6] if piece is None else text_tokenizer()(piece, add_special_tokens=False).input_ids
            tokens += own
            owner += [-1 if piece is None else number] * len(own)
            code += [inside] * len(own)
    owner = np.array(owner, dtype=np.int32)
    trajectory = Trajectory(
        prompt_index=index,
        group=index // 4,
        token_ids=np.array(tokens),
        action_mask=owner >= 0,
        behavior_logprobs=np.zeros(len(owner), dtype=np.float32),
        versions=np.where(owner >= 0, 0, -1).astype(np.int32),
        reward=reward,
        turns=len(said),
        end_reason="done",
        failed=False,
        turn_rewards=turn_rewards,
        turn_of_token=owner,
        malformed=index == 4,
    )
    return trajectory, np.array(code)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Two checkpoints, trajectories sampled near the second, where their code is."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("together")
    folders = [write_model(root / str(seed), vocab_size=VOCAB_SIZE, seed=seed) for seed in (0, 1)]
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    models = [AutoModelForCausalLM.from_pretrained(folder, **options) for folder in folders]
    with torch.no_grad():
        for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            ours.copy_((theirs + 0.02 * (ours - theirs)).float())
    models[1].float().save_pretrained(folders[1])
    models[1].double()
    random = np.random.default_rng(2)
    made = [make_trajectory(index, random) for index in range(8)]
    for trajectory, _ in made:
        with torch.no_grad():
            logprobs = np.concatenate([[0.0], hf_logprobs(models[1], trajectory).numpy()])
        noisy = np.minimum(logprobs + random.normal(0, 0.2, len(logprobs)), -1e-3)
        trajectory.behavior_logprobs[:] = np.where(trajectory.action_mask, noisy, 0)
    (root / "trajectories.pkl").write_bytes(pickle.dumps(tuple(trajectory for trajectory, _ in made)))
    return root, folders, models, made


def returns(rewards: tuple[float, ...], discount: float) -> list[float]:
    return [sum(discount ** (j - k) * r for j, r in enumerate(rewards) if j >= k) for k in range(len(rewards))]


def advantages(turns: bool = True) -> list[list[float]]:
    """Of each turn of each trajectory."""
    share = 0.25 if turns else 0.0
    by_turn = [returns(own, 0.5) for _, own, _ in EPISODES]
    baseline = statistics.mean(statistics.mean(own) for own in by_turn)
    out = []
    for index, own in enumerate(by_turn):
        group = [reward for reward, *_ in EPISODES[index // 4 * 4 : index // 4 * 4 + 4]]
        scored = (EPISODES[index][0] - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
        penalty = 0.2 * (len(own) - 1)
        raw = [(1 - share) * scored + share * (g - baseline) - penalty for g in own]
        out.append([min(max(value, -0.8), 0.8) for value in raw])
    return out


def plain(models, made, *, turns: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradients) in float64, one trajectory and one token at a time."""
    models[1].zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for (trajectory, code), own in zip(made, advantages(turns), strict=True):
        if trajectory.malformed or not code.any():
            continue
        logprobs = hf_logprobs(models[1], trajectory)
        with torch.no_grad():
            reference = hf_logprobs(models[0], trajectory)
        for place in np.flatnonzero(code):
            advantage = own[trajectory.turn_of_token[place]]
            now = logprobs[place - 1]
            ratio = (now - float(trajectory.behavior_logprobs[place])).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            distance = reference[place - 1] - now
            total = total + (0.3 * (distance.exp() - 1 - distance) - surrogate) / (len(made) * int(code.sum()))
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in models[1].named_parameters()}


def test_a_step_of_all_of_them_is_that_of_plain_float64(case) -> None:
    root, folders, models, made = case
    assert 0.8 in {abs(a) for own in advantages() for a in own}  # the clip is at work
    out = root / "step.pt"
    layout = ["parallel.context=2", "batching.max_tokens_per_microbatch=160"]
    run_ranks(2, "kl", *folders, root / "trajectories.pkl", out, VOCAB_SIZE, *SETTINGS, *layout)
    step = torch.load(out)
    loss, gradients = plain(models, made)
    assert step["stats"]["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert step["stats"]["policy_tokens"] == sum(code.sum() for t, code in made)
    assert worst_error(step["gradients"]["gradients"], gradients) < (2e-5,)
    metrics = step["gradients"]["metrics"]
    assert (metrics["dropped_malformed"], metrics["dropped_no_code"], metrics["effective_samples"]) == (1, 1, 6)
    assert metrics["length_penalty"] == pytest.approx(0.2 * (1 + 2 + 1 + 1) / 8)
    _, wrong = plain(models, made, turns=False)  # one advantage a trajectory
    assert worst_error(wrong, gradients) > (1e-2,)
