"""Warnings of steps that train little: most tokens are observations, or every trajectory is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_ranks

from nemo_flashrl.callbacks.metrics import ActionShareWarning, LeftOutWarning
from nemo_flashrl.doctor.examine import examine
from nemo_flashrl.rehearsal.warm_start import make_warm_start
from nemo_flashrl.run.record import read_run


def test_it_is_said_once_with_three_remedies(caplog) -> None:
    warning = ActionShareWarning()
    for step, share in ((1, 0.05), (2, 0.049), (3, 0.01)):  # 5% itself is enough
        warning.see(step, share)
    (message,) = caplog.messages
    assert message.startswith("step 2: 4.9% of the tokens are actions (under 5%)")
    for remedy in ("shorten observations", "truncate them (rollout.max_obs", "summarise them (rollout.summarizer)"):
        assert remedy in message


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_a_run_that_learns_from_its_tokens_hears_nothing(caplog, share: float) -> None:
    ActionShareWarning().see(1, share)
    assert not caplog.messages


def test_a_step_that_trains_nothing_is_said_once_with_its_reason(caplog) -> None:
    warning = LeftOutWarning()
    for step, share in ((1, 0.75), (2, 1.0), (3, 1.0)):
        warning.see(step, {"left_out_share": share, "dropped_malformed": 4 * share, "dropped_shaping": 0.0})
    warning.see(4, {})
    (message,) = caplog.messages
    assert message == (
        "step 2: every trajectory is left out of the loss (dropped_malformed 4), nothing is trained: every one has a "
        "malformed action, set selection.malformed=keep; read samples.jsonl"
    )


def test_a_run_that_trains_nothing_says_so_and_the_doctor_knows_why(tmp_path: Path) -> None:
    """Tool calls have no fenced code: the code mask leaves every one out. No gate has rejected them."""
    model = make_warm_start(tmp_path / "model", steps=0)
    settings = [f"output={tmp_path / 'run'}", f"model.path={model}", "trainer.steps=2", "rollout.batch_size=4"]
    said = run_ranks(1, "training", "rehearsal", *settings, "selection.tokens=code", "checkpoint.every_steps=0")
    assert "step 1: every trajectory is left out of the loss (dropped_no_code 4), nothing is trained" in said
    assert "step 2: every trajectory" not in said
    run = read_run(tmp_path / "run")
    assert [step["left_out_share"] for step in run.steps] == [1, 1]
    assert not run.has("gate_acceptance")
    assert [finding.rule.name for finding in examine(run)] == ["all_left_out"]
