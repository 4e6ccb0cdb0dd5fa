"""What an output folder holds: a run to resume, its complete checkpoints, and where its records have to be cut.

<output>/config.yaml                     what the run was started with
<output>/run.json                        what its checkpoints are bound to
<output>/run.lock                        held by the run that is at work there
<output>/logs/rank-0.log                 what rank 0 said, NeMo and Megatron included, and what ended it
<output>/checkpoints/step=5/             a Megatron distributed checkpoint (under weights/)
<output>/checkpoints/step=5/files.json   the bytes of each of its files, written last
<output>/interrupted-1/                  records of steps that no checkpoint held and that were trained again
<output>/checkpoints/step=5-unfinished   there while the folder beside it is written or removed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_flashrl.config import RunConfig, load_saved, save
from nemo_flashrl.metrics.progress import LOGS
from nemo_flashrl.run.jsonl import cut_records, read_json_lines, warn_of_gaps, written_whole
from nemo_flashrl.run.lock import LOCK, locked

EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: stopped from outside with everything saved; rerun to resume
EXIT_MONITOR = 3  # a limit under `monitors` was reached: rerun, it resumes and is stopped again
ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_local_experts",
    "tie_word_embeddings",
)
# What may differ when a run is resumed: where and how it computes, not what it learns.
FREE = (
    "output",
    "checkpoint",
    "parallel",
    "cluster",
    "batching.on_too_long",  # what a run that ended on a long prompt is told to change
    "rollout.servers",
    "rollout.server_timeout",
    "rollout.weight_transfer",
    "rollout.weights_folder",
    "trainer.steps",
    "trainer.log_trajectories",
    "trainer.wandb_project",
    "monitors",
)
FILES = "files.json"
RECORDS = ("metrics.jsonl", "trajectories.jsonl", "samples.jsonl")


class Preempted(Exception):
    """The run was asked to stop, and has saved itself; the message says at which step."""


class Interrupted(KeyboardInterrupt):
    """A person pressed Ctrl-C, and the run has saved itself; the message says at which step."""


class StoppedByMonitor(Exception):
    """A limit of `monitors` was reached, and the run has saved itself; the message names it."""


class AlreadyComplete(Exception):
    """The run in the output folder has done all its steps and is exported; the message says where."""


class NotSaved(Exception):
    """A checkpoint could not be written; the message says why, and what is left."""


@dataclass(frozen=True)
class RunFolder:
    """An output folder, and where the run in it stands."""

    config: RunConfig
    bound_to: Mapping[str, Any]
    checkpoint: Path | None = None  # the newest complete one; without it the run starts at step 0
    step: int = 0  # optimizer steps in `checkpoint`

    @property
    def path(self) -> Path:
        return Path(self.config.output)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def preempted(self) -> Path:
        """Tells a requeue that cannot see the exit code (torchrun hides it) that the run is to be resumed."""
        return self.path / "preempted"

    @contextlib.contextmanager
    def held(self, by_this_rank: bool) -> Iterator[None]:
        """Keep other runs out until the block ends; of one job's processes one does so for all.

        Raises:
            ValueError: another run is at work there, or was until after this one has read the folder; or the checkpoint
                to resume from is damaged.
        """
        if not by_this_rank:
            yield
            return
        with locked(self.path):
            if not self._unchanged():
                raise ValueError(
                    f"output={self.config.output!r}: another run has just ended there: rerun the same command"
                )
            if self.checkpoint is not None:
                check_whole(self.checkpoint)
            yield

    def _unchanged(self) -> bool:
        try:
            return _read(self.config, self.bound_to) == self
        except AlreadyComplete:
            return False

    def begin(self) -> None:
        """Make the folder, or cut its records back to the checkpoint's step; on global rank 0 alone.

        Steps that were trained after the checkpoint are trained again: that is said, and without any checkpoint their
        records are kept under other names.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._give_up_steps()
        with written_whole(self.path / "config.yaml") as staging:
            save(self.config, staging)
        with written_whole(self.path / "run.json") as staging:
            staging.write_text(json.dumps(self.bound_to, indent=2) + "\n")
        self.preempted.unlink(missing_ok=True)
        for name in RECORDS:
            cut_records(self.path / name, self.step)
        warn_of_gaps(self.path / "metrics.jsonl", self.step)
        for name in ("checkpoint", "reference"):
            if (self.path / name).exists():  # of a complete run that is made longer
                (self.path / name).rename(self.path / f"{name}-{self.step}")

    def _give_up_steps(self) -> None:
        steps = _steps_in(self.path / "metrics.jsonl")
        if not steps or steps[-1] <= self.step:
            return
        again = f"output={self.config.output!r}: steps {self.step + 1} to {steps[-1]} are trained again: "
        if self.checkpoint is not None:
            print(f"{again}the newest checkpoint is of step {self.step}, later records are replaced", file=sys.stderr)
            return
        number = 1
        while (aside := self.path / f"interrupted-{number}").exists():
            number += 1
        aside.mkdir()
        for name in RECORDS:
            if (self.path / name).exists():
                (self.path / name).rename(aside / name)
                (self.path / name).touch()
        print(f"{again}no checkpoint holds them; their records are kept in {aside}", file=sys.stderr)


def _steps_in(metrics: Path) -> list[int]:
    return sorted(record["step"] for record in read_json_lines(metrics)) if metrics.exists() else []


