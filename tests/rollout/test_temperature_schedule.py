"""A temperature that changes during a run: what is sampled with it, and what the trainer's head makes of the tokens."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles import STOP, TOKENIZER, ScriptedEngine, ScriptedEnvironment, ids
from processes import run_ranks
from tiny import random_trajectories, write_model

from nemo_flashrl.algorithms.schedules import TemperatureSchedule
from nemo_flashrl.config import load
from nemo_flashrl.environments.environment import StepResult
from nemo_flashrl.records import Sampling
from nemo_flashrl.rollout.collector import Collector
from nemo_flashrl.rollout.episode import Limits
from nemo_flashrl.rollout.prompts import PromptStream

VOCAB_SIZE = 131
USUAL = [[0, 1.0], [0.25, 0.85]]
DONE = StepResult(reward=1.0, done=True, success=True)


def test_a_quarter_of_the_steps_at_one_the_rest_below() -> None:
    at = TemperatureSchedule(USUAL, steps=100)
    assert [at(step) for step in (0, 24, 25, 99)] == [1.0, 1.0, 0.85, 0.85]
    assert [TemperatureSchedule(USUAL, steps=3)(step) for step in range(3)] == [1.0, 0.85, 0.85]  # a quarter is 0.75
    assert TemperatureSchedule([(0, 1.0), (0.29, 0.5)], steps=100)(29) == 0.5  # 0.29 * 100 is below 29
    for wrong in ([[0.1, 1.0]], [[0, 1.0], [0, 2.0]], [[0, 1.0], [1, 2.0]], [[0, 1.0, 2.0]], [0.5], [["0", 1.0]]):
        with pytest.raises(ValueError, match="must be pairs .share of the steps, temperature."):
            TemperatureSchedule(wrong, steps=10)
    with pytest.raises(ValueError, match="temperature 0 must be above 0"):
        TemperatureSchedule([[0, 0]], steps=10)


def test_the_shipped_schedule_is_composed() -> None:
    config = load("rehearsal", ["output=x", "model.path=x", "+temperature=quarter"])
    assert [list(point) for point in config.rollout.temperature_schedule] == USUAL


@pytest.mark.parametrize("streaming", [False, True])
def test_each_trajectory_knows_what_it_was_sampled_at(streaming: bool) -> None:
    """A change holds for episodes that begin later; a resumed run samples at the step's own."""
    engine = ScriptedEngine(ids("get ( k 2 9 )"))

    async def run(first_version: int, state: dict | None = None) -> tuple[list[list[float]], dict]:
        source = Collector(
            engine,
            lambda: ScriptedEnvironment([DONE]),
            range(100),
            TOKENIZER,
            PromptStream(100),
            Limits(max_context=128),
            Sampling(max_tokens=8, stop_token_ids=(STOP,)),
            batch_size=4,
            max_in_flight=4,
            streaming=streaming,
            temperature=TemperatureSchedule([[0, 1.0], [0.5, 0.85]], steps=4),
        )
        if state is not None:
            source.load_state_dict(state)
        seen = []
        for version in range(first_version, 4):
            engine.requests.clear()
            batch = await source.collect(version)
            seen.append([t.temperature for t in batch.trajectories])
            assert batch.metrics["temperature"] == pytest.approx(np.mean(seen[-1]))
            asked = {request.temperature for _, request in engine.requests}
            assert asked <= {1.0, 0.85} and set(seen[-1]) <= {1.0, 0.85}
            source.trained(batch)
            await asyncio.sleep(0.01)  # the trainer trains; what streams goes on
        state = source.state_dict()
        await source.close()
        return seen, state

    seen, state = asyncio.run(run(0))
    if streaming:  # begun before the change, trained after it: they keep their own
        assert seen[:2] == [[1.0] * 4] * 2 and 1.0 in seen[2] and seen[3] == [0.85] * 4
    else:
        assert seen == [[1.0] * 4, [1.0] * 4, [0.85] * 4, [0.85] * 4]
        assert asyncio.run(run(3, state))[0] == [[0.85] * 4]


@pytest.mark.parametrize("overrides", [(), ("parallel.tensor=2", "parallel.sequence=true")], ids=["one", "tp2"])
def test_the_head_scores_each_trajectory_at_its_own_temperature(tmp_path, overrides) -> None:
    """A batch across the change, in the real trainer: transformers' log-probs at both temperatures."""
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "model", vocab_size=VOCAB_SIZE)
    trajectories = [
        replace(trajectory, temperature=0.85 if index % 2 else 1.0)
        for index, trajectory in enumerate(random_trajectories(6, VOCAB_SIZE, seed=4))
    ]
    (tmp_path / "trajectories.pkl").write_bytes(pickle.dumps(tuple(trajectories)))
    out = tmp_path / "scores.pt"
    run_ranks(
        2 if overrides else 1, "scoring", folder, tmp_path / "trajectories.pkl", out, VOCAB_SIZE,
        "batching.max_tokens_per_microbatch=200", *overrides,
    )  # fmt: skip
    found = {tuple(tokens.tolist()): scores for tokens, *scores in torch.load(out)["rows"]}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    for trajectory in trajectories:
        ids = torch.from_numpy(trajectory.token_ids)[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        for temperature in (1.0, 0.85):
            table = torch.log_softmax(logits / temperature, -1)
            logprobs, entropies = found[tuple(trajectory.token_ids[1:])]  # by its later tokens
            distances = (
                (logprobs[:-1].double() - table.gather(-1, ids[0, 1:, None])[:, 0]).abs().max(),
                (entropies[:-1].double() + (table.exp() * table).sum(-1)).abs().max(),
            )
            if temperature == trajectory.temperature:
                assert max(distances) < 2e-5
            else:
                assert min(distances) > 1e-2  # the other temperature is a wrong answer that shows
