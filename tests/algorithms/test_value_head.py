"""The value head: its numbers by hand, and its place in a step of the real trainer."""

from __future__ import annotations

import pickle

import pytest
import torch
from plain import VOCAB_SIZE
from processes import run_ranks
from tiny import random_trajectories, write_model

from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce
from nemo_flashrl.algorithms.value_head import ValueHead
from nemo_flashrl.batching.planner import BatchingSettings, LengthBatcher
from nemo_flashrl.config import load
from nemo_flashrl.data.datamodule import plan_steps
from nemo_flashrl.models.scoring import first_places
from nemo_flashrl.preflight.prepare import check_groups
from nemo_flashrl.records import Batch


def test_a_step_by_hand() -> None:
    """States (3, 0) and (0, 4) normalise to unit vectors, centred +-(1/2, -1/2). At V = 0 and returns 1 and 0 the loss
    is 1/2, its gradient by w +-(1/2) each and by b -1: Adam's first step is the learning rate against each sign."""
    head = ValueHead(learning_rate=0.1, updates=1)
    states = torch.tensor([[3.0, 0.0], [0.0, 4.0]], requires_grad=True)
    assert head.predict(states).tolist() == [0, 0]
    assert head.update(states, torch.tensor([1.0, 0.0])) == pytest.approx(0.5)
    # w = (0.1, -0.1), b = 0.1: V = 0.1 + 0.1 and 0.1 - 0.1.
    assert head.predict(states).tolist() == pytest.approx([0.2, 0.0], abs=1e-6)
    assert head.predict(7 * states).tolist() == head.predict(states).tolist()  # a state's length says nothing
    assert states.grad is None and not head.predict(states).requires_grad  # nothing reaches the policy


def test_learns_what_a_state_tells() -> None:
    generator = torch.Generator().manual_seed(0)
    head, direction = ValueHead(learning_rate=0.05, updates=8), torch.randn(16, generator=generator)
    losses = []
    for _ in range(60):
        states = torch.randn(32, 16, generator=generator)
        returns = (states @ direction > 0).float()
        losses.append(head.update(states, returns))
    assert losses[0] > 0.4  # V = 0
    assert sum(losses[-5:]) / 5 < 0.13 < 0.25  # the best constant has 1/4


def test_goes_on_after_a_resume() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 5, generator=generator), torch.rand(8, generator=generator)) for _ in range(4)]
    straight, resumed = ValueHead(), ValueHead()
    resumed.load_state_dict(ValueHead().state_dict())  # before the first batch
    for index, (states, returns) in enumerate(batches):
        straight.update(states, returns)
        resumed.update(states, returns)
        if index == 1:
            saved = pickle.loads(pickle.dumps(resumed.state_dict()))
            resumed = ValueHead()
            resumed.load_state_dict(saved)
    assert torch.equal(straight.predict(batches[0][0]), resumed.predict(batches[0][0]))


def test_a_resumed_head_learns_at_the_rate_of_its_own_run() -> None:
    """Adam's first step is the learning rate, whatever the gradient: a resumed one moves by the new rate too."""
    states, saved, changed = torch.ones(1, 1), ValueHead(learning_rate=0.1, updates=1), ValueHead(0.2, updates=1)
    saved.update(states, torch.ones(1))
    changed.load_state_dict(pickle.loads(pickle.dumps(saved.state_dict())))
    before = float(changed.predict(states))
    changed.update(states, torch.full((1,), 1 + before))  # an error of 1 again: the gradient of the first step
    assert float(changed.predict(states)) - before == pytest.approx(0.2, rel=1e-4)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_first_places(layout: str) -> None:
    """The place in the head's order [S, G] whose target is the first sampled token of each trajectory."""
    trajectories = random_trajectories(5, 50)
    settings = BatchingSettings(10**4, 100, layout=layout, multiple=4, context_margin=0.0)
    (step,) = plan_steps(Batch(trajectories, 0), FlashReinforce(), LengthBatcher(settings), dp_size=1, seed=0)
    for microbatch in step.microbatches:
        places, known = first_places(microbatch)
        assert known.all()
        own = [trajectories[place] for place in microbatch["trajectory"]]
        firsts = [int(t.token_ids[t.action_mask.argmax()]) for t in own]
        assert microbatch["targets"].transpose(0, 1).reshape(-1)[places].tolist() == firsts
        microbatch["target_mask"][microbatch["row_index"] == 0] = False
        assert first_places(microbatch)[1].tolist() == [False] + [True] * (len(own) - 1)


