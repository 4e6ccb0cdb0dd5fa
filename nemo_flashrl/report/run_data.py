"""Files of runs -> what the page holds: columns of numbers, thinned to what a browser opens at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_flashrl.doctor.examine import examine
from nemo_flashrl.metrics.table import find_metric
from nemo_flashrl.run.jsonl import read_json_lines
from nemo_flashrl.run.record import RunRecord, read_run

MAX_POINTS = 2000  # steps of one run on the page; a longer one is shown every n-th
MAX_TRAJECTORIES = 40_000  # of all runs
MAX_SAMPLE_CHARACTERS = 4_000_000  # of all runs
MAX_SEGMENT_CHARACTERS = 20_000
HEAT_BINS = 20
COLUMNS = [
    "step",
    "prompt_index",
    "reward",
    "advantage",
    "turns",
    "tokens",
    "action_tokens",
    "repeated_token_share",
    "staleness",
]


def page_data(folders: Sequence[Path]) -> dict[str, Any]:
    """All that the page shows of `folders`; ValueError names one that holds no metrics."""
    records = [read_run(folder) for folder in folders]
    names = _short_names([record.folder for record in records])
    share = len(records)
    runs = [_run(record, name, share) for record, name in zip(records, names, strict=True)]
    known = {name: find_metric(name) for run in runs for name in run["series"]}
    left_out = any(run.pop("thinned") for run in runs)
    return {
        "runs": runs,
        "groups": _groups(records, names),
        "metrics": {n: {"unit": m.unit, "meaning": m.meaning} for n, m in known.items() if m is not None},
        "trajectory_note": "Sort by a column, filter, press Enter on a row to read it. The step range above applies."
        + (" Evenly subsampled; the files in the run's folder have all." if left_out else ""),
    }


def _run(record: RunRecord, name: str, share: int) -> dict[str, Any]:
    every = math.ceil(len(record.steps) / MAX_POINTS)
    steps = record.steps[::every]
    numbers = sorted({k for step in steps for k, v in step.items() if isinstance(v, int | float) and k != "step"})
    table, end_reasons, samples, thinned = _trajectories(record, share)
    run = {
        "name": name,
        "folder": str(record.folder),
        "steps": [step["step"] for step in steps],
        "series": {n: [_short(step.get(n)) for step in steps] for n in numbers},
        "findings": [finding.as_dict() for finding in examine(record)],
        "trajectories": table,
        "end_reasons": end_reasons,
        "samples": samples,
        "thinned": thinned,
    }
    heat = _heat(steps)
    return run | ({"reward_histogram": heat} if heat else {})


def _short(value: Any) -> float | None:
    """Five digits are more than a chart shows."""
    if not isinstance(value, int | float):
        return None
    return float(f"{value:.5g}") if value != int(value) else int(value)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The parts of the paths that tell runs apart: `/a/b/run` and `/a/c/run` are `b/run` and `c/run`."""
    parts = [folder.resolve().parts for folder in folders]
    if len(parts) == 1:
        return ["/".join(parts[0][-2:]) if parts[0][-1] == "run" else parts[0][-1]]
    common = 0
    while all(len(p) > common + 1 for p in parts) and len({p[common] for p in parts}) == 1:
        common += 1
    return ["/".join(p[common:]) for p in parts]


