"""`flashrl rehearse --experiment`: what shrinks and what stays; test_packaging.py runs one whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nemo_flashrl.config import RunConfig, conf_folder, load
from nemo_flashrl.rehearsal import experiment
from nemo_flashrl.rehearsal.small import small_data_parallel, small_overrides, small_tokenizer

NEEDED = ["output=x", "model.path=x"]
NAMES = sorted(path.stem for path in (conf_folder() / "experiment").glob("*.yaml"))


def small(name: str, group_size: int = 1, *overrides: str) -> RunConfig:
    given = [*NEEDED, *overrides]
    return load(name, [*given, *small_overrides(load(name, given), group_size)])


def test_a_layout_of_eight_processes_is_kept() -> None:
    """Tensor 2 of eight GPUs leaves four replicas; two of them show what several do."""
    job = small("alfworld_50_turns")
    full = load("alfworld_50_turns", NEEDED)
    assert job.parallel == full.parallel
    assert small_data_parallel(full) == 2
    assert job.rollout.batch_size == 8  # 2 replicas x 4
    assert job.rollout.max_in_flight == 12  # 96 / 64 of the batch, as there
    assert job.rollout.mode == full.rollout.mode == "in_flight"
    assert job.rollout.max_staleness == full.rollout.max_staleness
    assert job.algorithm == full.algorithm
    assert job.environment == full.environment
    assert job.model.recompute == full.model.recompute == "full"


def test_a_larger_layout_keeps_each_kind() -> None:
    """8 x 4 processes become 2 x 2, with the sequence still split over the tensor ranks."""
    job = small("llama3_70b")
    assert (job.parallel.tensor, job.parallel.pipeline, job.parallel.context) == (2, 2, 1)
    assert job.parallel.sequence
    assert small_data_parallel(load("llama3_70b", NEEDED)) == 1  # 32 GPUs are one replica


def test_groups_stay_whole() -> None:
    assert small("math_r1_distill_1_5b", 6).rollout.batch_size == 12  # 8 trajectories are no whole number of groups


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"rehearsal"}))
def test_every_experiment_shrinks(name: str) -> None:
    """Valid and small, and an episode fits its context."""
    job = small(name)
    assert job.rollout.batch_size <= 16
    assert job.model.context_length <= 2048
    assert job.batching.max_tokens_per_microbatch >= job.model.context_length
    assert job.rollout.max_turns * job.rollout.max_tokens_per_turn < job.model.context_length


def test_any_text_is_tokens_and_back() -> None:
    tokenizer = small_tokenizer(64)
    text = "def f(x):\n    return 'ß→' # 1"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids) == small_tokenizer(64).convert_ids_to_tokens(ids)  # the same each time
    prompt = "You play a text game. Answer each time with one command on a line of its own, such as: go east"
    assert len(tokenizer(prompt).input_ids) < len(prompt) / 2


def test_an_open_model_is_rehearsed_with_the_tiny_ones_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiment's own context stays what is shrunk, not the tiny model's 128."""
    started = []
    monkeypatch.setattr(experiment, "run_training", lambda *given: started.append(given) or sys.exit(0))
    with pytest.raises(SystemExit):
        experiment.rehearse_experiment("python_tool", tmp_path / "out", ())
    (name, overrides, *_) = started[0]
    assert name == "python_tool"
    assert "model.context_length=1816" in overrides  # 1600 + 3 * (24 + 48)
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["model_type"] == "qwen2"
