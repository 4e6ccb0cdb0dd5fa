"""What a run shows on the terminal, how far it is above all: one line that is rewritten in place, or plain lines where
there is no terminal. What NeMo and Megatron say goes to the run's log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

RECENT_STEPS = 20  # that the ETA is estimated from
FRAMEWORKS = ("nemo", "nemo_logger", "megatron", "lightning", "torch")  # whose notices are for the log
LOGS = "logs"  # folder of a run: rank-N.log, every start after the one before
START, END = "--- started: ", "--- ended: "
PHASES = {
    "rollout_seconds": "rollouts",
    "train_seconds": "training",
    "refit_seconds": "weight sync",
    "evaluating_seconds": "evaluation",
}


class Progress:
    """Writes the lines.

    Args:
        steps: of the whole run.
        stream: where to; a terminal gets the live line.
        interval: seconds between plain lines; the first and the last step have theirs in any case.
        clock: seconds, for the interval.
    """

    def __init__(
        self,
        steps: int,
        stream: TextIO | None = None,
        *,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._interval = interval
        self._clock = clock
        self._written = -float("inf")
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._line = "step    0"

    def wait_for(self, what: str) -> None:
        """What the run is busy with now; a terminal alone shows it."""
        if self._live:
            self._show(f"{self._line}  now: {what}")

    def step_done(self, record: Mapping[str, Any]) -> None:
        """A step's metrics."""
        self._seconds.append(record["step_seconds"])
        self._line = progress_line(record, self.steps, statistics.median(self._seconds))
        now, edge = self._clock(), record["step"] in (1, self.steps)
        if self._live:
            self._show(self._line + ("\n" if record["step"] == self.steps else ""))
        elif edge or now - self._written >= self._interval:
            self._written = now
            self._stream.write(self._line + "\n")
            self._stream.flush()

    def _show(self, line: str) -> None:
        self._stream.write(rewrite(line))
        self._stream.flush()


def rewrite(line: str) -> str:
    """`line` in place of the terminal's current one, cut to its width."""
    text, newline, _ = line.partition("\n")
    return f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}{newline}"


def progress_line(record: Mapping[str, Any], steps: int, seconds: float) -> str:
    """One step for a person; the ETA is for steps of `seconds`, what a recent one takes."""
    times = {name: record[key] for key, name in PHASES.items() if key in record}
    slowest = max(times, key=times.get)
    gate = f"  gate {record['gate_acceptance']:.2f}" if "gate_acceptance" in record else ""
    errors = f"  environment errors {n:.0f}" if (n := record.get("episodes_environment_error")) else ""
    return (
        f"step {record['step']:>4}/{steps}  reward {record['reward_mean']:.3f}  success {record['success']:.3f}{gate}"
        f"  turns {record['turns']:.1f}  {_thousands(record['tokens_per_second'])} tokens/s  "
        f"{record['step_seconds']:.2f} s/step, "
        f"{times[slowest] / max(record['step_seconds'], 1e-9):.0%} {slowest}"
        f"  ETA {_duration(seconds * (steps - record['step']))}{errors}"
    )


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    """90 -> "1:30", 7265 -> "2:01:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Sorted:
    """A standard stream: everything goes to the log, to the screen what this package and the user's code say."""

    def __init__(self, screen: TextIO, log: TextIO) -> None:
        self._screen = screen
        self.log: TextIO | None = log  # None: passed on as it is, for loggers that keep this stream

    def write(self, text: str) -> int:
        """As of any text stream."""
        if self.log is not None:
            with contextlib.suppress(OSError):  # a full disk is told by what has to be written
                self.log.write(text)
            if not _is_shown(sys._getframe(1), text):
                return len(text)
        return self._screen.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._screen, name)


def _is_shown(frame: Any, text: str) -> bool:
    """By who writes: our modules, the user's, the interpreter; of the frameworks' loggers errors alone."""
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("wandb."):  # it wraps streams
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    if module.startswith("logging"):
        record = frame.f_locals.get("record")
        if record is None:
            return False
        return record.levelno >= logging.ERROR or not _is_framework(record.name, record.pathname)
    if module == "warnings":
        return "nemo_flashrl" in text or not _is_framework("", text)
    return not _is_framework(module, frame.f_code.co_filename)


def _is_framework(module: str, file: str) -> bool:
    """Installed packages, and in NVIDIA's images checkouts of NeMo and Megatron beside them."""
    root = module.partition(".")[0]
    if root == "nemo_flashrl":
        return False
    return root in FRAMEWORKS or "site-packages" in file or any(f"/{name}/" in file for name in FRAMEWORKS)


@contextlib.contextmanager
def logged(output: Path, rank: int) -> Iterator[None]:
    """Until the block ends, `output`/logs/rank-N.log holds all that this process says, and in the end what ended it."""
    folder = output / LOGS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.log").open("a", buffering=1, encoding="utf-8", errors="replace") as log:
        log.write(f"{START}{time.strftime('%Y-%m-%d %H:%M:%S')}, pid {os.getpid()} on {socket.gethostname()}\n")
        before = sys.stdout, sys.stderr
        streams = sys.stdout, sys.stderr = _Sorted(sys.stdout, log), _Sorted(sys.stderr, log)
        for handler in _stream_handlers():
            if handler.stream in before:
                handler.setStream(streams[before.index(handler.stream)])
        if rank == 0:
            print(f"what NeMo and Megatron say goes to {folder}/rank-*.log", file=before[1], flush=True)
        end = "done"
        try:
            yield
        except BaseException as error:
            end = f"{type(error).__name__}: {error}"
            log.write(traceback.format_exc())
            raise
        finally:
            for stream in streams:
                stream.log = None
            for handler in _stream_handlers():
                if handler.stream in streams:
                    handler.setStream(before[streams.index(handler.stream)])
            sys.stdout, sys.stderr = before
            with contextlib.suppress(OSError):
                log.write(END + " ".join(end.split()) + "\n")


def _stream_handlers() -> list[logging.StreamHandler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in found if type(handler) is logging.StreamHandler]
