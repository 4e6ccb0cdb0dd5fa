"""`flashrl rehearse`: the whole path, small and real, on this machine's CPU.

warm start (HF folder) -> evaluate -> `flashrl train` in its own processes -> evaluate the exported folder -> summary
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_flashrl import platform
from nemo_flashrl.config import RunConfig, load, quoted
from nemo_flashrl.launch.processes import run_training
from nemo_flashrl.preflight.prepare import Parts, prepare
from nemo_flashrl.rehearsal.summary import Check, Summary
from nemo_flashrl.rehearsal.warm_start import make_warm_start

EVALUATED_TASKS = 256
TRAINING_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1"
}  # several processes share few cores, and one process has no use for more


@dataclass(frozen=True)
class Rehearsal:
    """What the command line asks for."""

    output: Path
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    algorithm: str = "flash_reinforce"
    seed: int = 0
    overrides: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


def rehearse(rehearsal: Rehearsal) -> Summary:
    """Run it; the folder `rehearsal.output` holds everything, and must not exist.

    Raises:
        ValueError: the request cannot be run; nothing is left behind.
        RuntimeError: the training processes failed.
    """
    output = rehearsal.output
    if output.exists():
        raise ValueError(f"--output {str(output)!r} exists: a rehearsal never overwrites; choose another or remove it")
    platform.hide_gpus()  # in fp32 packed rows may have no attention kernel there
    overrides = _overrides(rehearsal)
    load("rehearsal", overrides)  # a misspelt key is refused before the warm start is trained
    started = time.perf_counter()
    try:
        make_warm_start(output / "warm_start", rehearsal.seed)
        config = load("rehearsal", overrides)
        parts = prepare(config, rehearsal.world_size)
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise
    warm_seconds = time.perf_counter() - started
    print(
        f"warm start trained in {warm_seconds:.0f} s; starting NeMo in {rehearsal.world_size} process(es)", flush=True
    )
    log = output / "training.log"
    run_training("rehearsal", overrides, rehearsal.world_size, TRAINING_ENVIRONMENT, log)
    trained = time.perf_counter() - started
    checkpoint = Path(config.output) / "checkpoint"
    before = _evaluate(config, parts, output / "warm_start", temperature=config.rollout.temperature)
    after = _evaluate(config, parts, checkpoint, temperature=config.rollout.temperature)
    greedy = _evaluate(config, parts, checkpoint, temperature=0.0)
    return Summary(
        run=Path(config.output),
        success_before=before,
        success_after=after,
        success_greedy=greedy,
        seconds={"warm start": warm_seconds, "training": trained - warm_seconds},
        checks=_checks(config, parts, checkpoint),
    )


def _overrides(rehearsal: Rehearsal) -> list[str]:
    return [
        f"algorithm={rehearsal.algorithm}",
        f"output={quoted(rehearsal.output / 'run')}",
        f"model.path={quoted(rehearsal.output / 'warm_start')}",
        f"parallel.tensor={rehearsal.tensor}",
        f"parallel.pipeline={rehearsal.pipeline}",
        f"parallel.context={rehearsal.context}",
        f"trainer.seed={rehearsal.seed}",
        *rehearsal.overrides,
    ]


def _evaluate(config: RunConfig, parts: Parts, folder: Path, temperature: float) -> float:
    """Success of the policy in `folder`, loaded by transformers, on tasks outside the training set."""
    from nemo_flashrl.engines import TransformersEngine
    from nemo_flashrl.rollout.from_config import episode_limits, episode_sampling
    from nemo_flashrl.rollout.metrics import success_rate
    from nemo_flashrl.rollout.player import evaluate

    held_out = dataclasses.replace(
        parts.environment_settings, seed=2**30 + config.trainer.seed, num_tasks=EVALUATED_TASKS
    )
    sampling = dataclasses.replace(episode_sampling(config, parts.tokenizer), temperature=temperature)
    trajectories = asyncio.run(
        evaluate(
            TransformersEngine(folder),
            lambda: parts.environment(held_out),
            parts.environment.tasks(held_out),
            parts.tokenizer,
            episode_limits(config),
            sampling,
            max_in_flight=config.rollout.batch_size,
            seed=config.trainer.seed,
        )
    )
    return success_rate(trajectories)


def _checks(config: RunConfig, parts: Parts, checkpoint: Path) -> list[Check]:
    from safetensors import safe_open

    from nemo_flashrl.run.jsonl import read_metrics

    steps = read_metrics(Path(config.output) / "metrics.jsonl")
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        rows = file.get_slice("model.embed_tokens.weight").get_shape()[0]
    checks = [
        Check(
            "every update trained once on a fresh batch",
            [s["step"] for s in steps] == list(range(1, config.trainer.steps + 1)),
            f"{len(steps)} updates of {config.rollout.batch_size} trajectories",
        ),
        Check("padded vocabulary rows left out of the export", rows == parts.vocab_size, f"{rows} rows"),
    ]
    if config.rollout.lag == 0:
        worst = max(s["logprob_difference_max"] for s in steps)
        checks.append(
            Check(
                "Megatron's log-probs equal the sampler's (transformers) at every update",
                worst <= 1e-4,
                f"largest difference {worst:.1e}",
            )
        )
    return checks


def default_output(root: Any = "runs") -> Path:
    """A folder that no earlier rehearsal has used."""
    return Path(root) / time.strftime("rehearsal-%Y%m%d-%H%M%S")