def hidden_states(folder, trajectories) -> torch.Tensor:
    """[B, H] in float64, of transformers' own model."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    rows = []
    for t in trajectories:
        first = int(t.action_mask.argmax())
        with torch.no_grad():
            rows.append(model(torch.from_numpy(t.token_ids[:first])[None]).last_hidden_state[0, -1])
    return torch.stack(rows)


LAYOUTS = [
    ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true", "batching.max_tokens_per_microbatch=180"],
    ["batching.layout=padded", "batching.max_tokens_per_microbatch=200"],
]


@pytest.mark.parametrize(("processes", "layout"), [(4, LAYOUTS[0]), (2, LAYOUTS[1])])
def test_steps_of_the_real_trainer(tmp_path, processes: int, layout: list[str]) -> None:
    """Two steps on the same trajectories. First V = 0; then advantages are R - V less their mean, on every rank."""
    folder = write_model(tmp_path / "model", vocab_size=VOCAB_SIZE)
    trajectories = random_trajectories(12, VOCAB_SIZE, seed=3)
    (tmp_path / "trajectories.pkl").write_bytes(pickle.dumps(trajectories))
    out = tmp_path / "out.pt"
    options = ["trainer.steps=2", "optimizer.learning_rate=1e-9", "value_head.learning_rate=0.05"]
    run_ranks(
        processes, "value", folder, tmp_path / "trajectories.pkl", out, VOCAB_SIZE, *options, *layout, timeout=300
    )
    run = torch.load(out, weights_only=False)
    right = hidden_states(folder, trajectories)
    assert len(run["states"]) == 2
    for found in run["states"]:
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-4)
    rewards = torch.tensor([t.reward for t in trajectories])
    head = ValueHead(learning_rate=0.05)
    for number, states in enumerate(run["states"]):
        values = head.predict(states)
        left = rewards - values
        advantages = dict(enumerate((left - left.mean()).tolist()))
        for rank in run["ranks"]:
            trained = {place: advantage for place, advantage in rank[number]["trained"] if place >= 0}
            assert trained == pytest.approx({place: advantages[place] for place in trained}, abs=1e-6)
        loss, written = head.update(states, rewards), run["ranks"][0][number]["metrics"]
        assert written["value_mean"] == pytest.approx(float(values.mean()), abs=1e-6)
        assert written["value_loss"] == pytest.approx(loss, rel=1e-5)
    assert values.abs().max() > 0.05  # it has learnt something by the second step
    assert run["head"]["count"] == 24


def test_what_it_does_not_go_with() -> None:
    base = ["output=unused", "model.path=unused", "value_head.learning_rate=0.01"]
    with pytest.raises(ValueError, match="hidden states are not gathered over context-parallel ranks"):
        load("rehearsal", [*base, "parallel.context=2"])
    with pytest.raises(ValueError, match="advantage.turn_coefficient=1: a KL in the reward and a value head"):
        load("rehearsal", [*base, "advantage.turn_coefficient=1"])
    with pytest.raises(ValueError, match="the same for all rollouts of a group of flash_reinforce and cancels"):
        check_groups(load("rehearsal", base), group_size=8)
    with pytest.raises(ValueError, match="rollout.dynamic_sampling_max_groups=2: flash_reinforce has no groups; set 0"):
        check_groups(load("rehearsal", [*base, "rollout.dynamic_sampling_max_groups=2"]), group_size=1)