def _groups(records: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    """Runs of one configuration that differ in seed and folder alone are shown together."""
    groups: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        key = record.configuration_without_seed
        groups.setdefault(str(place) if key is None else key, []).append(place)
    return [
        {"name": names[places[0]] if len(places) == 1 else _common_name([names[i] for i in places]), "runs": places}
        for places in groups.values()
    ]


def _common_name(names: Sequence[str]) -> str:
    """What names of seeds have in common: `flash-s0`, `flash-s1` -> `flash`."""
    length = 0
    while all(len(name) > length for name in names) and len({name[length] for name in names}) == 1:
        length += 1
    head = names[0][:length]
    for ending in ("seed", "s"):
        head = head.rstrip("0123456789-_./ ").removesuffix(ending) if head.endswith(ending) else head
    return head.rstrip("-_./ ") or names[0]


def _heat(steps: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Shares of a step's rewards in bins that are the same for all steps."""
    found = [(s["step"], s["reward_histogram"]) for s in steps if isinstance(s.get("reward_histogram"), dict)]
    filled = [
        edge
        for _, h in found
        for low, high, count in zip(h["edges"], h["edges"][1:], h["counts"], strict=False)
        if count
        for edge in (low, high)
    ]
    if not filled:
        return None
    low, high = min(filled), max(filled)
    high += float(low == high)
    shares = []
    for _, histogram in found:
        edges, counts = np.array(histogram["edges"]), np.array(histogram["counts"], dtype=float)
        centres = (edges[:-1] + edges[1:]) / 2
        binned, _ = np.histogram(centres, bins=HEAT_BINS, range=(low, high), weights=counts)
        shares.append([round(float(v), 3) for v in binned / max(counts.sum(), 1)])
    return {"steps": [step for step, _ in found], "shares": shares, "range": [low, high]}


def _trajectories(record: RunRecord, share: int) -> tuple[dict[str, list], list[str], list[dict], bool]:
    """Columns of rows, the words of their `end_reason`, texts; and whether some were left out."""
    rows = list(read_json_lines(record.trajectories)) if record.trajectories.is_file() else []
    samples = list(read_json_lines(record.samples)) if record.samples.is_file() else []
    kept_samples = _thin_samples(samples, MAX_SAMPLE_CHARACTERS // share)
    with_text = {(s["step"], s["prompt_index"], i) for s, i in _numbered(kept_samples)}
    every = math.ceil(len(rows) / (MAX_TRAJECTORIES // share)) or 1
    kept = [(r, i) for n, (r, i) in enumerate(_numbered(rows)) if n % every == 0 or _key(r, i) in with_text]
    place = {_key(s, i): n for n, (s, i) in enumerate(_numbered(kept_samples))}
    end_reasons = sorted({str(row.get("end_reason")) for row, _ in kept})
    table = {name: [_short(row.get(name)) for row, _ in kept] for name in COLUMNS}
    table["end_reason"] = [end_reasons.index(str(row.get("end_reason"))) for row, _ in kept]
    table["sample"] = [place.get(_key(row, i), -1) for row, i in kept]
    texts = [{"segments": _cut(s.get("segments", [])), "info": s.get("info")} for s in kept_samples]
    return table, end_reasons, texts, every > 1 or len(kept_samples) < len(samples)


def _key(row: dict[str, Any], occurrence: int) -> tuple[int, int, int]:
    return row.get("step"), row.get("prompt_index"), occurrence


def _numbered(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Samples of one prompt in one step, in the order of the file, which both files share."""
    seen: dict[tuple, int] = {}
    out = []
    for row in rows:
        key = (row.get("step"), row.get("prompt_index"))
        out.append((row, seen.get(key, 0)))
        seen[key] = seen.get(key, 0) + 1
    return out


def _thin_samples(samples: Sequence[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    """Whole steps' samples, evenly over the run, in `characters` of text."""
    sizes = [sum(min(len(s["text"]), MAX_SEGMENT_CHARACTERS) for s in sample.get("segments", [])) for sample in samples]
    every = math.ceil(sum(sizes) / characters) or 1
    steps = sorted({sample["step"] for sample in samples})
    kept_steps = {step for n, step in enumerate(reversed(steps)) if n % every == 0}
    kept, left = [], characters
    for sample, size in zip(samples, sizes, strict=True):
        if sample["step"] in kept_steps and size <= left:
            kept.append(sample)
            left -= size
    return kept


def _cut(segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for segment in segments:
        text = segment["text"]
        if len(text) > MAX_SEGMENT_CHARACTERS:
            half = MAX_SEGMENT_CHARACTERS // 2
            text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
        out.append({**segment, "text": text})
    return out
