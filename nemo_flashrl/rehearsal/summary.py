"""What a person reads when a rehearsal has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_flashrl.run.jsonl import read_metrics

BARS = " ▁▂▃▄▅▆▇█"
CURVE_WIDTH, CURVE_ROWS = 60, 6


@dataclass(frozen=True)
class Check:
    """Something the rehearsal checked."""

    claim: str
    holds: bool
    evidence: str


@dataclass(frozen=True)
class Summary:
    """The end of a rehearsal."""

    run: Path
    success_before: float  # sampled, held-out tasks
    success_after: float  # sampled, held-out tasks
    success_greedy: float  # greedy, held-out tasks
    seconds: dict[str, float]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """All checks hold."""
        return all(check.holds for check in self.checks)

    def text(self) -> str:
        """The page."""
        curve = [step["success"] for step in read_metrics(self.run / "metrics.jsonl")]
        lines = [
            "",
            f"  success on held-out tasks   {self.success_before:.1%} -> {self.success_after:.1%} sampled, "
            f"{self.success_greedy:.1%} greedy",
            "",
            *(f"  {line}" for line in draw_curve(curve)),
            "",
            "  checked",
            *(f"    {'OK  ' if c.holds else 'FAIL'} {c.claim} ({c.evidence})" for c in self.checks),
            "",
            "  files",
            f"    checkpoint    {self.run / 'checkpoint'}   (Hugging Face; transformers loads it)",
            f"    metrics       {self.run / 'metrics.jsonl'}",
            f"    trajectories  {self.run / 'trajectories.jsonl'}   (every one; as text in samples.jsonl)",
            f"    report        flashrl report {self.run} --output report.html",
            f"    TensorBoard   {self.run / 'tensorboard'}",
            "",
            "  time              " + ", ".join(f"{name} {value:.0f} s" for name, value in self.seconds.items()),
            "",
        ]
        return "\n".join(lines)


def draw_curve(values: Sequence[float], width: int = CURVE_WIDTH, rows: int = CURVE_ROWS) -> list[str]:
    """Success (0 to 1) over updates as block characters, each column the mean of its share of the updates."""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    lines = []
    for row in reversed(range(rows)):
        cells = "".join(BARS[min(max(round((mean * rows - row) * 8), 0), 8)] for mean in means)
        label = "1.0" if row == rows - 1 else "0.0" if row == 0 else "   "
        lines.append(f"{label} │{cells}")
    lines.append("    └" + "─" * width)
    lines.append(f"     update 1 {str(len(values)).rjust(width - 9)}")
    return lines
