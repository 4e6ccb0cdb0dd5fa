"""FlashREINFORCE beside GRPO on a language model, rollouts from a real vLLM server: runs, tables, learning curves.

    python benchmarks/language_model.py run  --runs runs/results --model runs/demo/model
    python benchmarks/language_model.py run  --runs runs/results --model runs/demo/model --precision fp32 short-sync-0
    python benchmarks/language_model.py keep --runs runs/results --kept docs/results
    python benchmarks/language_model.py show --kept docs/results --picture docs/images/language_model.svg

The task is that of `make demo`, which makes the model, from examples/demo/demo.yaml. `run` needs `make rollout-venv`.
The two algorithms of a seed run side by side, each with a server of its own and one thread in each process, and the
next pair begins when both have ended. A run that has ended is left alone; one that was stopped begins anew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rehearsal_compare import SIZE, Curves, Row, padding_of_one_row_each, panel, table, turns_waited

from nemo_flashrl.ablation.picture import document
from nemo_flashrl.launch.parent import end_with_parent
from nemo_flashrl.run.jsonl import append_json_line, read_json_lines
from nemo_flashrl.run.record import RunRecord, read_run

CONFIG = Path(__file__).parents[1] / "examples/demo/demo.yaml"
ALGORITHMS = {"flash_reinforce": "FlashREINFORCE", "grpo": "GRPO, G=8"}
LONGER = "environment.settings.operations=6 rollout.max_turns=6 rollout.batch_size=32 model.context_length=256"
TASKS = {  # over demo.yaml and SHARED
    "demo": "",
    "demo_1e5": "optimizer.learning_rate=1.0e-5",  # as demo.yaml has it
    "longer": f"{LONGER} trainer.steps=8 evaluation.every_steps=4 evaluation.tasks=64",
    "short": "trainer.steps=3 evaluation.every_steps=0",  # for the log-probs of both sides
}
SERVED = ("rollout.batch_size=32", "model.context_length=256")  # what the largest task needs of a server
PAIRS = [f"demo-{mode}-{seed}" for seed in (0, 1, 2) for mode in ("sync", "async")]
SHARED = (
    "rollout.engine=vllm",
    "checkpoint.every_steps=0",
    "batching.max_tokens_per_microbatch=1024",  # two or three microbatches: memory for two trainers and two servers
    "trainer.log_trajectories=0",
    "optimizer.learning_rate=3.0e-5",  # demo.yaml's 1e-5 is lost in bf16's rounding of most weights
    "evaluation.every_steps=5",
    "evaluation.tasks=128",
    "evaluation.settings={seed:1}",  # training has seed 0
)
LAST = 3  # updates, of whose trajectories success at equal wall time is the mean
BEFORE = "before.jsonl"  # held-out success of the model before training
COLUMNS = ("step", "group", "turns", "tokens", "action_tokens", "reward", "advantage", "success", "staleness")


async def run(options: argparse.Namespace) -> None:
    """The same servers for all runs, whose trainers bring them their weights."""
    from rollouts_server import serving

    fixed = [*SHARED, f"model.path={options.model.resolve()}", f"model.precision={options.precision}"]
    pairs = [pair.split("-") for pair in options.pairs]  # task, mode, seed
    roots = {task: options.runs / f"{task}-{options.precision}" for task, _, _ in pairs}
    for root in roots.values():
        root.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        logs = [options.runs / f"server-{name}.log" for name in ALGORITHMS]
        servers = [serving(CONFIG, log, *fixed, *SERVED) for log in logs]
        urls = await asyncio.gather(*map(stack.enter_async_context, servers))
        for task, root in roots.items():
            seeds = sorted({int(seed) for own, _, seed in pairs if own == task})
            await play_before(root / BEFORE, seeds, [*fixed, *TASKS[task].split()], urls[0])
        for task, mode, seed in pairs:
            pair = zip(ALGORITHMS, urls, strict=True)
            folders = [(roots[task] / mode / name / f"seed{seed}", name, url) for name, url in pair]
            await asyncio.gather(*(trained(*own, [*fixed, *TASKS[task].split()]) for own in folders))


async def play_before(file: Path, seeds: Sequence[int], fixed: Sequence[str], url: str) -> None:
    """What the server answers to the held-out tasks with the weights that it started with."""
    from transformers import AutoTokenizer

    from nemo_flashrl import environments
    from nemo_flashrl.config import load
    from nemo_flashrl.engines import VLLMEngine
    from nemo_flashrl.rollout.from_config import held_out
    from nemo_flashrl.rollout.metrics import success_rate

    known = {row["seed"] for row in read_json_lines(file)} if file.exists() else set()
    for seed in (seed for seed in seeds if seed not in known):
        config = load(str(CONFIG), [*fixed, f"trainer.seed={seed}", "output=none"])
        if not config.evaluation.every_steps:
            continue
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        engine = VLLMEngine([url], len(tokenizer))
        play = held_out(config, environments.load(config.environment.name), tokenizer)
        success = success_rate(await play(engine))
        await engine.close()
        append_json_line(file, {"seed": seed, "success": success, "tasks": config.evaluation.tasks})
        print(file.parent.name, f"seed {seed}: held-out success {success:.3f} before training", flush=True)


async def trained(folder: Path, algorithm: str, url: str, fixed: Sequence[str]) -> None:
    if (folder / "checkpoint").is_dir():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = [f"output={folder}", f"algorithm={algorithm}", f"rollout.mode={folder.parts[-3]}", f"rollout.servers=[{url}]"]
    training = ["train", CONFIG, *fixed, *own, f"trainer.seed={folder.name[4:]}"]
    command = [sys.executable, "-m", "nemo_flashrl.cli", *training]
    with folder.with_suffix(".log").open("w") as log:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        streams: dict[str, Any] = {"stdout": log, "stderr": log, "env": environment, "preexec_fn": end_with_parent}
        process = await asyncio.create_subprocess_exec(*command, **streams)
        code = await process.wait()
    if code:
        raise SystemExit(f"{folder} failed:\n{folder.with_suffix('.log').read_text()[-4000:]}")
    done = read_run(folder)
    print(*folder.parts[-4:], f"held out {evaluated(-1)(done):.3f}, {clock(done)[-1]:.0f} s", flush=True)


def keep(options: argparse.Namespace) -> None:
    """Copy what `show` reads: the metrics, and of every trajectory its numbers."""
    for file in sorted(options.runs.glob(f"*/{BEFORE}")):
        (options.kept / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, options.kept / file.parent.name)
    for exported in sorted(options.runs.glob("*/*/*/*/checkpoint")):
        folder = options.kept / exported.parent.relative_to(options.runs)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(exported.parent / "metrics.jsonl", folder)
        for row in read_json_lines(exported.parent / "trajectories.jsonl"):
            append_json_line(folder / "trajectories.jsonl", {name: row[name] for name in COLUMNS})


def clock(run: RunRecord) -> np.ndarray:
    """Seconds of training until the end of each update, held-out evaluations left out."""
    return np.cumsum(run.column("step_seconds") - np.nan_to_num(run.column("evaluating_seconds")))


def success_by(run: RunRecord, seconds: float) -> float:
    """Of the last updates that had ended by then."""
    return float(run.column("success")[clock(run) <= seconds][-LAST:].mean())


def batch_size(run: RunRecord) -> float:
    return sum(1 for _ in read_json_lines(run.trajectories)) / len(run.steps)


def tokens_per_second(name: str) -> Callable[[RunRecord], float]:
    """`name`: a metric of tokens a trajectory."""
    return lambda run: float(batch_size(run) * run.column(name).sum() / clock(run)[-1])


def evaluated(place: int) -> Callable[[RunRecord], float]:
    """Success of an evaluation, in their order; NaN without any."""

    def of(run: RunRecord) -> float:
        success = run.column("evaluation_success")
        return float((success[np.isfinite(success)] if run.has("evaluation_success") else success)[place])

    return of


def mean(name: str) -> Callable[[RunRecord], float]:
    """NaN where the algorithm has no such number."""
    return lambda run: float(np.nanmean(run.column(name))) if run.has(name) else np.nan


def largest(name: str) -> Callable[[RunRecord], float]:
    return lambda run: float(run.column(name).max())


ROWS: dict[str, tuple[str, Callable[[RunRecord], float]]] = {  # title -> (format, of a run)
    "held-out success, first evaluation": (".3f", evaluated(0)),
    "held-out success after the last update": (".3f", evaluated(-1)),
    "success in training, mean of all updates": (".3f", mean("success")),
    "trajectories with an advantage, share": (".3f", lambda run: mean("effective_samples")(run) / batch_size(run)),
    "groups of equal rewards, share": (".3f", mean("tied_groups")),
    "gate acceptance": (".3f", mean("gate_acceptance")),
    "staleness, versions, mean": (".2f", mean("staleness_mean")),
    "staleness, versions, largest": (".1f", largest("staleness_max")),
    "log-prob, trainer - sampler, nats, mean": (".2e", mean("logprob_difference")),
    "log-prob, trainer - sampler, nats, largest": (".2e", largest("logprob_difference_max")),
    "gradient norm, mean": (".2f", mean("grad_norm")),
    "seconds an update": (".1f", lambda run: float(clock(run)[-1] / len(run.steps))),
    "seconds the trainer waits for a batch": (".1f", mean("rollout_seconds")),
    "seconds of forward, backward, optimizer": (".1f", mean("train_seconds")),
    "seconds of a weight sync": (".1f", mean("refit_seconds")),
    "tokens/s, sampled": (".1f", tokens_per_second("response_tokens")),
    "tokens/s, trained, prompts included": (".1f", tokens_per_second("trajectory_tokens")),
    "turns an episode": (".2f", mean("turns")),
    "tokens a trajectory": (".0f", mean("trajectory_tokens")),
    "seconds a finished trajectory waits for its group": (".1f", mean("group_wait_seconds")),
    "turns that siblings wait for their slowest": (".2f", lambda run: turns_waited(run, "group")),
    "turns that the batch waits for its slowest": (".2f", lambda run: turns_waited(run, "step")),
    "seconds a rollout slot is idle, an update, evaluations included": (".1f", mean("rollout_idle_seconds")),
    "padding, packed": (".3f", mean("padding_share")),
    "padding, had a batch one row each": (".3f", padding_of_one_row_each),
    "peak memory of the trainer, GiB": (".2f", largest("memory_peak_gib")),
}


def at_equal_time(sides: Sequence[Sequence[RunRecord]]) -> Iterator[Row]:
    """Both runs of a seed, cut where the quicker one ends."""
    ends = [min(clock(run)[-1] for run in pair) for pair in zip(*sides, strict=True)]
    for title, form, of in (
        ("seconds of the quicker run", ".0f", lambda _, end: end),
        ("trajectories by then", ".0f", lambda run, end: batch_size(run) * np.sum(clock(run) <= end)),
        (f"success in training by then, {LAST} updates", ".3f", success_by),
    ):
        yield title, form, [[of(run, end) for run, end in zip(side, ends, strict=True)] for side in sides]
    ratios = [[clock(run)[-1] / end for run, end in zip(side, ends, strict=True)] for side in sides]
    yield "seconds of the whole run / the quicker's", ".2f", ratios


def by_evaluation(runs: Sequence[RunRecord], before: Sequence[float]) -> Curves:
    """Held-out success, from that before training on."""
    success = np.array([run.column("evaluation_success") for run in runs])
    done = np.isfinite(success[0])
    return np.append(0, runs[0].column("step")[done]), np.column_stack([before, success[:, done]])


def by_update(runs: Sequence[RunRecord], _: Sequence[float]) -> Curves:
    return runs[0].column("step"), np.array([run.column("success") for run in runs])


def by_second(runs: Sequence[RunRecord], _: Sequence[float]) -> Curves:
    """Linear between the ends of updates, as far as the shortest run goes."""
    times = [clock(run) for run in runs]
    grid = np.linspace(max(own[0] for own in times), min(own[-1] for own in times), 50)
    return grid, np.array([np.interp(grid, own, run.column("success")) for own, run in zip(times, runs, strict=True)])


PANELS = (
    ("held-out success", by_evaluation, "update"),
    ("success in training", by_update, "update"),
    ("success in training", by_second, "seconds"),
)


def pairs(mode: Path) -> tuple[list[str], list[list[RunRecord]]]:
    """The seeds that both algorithms have, and the runs of each."""
    found = [{path.parent.name for path in (mode / name).glob("*/metrics.jsonl")} for name in ALGORITHMS]
    seeds = sorted(set.intersection(*found))
    return seeds, [[read_run(mode / name / seed) for seed in seeds] for name in ALGORITHMS]


def show(options: argparse.Namespace) -> None:
    """Print the tables; write the picture, a row of panels for each task and mode that was evaluated."""
    names, parts, drawn = list(ALGORITHMS.values()), [], 0
    for mode in sorted(path for path in options.kept.glob("*/*") if path.is_dir()):
        seeds, sides = pairs(mode)
        if not seeds:
            continue
        title, known = f"{mode.parent.name}, {mode.name}", mode.parent / BEFORE
        print(f"\n### {title}: {', '.join(seeds)}\n")
        rows = [(title, form, [[of(run) for run in side] for side in sides]) for title, (form, of) in ROWS.items()]
        if known.exists():
            started = {f"seed{row['seed']}": row["success"] for row in read_json_lines(known)}
            before = [started[seed] for seed in seeds]
            rows.insert(0, ("held-out success before training", ".3f", [before, before]))
            for place, (what, curves, axis) in enumerate(PANELS):
                parts.append(f'<g transform="translate({place * SIZE[0]} {drawn * SIZE[1]})">')
                shown = [curves(side, before) for side in sides]
                parts += [*panel(shown, names, f"{title}, seeds: {len(seeds)}; {what}", axis), "</g>"]
            drawn += 1
        print(table([*rows, *at_equal_time(sides)], names))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(document(parts, len(PANELS) * SIZE[0], drawn * SIZE[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running, keeping, showing = (commands.add_parser(name) for name in ("run", "keep", "show"))
    for command in (running, keeping):
        command.add_argument("--runs", type=Path, required=True)
    running.add_argument("--model", type=Path, required=True)
    running.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    running.add_argument("pairs", nargs="*", default=[*PAIRS, "longer-sync-0"], metavar="TASK-MODE-SEED")
    for command in (keeping, showing):
        command.add_argument("--kept", type=Path, required=True)
    showing.add_argument("--picture", type=Path, required=True)
    options: Any = parser.parse_args()
    {"run": lambda own: asyncio.run(run(own)), "keep": keep, "show": show}[options.command](options)


if __name__ == "__main__":
    main()
