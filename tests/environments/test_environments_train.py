"""Every environment that ships, in its experiment: two optimizer steps of a tiny model that has learnt nothing.

All but the key-value store, whose experiment is the rehearsal.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
from doubles import text_tokenizer
from processes import run_ranks
from test_environment_configs import SHIPPED
from test_openenv import url  # noqa: F401
from tiny import write_model

from nemo_flashrl.run.jsonl import read_json_lines, read_metrics

CONTEXT = 2048
SETTINGS = {
    "verifiable_math": ("\\boxed{}", []),
    "reasoning_gym": ("<answer>", []),
    "python_tool": ("Python", []),
    "textworld": ("-=", ["quest_length=2", "rooms=2", "num_tasks=2", "games_folder={folder}/games"]),
    "openenv": ("Guess a number.", ["observation_field=text", "reset_options={{lenient: true}}", "url={url}"]),
}  # words of every prompt, and what makes the task small


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = copy.deepcopy(text_tokenizer())
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    folder = write_model(tmp_path_factory.mktemp("m") / "m", vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", sorted({*SHIPPED} - {"key_value_store"}))
def test_two_steps(name: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    words, small = SETTINGS[name]
    server = request.getfixturevalue("url") if name == "openenv" else ""
    run_ranks(
        1,
        "training",
        name,
        f"output={tmp_path}/run",
        f"model.path={model}",
        f"model.context_length={CONTEXT}",
        "model.precision=fp32",
        "rollout.batch_size=4",
        "rollout.max_in_flight=4",
        "rollout.max_turns=2",
        "rollout.max_tokens_per_turn=16",
        "rollout.max_observation_tokens=64",
        "trainer.steps=2",
        "checkpoint.every_steps=0",
        *(f"environment.settings.{line.format(folder=tmp_path, url=server)}" for line in small),
    )
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(math.isfinite(step["loss"]) and step["policy_tokens"] >= 4 for step in steps)
    assert not any(step["episodes_environment_error"] for step in steps)
    samples = list(read_json_lines(tmp_path / "run" / "samples.jsonl"))
    assert len(samples) == 8 and all(words in str(sample) for sample in samples)
