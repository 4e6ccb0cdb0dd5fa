"""The loss and the gradients of one training step as plain torch in float64, through transformers' own model."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tiny import random_trajectories, write_model
from torch import Tensor

from nemo_flashrl.algorithms import flash_reinforce_loss
from nemo_flashrl.records import Trajectory

VOCAB_SIZE = 131  # padded to 256 rows at TP=1 and TP=2: rank 1 of two owns three tokens and padding
OFF_POLICY_NOISE = 1.5  # nats, standard deviation: rows of odd index are sampled on-policy, the others this far from it


@dataclass(frozen=True)
class Case:
    """A model, trajectories of which about half pass the gate, and what plain float64 makes of them."""

    folder: Path  # Hugging Face checkpoint
    pickled: Path  # the trajectories
    trajectories: list[Trajectory]
    loss: float
    stats: dict[str, Tensor]
    gradients: dict[str, Tensor]  # under Hugging Face names

    @property
    def admitted(self) -> int:
        return int(self.stats["admitted"].sum())


def make_case(root: Path, family: str = "qwen2", *, tied: bool = False) -> Case:
    """Written into `root`; 12 trajectories, of which four have two segments."""
    from transformers import AutoModelForCausalLM

    folder = write_model(root / "model", family, vocab_size=VOCAB_SIZE, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    rng = np.random.default_rng(5)
    trajectories = []
    for index, trajectory in enumerate(random_trajectories(12, VOCAB_SIZE, seed=3)):
        if index % 3 == 2:
            middle = len(trajectory.token_ids) // 2
            trajectory.action_mask[middle] = False  # a segment begins with a prompt
            trajectory = replace(trajectory, segment_starts=(0, middle))
        with torch.no_grad():
            logprobs = np.concatenate([[0.0], hf_logprobs(model, trajectory).numpy()])
        noise = rng.normal(0, 0.001 if index % 2 else OFF_POLICY_NOISE, len(logprobs))
        behavior = np.where(trajectory.action_mask, np.minimum(logprobs + noise, -1e-3), 0).astype(np.float32)
        trajectory.behavior_logprobs[:] = behavior
        trajectories.append(trajectory)
    pickled = root / "trajectories.pkl"
    pickled.write_bytes(pickle.dumps(tuple(trajectories)))
    return Case(folder, pickled, trajectories, *plain_step(model, trajectories))


def hf_logprobs(model, trajectory: Trajectory) -> Tensor:
    """[S - 1], float64: the log-prob of token t + 1 at position t; 0 for a token that begins a segment."""
    pieces = []
    for part in trajectory.segments:
        ids = torch.from_numpy(trajectory.token_ids[part])[None]
        pieces.append(torch.log_softmax(model(ids).logits.double(), -1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0])
    return torch.cat([torch.nn.functional.pad(piece, (1, 0)) for piece in pieces])[1:]


def plain_step(model, trajectories: list[Trajectory]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, stats, gradients by name)."""
    length = max(len(t.token_ids) for t in trajectories) - 1
    behavior = torch.zeros(len(trajectories), length, dtype=torch.float64)
    mask = torch.zeros(behavior.shape, dtype=torch.bool)
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


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest norm of a difference relative to what is expected, and of which tensor."""
    assert found.keys() == expected.keys()
    return max(
        (float((found[name].double() - right.double()).norm() / right.double().norm()), name)
        for name, right in expected.items()
    )
