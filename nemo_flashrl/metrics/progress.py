"""How far a run is, on the terminal: one line that is rewritten in place, or plain lines where there is no terminal."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

RECENT_STEPS = 20  # that the ETA is estimated from
PHASES = {"rollout_seconds": "rollouts", "train_seconds": "training", "refit_seconds": "weight sync"}


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
