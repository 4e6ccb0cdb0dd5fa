"""Makes the recorded runs of this folder: `python tests/recordings/record.py [NAME...]`, some minutes on two cores.

Each is the rehearsal with one thing wrong; the file holds its configuration and its metrics, rounded.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "helpers"))

SHORT = ["trainer.steps=12", "rollout.batch_size=16"]  # unless the scenario says otherwise
FULL = ["rollout.batch_size=64"]
KL = ["kl.coefficient=1e-6", "optimizer.learning_rate=5e-3"]
SCENARIOS: dict[str, tuple[int, str, list[str]]] = {  # name -> processes, fault of workers/faulty.py, overrides
    "healthy": (1, "", ["trainer.steps=80", *FULL]),
    "healthy_grpo": (1, "", ["algorithm=grpo", "trainer.steps=60", *FULL]),
    "reward_scale_jumps": (
        1,
        "",
        ["environment.name=workers.faulty.ChangesItsScale", "optimizer.warmup_steps=0", "trainer.steps=24", *FULL],
    ),
    "reward_pays_for_calls": (1, "", ["environment.name=workers.faulty.PaysForCalls", "trainer.steps=50", *FULL]),
    "noise_for_a_reward": (
        1,
        "",
        ["environment.name=workers.faulty.TalksMuch", "rollout.max_turns=1", "trainer.seed=2", "trainer.steps=60"],
    ),
    "never_rewarded": (1, "", ["environment.name=workers.faulty.NeverPays"]),
    "groups_never_rewarded": (1, "", ["algorithm=grpo", "environment.name=workers.faulty.NeverPays"]),
    "cold_groups": (1, "", ["algorithm=grpo", "rollout.temperature=0.2", "optimizer.learning_rate=1e-5"]),
    "cold_sampler": (1, "cold", []),
    "stale": (1, "", ["rollout.lag=6", "optimizer.learning_rate=1e-2"]),
    "delta_of_zero": (1, "", ["algorithm.settings.delta=0"]),
    "narrow_clip": (
        1,
        "",
        ["algorithm=grpo", "rollout.lag=6", "algorithm.settings.clip_low=0", "algorithm.settings.clip_high=0"],
    ),
    "kl_grows": (1, "", [*KL, "reference.mode=frozen", "trainer.steps=24", *FULL]),
    "average_lags": (1, "", [*KL, "reference.mode=ema", "reference.beta=0.999"]),
    "wrong_logprobs": (1, "wrong_logprobs", []),
    "environment_fails": (1, "", ["environment.name=workers.faulty.OftenFails"]),
    "one_turn": (1, "", ["rollout.max_turns=1"]),
    "slow_environment": (1, "", ["environment.name=workers.faulty.IsSlow"]),
    "slow_environment_streaming": (
        1,
        "",
        ["environment.name=workers.faulty.IsSlow", "rollout.mode=in_flight", "rollout.max_staleness=4"],
    ),
    "slow_refit": (1, "slow_refit", []),
    "too_old": (1, "", ["rollout.mode=async", "rollout.max_in_flight=64", "rollout.max_staleness=1"]),
    "trainer_is_slow": (1, "slow_training", ["rollout.mode=async", "rollout.max_in_flight=32"]),
    "few_for_two_ranks": (2, "", ["rollout.batch_size=2"]),
    "one_answer_for_all": (
        1,
        "",
        ["environment.name=workers.faulty.PaysForOnes", "trainer.steps=60", *FULL],
    ),
    "shaping_pays_for_calls": (
        1,
        "",
        [
            *("environment.name=workers.faulty.ShapesByCalls", "advantage.shaping={calls: 0.5}"),
            *("trainer.steps=40", *FULL),
        ],
    ),
    "shortcut_in_training_tasks": (
        1,
        "",
        [
            *("environment.name=workers.faulty.HasAShortcut", "evaluation.settings={seed: 1}"),
            *("evaluation.every_steps=5", "trainer.steps=40", *FULL),
        ],
    ),
    "forgets_slowly": (
        1,
        "",
        ["optimizer.weight_decay=10", "trainer.steps=120", *FULL],
    ),
    "policy_collapses": (
        1,
        "",
        [
            *("rollout.lag=4", "optimizer.learning_rate=4e-3", "algorithm.settings.delta=inf"),
            *("trainer.steps=24", *FULL),
        ],
    ),
    "short_for_two_ranks": (2, "", ["parallel.context=2", "rollout.max_turns=2"]),  # 21 tokens are padded to 24
}


def record(name: str, warm_start: Path) -> None:
    from processes import run_ranks

    from nemo_flashrl.run.record import read_run

    processes, fault, overrides = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        fixed = [f"output={output}", f"model.path={warm_start}", "checkpoint.every_steps=0", *SHORT]
        run_ranks(processes, "faulty", fault, "rehearsal", *fixed, *overrides, timeout=1200)
        run = read_run(output)
    configuration = {key: value for key, value in run.configuration.items() if key != "output"}
    configuration["model"] = {**configuration["model"], "path": "warm_start"}
    write(name, configuration, run.steps)


def write(name: str, configuration: dict, steps: list[dict]) -> None:
    short = [
        {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in step.items() if k != "reward_histogram"}
        for step in steps
    ]
    text = "".join(json.dumps(line) + "\n" for line in [{"configuration": configuration}, *short])
    with gzip.GzipFile(HERE / f"{name}.jsonl.gz", "wb", mtime=0) as file:
        file.write(text.encode())


def main(names: list[str]) -> None:
    from nemo_flashrl.rehearsal.warm_start import make_warm_start

    with tempfile.TemporaryDirectory() as folder:
        warm_start = make_warm_start(Path(folder) / "warm_start", seed=0)
        for name in names or SCENARIOS:
            try:
                record(name, warm_start)
                print(name, "recorded", flush=True)
            except AssertionError as error:
                print(name, "failed:", str(error)[-600:], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
