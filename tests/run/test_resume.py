"""What may be resumed: output folders, complete and torn checkpoints, records that are cut back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_ranks

from nemo_flashrl.config import load
from nemo_flashrl.run.folder import AlreadyComplete, complete_checkpoints, cut_records, open_folder, record_files
from nemo_flashrl.run.jsonl import append_json_line, read_json_lines

HF_CONFIG = {"model_type": "qwen2", "vocab_size": 515, "hidden_size": 64, "num_hidden_layers": 2}


def open_(folder: Path, *overrides: str, **hf_config):
    config = load("rehearsal", [f"output={folder}", "model.path=here", "trainer.steps=8", *overrides])
    return open_folder(config, HF_CONFIG | hf_config)


def write_checkpoint(folder: Path, step: int) -> Path:
    """As NeMo and Megatron leave one."""
    path = folder / "checkpoints" / f"step={step}"
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "metadata.json").write_text("{}")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a run of 8 steps, of which 4 are in a checkpoint."""
    folder = tmp_path / "run"
    opened = open_(folder)
    assert not folder.exists()  # looking changes nothing
    opened.begin()
    write_checkpoint(folder, 2)
    write_checkpoint(folder, 4)
    return folder


def test_the_newest_complete_checkpoint_is_used(run: Path) -> None:
    torn = run / "checkpoints" / "step=6" / "weights"
    torn.mkdir(parents=True)
    (torn / "__0_0.distcp").write_bytes(b"half")
    half_removed = write_checkpoint(run, 7)
    half_removed.with_name("step=7-unfinished").touch()
    write_checkpoint(run, 10).rename(run / "checkpoints" / "copy of step=10")
    opened = open_(run)
    assert (opened.step, opened.checkpoint) == (4, run / "checkpoints" / "step=4")
    assert sorted(complete_checkpoints(run / "checkpoints")) == [2, 4]


def test_steps_are_numbers(run: Path) -> None:
    """As text, step=10 comes before step=4."""
    write_checkpoint(run, 10)
    assert open_(run, "trainer.steps=12").step == 10


def test_a_run_without_a_checkpoint_starts_at_its_beginning(tmp_path: Path) -> None:
    open_(tmp_path / "run").begin()
    append_json_line(tmp_path / "run" / "metrics.jsonl", {"step": 1})
    opened = open_(tmp_path / "run")
    assert (opened.step, opened.checkpoint) == (0, None)
    opened.begin()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


def test_a_start_that_trained_nothing_binds_no_later_one(tmp_path: Path, capsys) -> None:
    """It failed before its first step: a corrected configuration begins in the same folder, another model too."""
    open_(tmp_path / "run").begin()
    (tmp_path / "run" / "metrics.jsonl").touch()
    opened = open_(tmp_path / "run", "optimizer.learning_rate=0.5", "algorithm=grpo", vocab_size=516)
    assert (opened.step, opened.checkpoint) == (0, None)
    open_(tmp_path / "run", "checkpoint.resume=false")
    with opened.held(by_this_rank=True):
        opened.begin()
    assert capsys.readouterr().err == ""
    append_json_line(tmp_path / "run" / "metrics.jsonl", {"step": 1})
    assert open_(tmp_path / "run", "optimizer.learning_rate=0.5", "algorithm=grpo", vocab_size=516).step == 0
    with pytest.raises(ValueError, match="algorithm.name is 'flash_reinforce'"):
        open_(tmp_path / "run", vocab_size=516)