def open_folder(config: RunConfig, hf_config: Mapping[str, Any]) -> RunFolder:
    """The folder `config.output`, new or with a run to resume; changes nothing.

    Raises:
        ValueError: the folder exists and holds no run, another run, or a complete one that cannot be made as long as
            `config` asks, or `checkpoint.resume` is false.
        AlreadyComplete: it holds this run, complete.
    """
    return _read(config, bound_to(config, hf_config))


def _read(config: RunConfig, own: Mapping[str, Any]) -> RunFolder:
    path = Path(config.output)
    if not path.exists() or (path.is_dir() and all(file.name in (LOCK, LOGS) for file in path.iterdir())):
        return RunFolder(config, own)
    if not (path / "run.json").is_file():
        raise ValueError(f"output={config.output!r} exists: a run never overwrites; choose another folder or remove it")
    step, checkpoint = max(complete_checkpoints(path / "checkpoints").items(), default=(0, None))
    complete = (path / "checkpoint").exists()  # written last
    if not (checkpoint or complete or _steps_in(path / "metrics.jsonl")):
        return RunFolder(config, own)  # nothing was trained there: any configuration may begin
    if config.checkpoint.resume is False:
        raise ValueError(
            f"output={config.output!r} holds a run and checkpoint.resume=false: a run never overwrites; "
            "choose another folder, remove it, or resume it with checkpoint.resume=true"
        )
    saved = load_saved(path / "config.yaml")
    _check_same(config, own, saved, path)
    if complete:
        _check_longer(config, saved.trainer.steps, step)
    return RunFolder(config, own, checkpoint, step)


def _check_longer(config: RunConfig, done: int, saved: int) -> None:
    """Of a complete run of `done` steps, the first `saved` of them in a checkpoint: resumed only to make it longer."""
    asked = config.trainer.steps
    if asked == done:
        policy = Path(config.output) / "checkpoint"
        raise AlreadyComplete(f"output={config.output!r}: the run is complete ({done} steps), its policy in {policy}")
    if asked < done or not saved:
        longer = f"raise trainer.steps above {done} to resume"
        remedy = longer if saved else "it left no checkpoint: choose another folder"
        raise ValueError(f"output={config.output!r} holds a complete run of {done} steps: {remedy}")


def bound_to(config: RunConfig, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """What the tensors of a checkpoint are made for, by the name under which a difference is reported."""
    reference = config.reference
    return {
        **{f"the model's {name}": hf_config.get(name) for name in ARCHITECTURE},
        "model.precision": config.model.precision,
        "lora.rank": config.lora.rank,
        "lora.targets": sorted(config.lora.targets) if config.lora.rank else [],
        "algorithm.name": config.algorithm.name,
        "reference.mode": reference.mode,
        "reference.every": reference.every if reference.mode == "hard" else None,
        "reference.beta": reference.beta if reference.mode == "ema" else None,
    }


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint, of those that were written to the end; a torn one, or one half removed, is left out."""
    found = {}
    for path in folder.glob("step=*"):
        match = re.fullmatch(r"step=(\d+)", path.name)
        unfinished = path.with_name(path.name + "-unfinished").exists()
        # Megatron writes metadata.json last, when every rank has written its part.
        if match and not unfinished and (path / "weights" / "metadata.json").is_file():
            found[int(match[1])] = path
    return found


def record_files(checkpoint: Path) -> None:
    """Write down how many bytes each file of a checkpoint has, when every rank has written its part."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != FILES)
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files}
    with written_whole(checkpoint / FILES) as staging:
        staging.write_text(json.dumps(sizes, indent=2) + "\n")


def check_whole(checkpoint: Path) -> None:
    """ValueError names a file that is not as long as it was, and what to do; without a record nothing is known."""
    if not (checkpoint / FILES).is_file():
        return
    for name, size in json.loads((checkpoint / FILES).read_text()).items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            *older, _ = ["the beginning", *(f"step={step}" for step in sorted(complete_checkpoints(checkpoint.parent)))]
            what = "missing" if found is None else f"{found} of {size} bytes"
            raise ValueError(f"{checkpoint} is damaged ({name}: {what}): remove that folder to resume from {older[-1]}")


def _check_same(config: RunConfig, own: Mapping[str, Any], saved: RunConfig, path: Path) -> None:
    bound = json.loads((path / "run.json").read_text())
    for name, value in own.items():
        if bound.get(name) != value:
            raise ValueError(
                f"output={config.output!r}: {name} is {value!r}, the run there has {bound.get(name)!r}: its "
                "checkpoints do not fit this run; set it back or choose another folder"
            )
    if config.checkpoint.resume:
        return
    before, now = _flat(dataclasses.asdict(saved)), _flat(dataclasses.asdict(config))
    for name in sorted(before.keys() | now.keys()):
        free = any(name == part or name.startswith(f"{part}.") for part in FREE)
        if not free and before.get(name) != now.get(name):
            raise ValueError(
                f"output={config.output!r}: {name} is {now.get(name)!r}, the run there has {before.get(name)!r}: set "
                "it back, choose another folder, or resume with the change by checkpoint.resume=true"
            )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {k: v for name, item in value.items() for k, v in _flat(item, f"{prefix}.{name}".lstrip(".")).items()}
