"""`flashrl doctor RUN`: the metrics of a run -> what is wrong, the evidence, likely causes, the setting to change.

A rule is a pure function over the columns of `metrics.jsonl`; `docs/troubleshooting.md` is written from their list.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_flashrl.doctor.rule import Rule
from nemo_flashrl.doctor.rules_learning import LEARNING_RULES
from nemo_flashrl.doctor.rules_machine import END_RULES, MACHINE_RULES
from nemo_flashrl.doctor.rules_progress import PROGRESS_RULES
from nemo_flashrl.doctor.rules_sampling import SAMPLING_RULES
from nemo_flashrl.run.record import RunRecord

RULES: tuple[Rule, ...] = (*LEARNING_RULES, *PROGRESS_RULES, *SAMPLING_RULES, *MACHINE_RULES)


@dataclass(frozen=True)
class Finding:
    """A rule that fired."""

    rule: Rule
    evidence: str
    change: str  # the setting to change, for this run

    def as_dict(self) -> dict[str, object]:
        """For the report."""
        rule = self.rule
        return {"title": rule.title, "evidence": self.evidence, "causes": list(rule.causes), "change": self.change}


def examine(run: RunRecord) -> list[Finding]:
    """The rules that fire: what ended the run, then in the order of `RULES`: what breaks it before what slows it."""
    rules = (*END_RULES, *(RULES if run.steps else ()))
    return [Finding(rule, evidence, rule.change_for(run)) for rule in rules if (evidence := rule.check(run))]


def as_text(run: RunRecord, findings: list[Finding]) -> str:
    """What a person reads on a terminal."""
    steps = f"steps {run.steps[0]['step']} to {run.steps[-1]['step']}" if run.steps else "no step is done"
    if not findings:
        return f"{run.folder}: {steps}, no rule fires ({len(RULES)} checked)"
    lines = [f"{run.folder}: {steps}, {len(findings)} finding(s)"]
    for number, finding in enumerate(findings, 1):
        lines += ["", f"{number}. {finding.rule.title}", f"   evidence  {finding.evidence}"]
        label = "causes"
        for cause in finding.rule.causes:
            lines.append(f"   {label:<9} - {cause}")
            label = ""
        lines.append(f"   change    {finding.change}")
    return "\n".join(lines)
