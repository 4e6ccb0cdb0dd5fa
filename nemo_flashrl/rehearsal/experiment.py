"""`flashrl rehearse --experiment NAME`: any experiment's own job, shrunk to this machine.

Topology, algorithm, environment, batching, schedules and checkpoints are the experiment's; what it says of learning
is nothing, since the model is random.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from nemo_flashrl import algorithms
from nemo_flashrl.config import RunConfig, load, quoted, settings_of
from nemo_flashrl.launch.processes import run_training
from nemo_flashrl.preflight.prepare import prepare
from nemo_flashrl.rehearsal.run import TRAINING_ENVIRONMENT
from nemo_flashrl.rehearsal.small import small_data_parallel, small_overrides, write_small_model
from nemo_flashrl.rehearsal.summary import Check
from nemo_flashrl.run.jsonl import read_metrics

LEFT_TO_THE_CLUSTER = (
    "that the job fits its GPUs (`flashrl plan` estimates it), and its throughput",
    "bf16, kernels of Transformer Engine and flash-attention, and communication between GPUs",
    "rollout servers on nodes of their own, and the environment under a real model's answers",
    "that the policy learns",
)


@dataclass(frozen=True)
class ExperimentSummary:
    """What the rehearsal of an experiment checked."""

    run: Path
    changes: list[str]
    checks: list[Check]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(check.holds for check in self.checks)

    def text(self) -> str:
        """The page."""
        lines = ["", "  shrunk", *(f"    {change}" for change in self.changes), "", "  checked here"]
        lines += [f"    {'OK  ' if c.holds else 'FAIL'} {c.claim} ({c.evidence})" for c in self.checks]
        lines += ["", "  can only be checked on the cluster", *(f"    {claim}" for claim in LEFT_TO_THE_CLUSTER)]
        return "\n".join([*lines, "", f"  all files are in {self.run}; {self.seconds:.0f} s", ""])


def rehearse_experiment(name: str, output: Path, overrides: tuple[str, ...], seed: int = 0) -> ExperimentSummary:
    """Run the experiment small; the folder `output` must not exist.

    Raises:
        ValueError: the experiment cannot be run; nothing is left behind.
        RuntimeError: the training processes failed.
    """
    if output.exists():
        raise ValueError(f"--output {str(output)!r} exists: a rehearsal never overwrites; choose another or remove it")
    own = [
        f"output={quoted(output / 'run')}",
        f"model.path={quoted(output / 'model')}",
        f"trainer.seed={seed}",
        *overrides,
    ]
    full = _with_a_model(name, own)
    changes = small_overrides(full, _group_size(full))
    data_parallel = small_data_parallel(full)
    small = load(name, [*own, *changes])
    parallel = small.parallel
    processes = math.prod((parallel.tensor, parallel.pipeline, parallel.context, data_parallel))
    started = time.perf_counter()
    try:
        write_small_model(output / "model", full.model.hf_config, small, seed)
        prepare(small, processes)
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise
    print(f"rehearsing {name} in {processes} process(es)", flush=True)
    run_training(name, [*own, *changes], processes, TRAINING_ENVIRONMENT, output / "training.log")
    seconds = time.perf_counter() - started
    return ExperimentSummary(Path(small.output), _described(full, small), _checks(small, processes), seconds)


def _group_size(config: RunConfig) -> int:
    """What divides a batch."""
    plugin = algorithms.load(config.algorithm.name)
    own = plugin(settings_of(plugin, config.algorithm.settings, "algorithm")).group_size
    return max(own, config.group_size.max)  # a multiple of `own` where it is set


def _with_a_model(name: str, own: list[str]) -> RunConfig:
    """The experiment; one that leaves the model to `model.path` is rehearsed with the family of conf/model/tiny."""
    config = load(name, own)
    if not config.model.hf_config:
        tiny = load(name, [*own, "+model=tiny"])
        config.model.hf_config = tiny.model.hf_config
    return config


def _described(full: RunConfig, small: RunConfig) -> list[str]:
    """What changed, a line each."""
    pairs = {
        "model": [f"{full.model.hf_config['model_type']} -> the same family, tiny and random"],
        "parallel": [f"TP {c.parallel.tensor} PP {c.parallel.pipeline} CP {c.parallel.context}" for c in (full, small)],
        "context": [f"{c.model.context_length} tokens" for c in (full, small)],
        "batch": [f"{c.rollout.batch_size} trajectories" for c in (full, small)],
        "turns": [str(c.rollout.max_turns) for c in (full, small)],
        "steps": [str(c.trainer.steps) for c in (full, small)],
        "precision": [c.model.precision for c in (full, small)],
    }
    return [f"{name:<10} {' -> '.join(dict.fromkeys(values))}" for name, values in pairs.items()]


def _checks(config: RunConfig, processes: int) -> list[Check]:
    run = Path(config.output)
    steps = read_metrics(run / "metrics.jsonl")
    numbers = [step["step"] for step in steps]
    on_policy = config.rollout.mode == "sync" and config.rollout.lag == 0
    checks = [
        Check(
            "the job runs in this topology and completes every step",
            numbers == list(range(1, config.trainer.steps + 1)),
            f"{len(steps)} updates of {config.rollout.batch_size} trajectories in {processes} processes",
        ),
        Check(
            "losses and gradients are finite",
            all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps),
            f"grad norm up to {max(step['grad_norm'] for step in steps):.2g}",
        ),
        Check(
            "the environment answers",
            not any(step["episodes_environment_error"] for step in steps),
            f"{sum(step['episodes_environment_error'] for step in steps):.0f} episodes ended in an environment error",
        ),
        Check("the policy is exported as a Hugging Face folder", _exported(run), str(run / "checkpoint")),
    ]
    if on_policy:
        worst = max(step["logprob_difference_max"] for step in steps)
        checks.append(Check("trainer and sampler agree on log-probs", worst <= 1e-4, f"difference up to {worst:.1e}"))
    if config.checkpoint.every_steps:
        saved = [path.name for path in (run / "checkpoints").glob("step=*")]
        checks.append(Check("the run can be resumed", bool(saved), ", ".join(saved) or "no checkpoint"))
    return checks


def _exported(run: Path) -> bool:
    file = run / "checkpoint" / "config.json"
    return file.is_file() and "model_type" in json.loads(file.read_text())
