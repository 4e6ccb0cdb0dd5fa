"""Files of one JSON object a line: appended to by a run that may be killed, read while it runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_flashrl.metrics.table import with_new_names


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """One object a line; what JSON cannot hold becomes null (NaN, inf) or text."""
    append_json_lines(path, [record])


def append_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Several lines in one write, so that a reader meets whole lines; a line torn by a kill is closed off first."""
    text = "".join(json.dumps(_finite(record), allow_nan=False, default=str) + "\n" for record in records)
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, 2)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode(errors="replace"))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file that may still be growing: a line that a kill or a write in progress tore is left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl`, in order; of a step that a resumed run did again, the last line.

    Metrics that an earlier version named otherwise have their new names.
    """
    steps = {record["step"]: with_new_names(record) for record in read_json_lines(path) if "step" in record}
    return [steps[step] for step in sorted(steps)]


def cut_records(path: Path, step: int) -> None:
    """Keep the lines up to `step`: later ones, and a torn one, are written again by the resumed run."""
    if path.exists():
        kept = [record for record in read_json_lines(path) if record["step"] <= step]
        with written_whole(path) as staging:
            staging.write_text("".join(json.dumps(record) + "\n" for record in kept))


def warn_of_gaps(metrics: Path, step: int) -> None:
    """A run resumes without the lines that a kill or a full disk has cost it, and says which steps they were."""
    held = {record["step"] for record in read_json_lines(metrics)} if metrics.exists() else set()
    lost = [number for number in range(1, step + 1) if number not in held]
    if lost:
        shown = ", ".join(map(str, lost[:10])) + (f" and {len(lost) - 10} more" if lost[10:] else "")
        print(  # NeMo keeps Python's warnings to itself
            f"{metrics} lacks {'step' if len(lost) == 1 else 'steps'} {shown} of the {step} that the checkpoint has "
            "trained: the run continues, reports show a gap there",
            file=sys.stderr,
        )


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to; under the final name there is the old file or the new one, never a part."""
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    yield staging
    staging.replace(path)