def test_steps_that_no_checkpoint_holds_are_named_and_their_records_kept(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    open_(run).begin()
    for number in (1, 2):
        for step in (1, 2, 3):
            append_json_line(run / "metrics.jsonl", {"step": step})
            append_json_line(run / "samples.jsonl", {"step": step, "start": number})
        open_(run).begin()
        aside = run / f"interrupted-{number}"
        assert capsys.readouterr().err == (
            f"output={str(run)!r}: steps 1 to 3 are trained again: no checkpoint holds them; their records are kept in "
            f"{aside}\n"
        )
        assert [r["step"] for r in read_json_lines(aside / "metrics.jsonl")] == [1, 2, 3]
        assert [r["start"] for r in read_json_lines(aside / "samples.jsonl")] == [number] * 3
        assert (run / "metrics.jsonl").read_text() == ""
        assert not (run / "trajectories.jsonl").exists()


def test_steps_after_the_checkpoint_are_named(run: Path, capsys) -> None:
    for step in range(1, 7):
        append_json_line(run / "metrics.jsonl", {"step": step})
    open_(run).begin()
    assert capsys.readouterr().err == (
        f"output={str(run)!r}: steps 5 to 6 are trained again: the newest checkpoint is of step 4, later records are "
        "replaced\n"
    )


def test_records_are_cut_back_to_the_checkpoint(run: Path) -> None:
    for name in ("metrics.jsonl", "trajectories.jsonl", "samples.jsonl"):
        for step in (3, 3, 4, 5, 6):
            append_json_line(run / name, {"step": step, "value": None})
        with (run / name).open("a") as file:
            file.write('{"step": 7, "val')  # torn by a kill
    (run / "preempted").touch()
    open_(run).begin()
    for name in ("metrics.jsonl", "trajectories.jsonl", "samples.jsonl"):
        assert [r["step"] for r in read_json_lines(run / name)] == [3, 3, 4]
        assert (run / name).read_text().endswith("}\n")
    assert not (run / "preempted").exists()
    cut_records(run / "nothing there.jsonl", 3)


def test_where_it_computes_and_how_long_may_change(run: Path) -> None:
    assert open_(run, "parallel.tensor=2", "trainer.steps=100", "checkpoint.keep=7").step == 4
    assert open_(run, "cluster.nodes=4", "rollout.servers=[http://another-node:8000]").step == 4


REFUSED = {  # overrides, Hugging Face configuration -> what the line says
    "another setting": (
        ["optimizer.learning_rate=0.5"],
        {},
        ["optimizer.learning_rate is 0.5", "0.001", "resume=true"],
    ),
    "another setting of a plug-in": (["algorithm.settings.delta=1"], {}, ["algorithm.settings.delta is 1", "0.003"]),
    "told not to": (["checkpoint.resume=false"], {}, ["checkpoint.resume=false", "never overwrites"]),
    "another algorithm": (["algorithm=grpo", "checkpoint.resume=true"], {}, ["'grpo'", "'flash_reinforce'"]),
    "another precision": (["model.precision=bf16", "checkpoint.resume=true"], {}, ["'bf16'", "'fp32'"]),
    "another average": (
        ["reference.mode=ema", "reference.evaluate=true", "checkpoint.resume=true"],
        {},
        ["reference.mode is 'ema'", "'none'"],
    ),
    "another vocabulary": (["checkpoint.resume=true"], {"vocab_size": 516}, ["vocab_size is 516", "515"]),
    "another model": (["checkpoint.resume=true"], {"num_hidden_layers": 4}, ["num_hidden_layers is 4", "2"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_run_is_refused_with_both_values(run: Path, case: str) -> None:
    overrides, hf_config, words = REFUSED[case]
    before = sorted(run.rglob("*"))
    with pytest.raises(ValueError) as refused:
        open_(run, *overrides, **hf_config)
    message = str(refused.value)
    assert "\n" not in message
    for word in [str(run), *words]:
        assert word in message
    assert sorted(run.rglob("*")) == before


def test_a_changed_setting_is_taken_when_asked_for(run: Path) -> None:
    open_(run, "optimizer.learning_rate=0.5", "checkpoint.resume=true").begin()
    assert open_(run, "optimizer.learning_rate=0.5").step == 4  # the run has it from now on


def test_a_complete_run_goes_on_only_when_it_is_made_longer(run: Path) -> None:
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "config.json").write_text(json.dumps({"whose": "the first 8 steps"}))
    write_checkpoint(run, 8)
    with pytest.raises(AlreadyComplete) as complete:
        open_(run)
    assert str(complete.value) == f"output={str(run)!r}: the run is complete (8 steps), its policy in {run}/checkpoint"
    with pytest.raises(ValueError, match="holds a complete run of 8 steps: raise trainer.steps above 8 to resume"):
        open_(run, "trainer.steps=6")
    open_(run, "trainer.steps=12").begin()
    assert json.loads((run / "checkpoint-8" / "config.json").read_text())["whose"] == "the first 8 steps"
    assert open_(run, "trainer.steps=12").step == 8


def test_a_complete_run_without_checkpoints_is_not_begun_anew(tmp_path: Path) -> None:
    open_(tmp_path / "run").begin()
    (tmp_path / "run" / "checkpoint").mkdir()
    with pytest.raises(AlreadyComplete):
        open_(tmp_path / "run")
    with pytest.raises(
        ValueError, match="holds a complete run of 8 steps: it left no checkpoint: choose another folder"
    ):
        open_(tmp_path / "run", "trainer.steps=100")


def test_a_complete_run_whose_last_checkpoint_is_older_is_not_trained_again(run: Path) -> None:
    """With checkpoint.every_steps=0 the last one is of a SIGTERM, step 4 here; the run went on to step 8."""
    (run / "checkpoint").mkdir()
    with pytest.raises(AlreadyComplete, match=r"complete \(8 steps\)"):
        open_(run)
    assert open_(run, "trainer.steps=12").step == 4


HOLD = """
import os, sys, time
from pathlib import Path
from nemo_flashrl.run.lock import locked
with locked(Path(sys.argv[1])):
    started, writer = os.pipe()
    if os.fork() == 0:  # a checkpoint writer that outlives its parent
        os.write(writer, b".")
        time.sleep(60)
        os._exit(0)
    os.read(started, 1)
    print("held", os.getpid(), flush=True)
    time.sleep(60)
"""


def test_one_run_at_a_time(run: Path) -> None:
    """The second changes nothing; when the first is killed, the next resumes at once."""
    opened = open_(run)
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert first.stdout.readline().split() == ["held", str(first.pid)]
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        with pytest.raises(ValueError) as refused, opened.held(by_this_rank=True):
            pytest.fail("two runs in one folder")
        assert str(refused.value) == (
            f"output={str(run)!r}: in use by pid {first.pid} on host {socket.gethostname()}: wait for it, or name "
            "another folder"
        )
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
        with opened.held(by_this_rank=False):  # the first rank speaks for the others
            pass
        first.kill()
        first.wait()
        for _ in range(2):  # and a run that has ended leaves it free, in the same process too
            with opened.held(by_this_rank=True):
                opened.begin()
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.stdout.close()


@pytest.mark.parametrize("complete", [False, True])
def test_what_is_read_is_read_again_when_the_folder_is_free(run: Path, complete: bool) -> None:
    """This rank alone looks again: it fails, so that the others do not wait for it."""
    opened = open_(run)
    if complete:
        (run / "checkpoint").mkdir()
    else:
        write_checkpoint(run, 6)  # the other run's last
    with pytest.raises(ValueError, match="another run has just ended there: rerun"), opened.held(by_this_rank=True):
        pytest.fail("it would cut step 6 off")


def test_a_folder_of_a_run_that_never_began_is_new(tmp_path: Path) -> None:
    opened = open_(tmp_path / "run")
    with opened.held(by_this_rank=True):
        pass
    assert open_(tmp_path / "run") == opened


def test_ranks_that_have_read_different_checkpoints_stop_together() -> None:
    said = run_ranks(2, "folder_steps", 3, 4)
    line = "output='runs/first': its newest checkpoint is of step 4 on some ranks and of step 3 on others: rerun"
    assert said.count(line) == 2


@pytest.mark.parametrize(("remains", "said"), [(b"0123", "4 of 10 bytes"), (None, "missing")])
def test_a_damaged_checkpoint_is_named_with_what_to_do(run: Path, remains: bytes | None, said: str) -> None:
    """The older ones have no record, as those of an earlier version, and are taken as they are."""
    newest = write_checkpoint(run, 6)
    tensors = newest / "weights" / "__0_0.distcp"
    tensors.write_bytes(b"0123456789")
    record_files(newest)
    with open_(run).held(by_this_rank=True):
        pass
    tensors.unlink() if remains is None else tensors.write_bytes(remains)
    with pytest.raises(ValueError) as refused, open_(run).held(by_this_rank=True):
        pytest.fail("it cannot be read")
    remedy = "remove that folder to resume from step=4"
    assert str(refused.value) == f"{newest} is damaged (weights/__0_0.distcp: {said}): {remedy}"
    shutil.rmtree(newest)
    with open_(run).held(by_this_rank=True):
        assert open_(run).step == 4


def test_steps_without_a_line_are_named(run: Path, capsys) -> None:
    """The last write of step 4 was cut, and step 2 is gone: losing lines does not stop a run, nor pass unsaid."""
    for step in (1, 3):
        append_json_line(run / "metrics.jsonl", {"step": step})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    open_(run).begin()
    assert "metrics.jsonl lacks steps 2, 4 of the 4 that the checkpoint has trained" in capsys.readouterr().err
    for step in (2, 4):
        append_json_line(run / "metrics.jsonl", {"step": step})
    open_(run).begin()
    assert capsys.readouterr().err == ""
