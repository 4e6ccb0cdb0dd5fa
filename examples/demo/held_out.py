"""Held-out tasks before and after: `play` answers them with a Hugging Face folder, `compare` shows two of its files.

python examples/demo/held_out.py play runs/demo/model runs/demo/before.jsonl
python examples/demo/held_out.py compare runs/demo/before.jsonl runs/demo/after.jsonl --run runs/demo/run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent / "demo.yaml"
HELD_OUT = ("evaluation.tasks=200", "evaluation.settings={seed:1}")  # training has seed 0
SHOWN = 10
Z = 1.959964  # of a 95% interval


def play(folder: Path, file: Path) -> None:
    """Answer the held-out tasks, sampled as in training; a file that is there stays."""
    if file.exists():
        return
    from transformers import AutoTokenizer

    from nemo_flashrl import environments
    from nemo_flashrl.config import load
    from nemo_flashrl.engines import TransformersEngine
    from nemo_flashrl.rollout.from_config import held_out, held_out_tasks

    config = load(str(CONFIG), [f"model.path={folder}", *HELD_OUT])
    environment, tokenizer = environments.load(config.environment.name), AutoTokenizer.from_pretrained(folder)
    _, tasks = held_out_tasks(config, environment)
    print(f"{len(tasks)} held-out tasks answered by {folder} ...", flush=True)
    started = time.perf_counter()
    trajectories = asyncio.run(held_out(config, environment, tokenizer)(TransformersEngine(folder)))
    seconds = time.perf_counter() - started
    lines = []
    for task, trajectory in zip(tasks, trajectories, strict=True):
        said = [trajectory.token_ids[trajectory.turn_of_token == turn] for turn in range(trajectory.turns)]
        actions = [tokenizer.decode(ids, skip_special_tokens=True) for ids in said]
        answer = {"task": str(task), "right": task.calls(), "said": actions, **trajectory.info}
        lines.append(json.dumps({**answer, "solved": not trajectory.failed}))
    lines.append(json.dumps({"seconds": seconds}))
    file.write_text("\n".join(lines) + "\n")
    print(f"  success {_success(_read(file))}, {seconds:.0f} s")


def compare(before: Path, after: Path, run: Path) -> None:
    """Print what training changed, and let plain transformers answer one task with the exported folder."""
    from nemo_flashrl.rehearsal.summary import draw_curve
    from nemo_flashrl.run.jsonl import read_metrics

    old, new, steps = _read(before), _read(after), read_metrics(run / "metrics.jsonl")
    for number, (first, second) in enumerate(zip(old[:SHOWN], new[:SHOWN], strict=True), 1):
        print(f"\n  {number:2}  {first['task']}")
        for name, answer in (("before", first), ("after", second)):
            print(f"      {name:6}  {'right' if answer['solved'] else 'wrong'}  {'  '.join(map(repr, answer['said']))}")
    print("\n  success in training, each update's own trajectories\n")
    print("\n".join(f"  {line}" for line in draw_curve([step["success"] for step in steps])))
    print(f"\n  success on {len(old)} held-out tasks, 95% interval")
    for name, answers in (("before", old), ("after", new)):
        ends = Counter(answer["outcome"] for answer in answers)
        print(f"    {name:6}  {_success(answers)}   {', '.join(f'{count} {end}' for end, count in ends.items())}")
    tokens, seconds = (sum(step[name] for step in steps) for name in ("policy_tokens", "step_seconds"))
    print(f"\n  {len(steps)} updates in {seconds:.0f} s, {tokens:.0f} tokens sampled")
    print(f"\n  {run / 'checkpoint'}, loaded and answered by transformers alone\n")
    _converse(run / "checkpoint")


def _converse(folder: Path) -> None:
    """One task, greedy, with nothing of this package but the environment."""
    from calculator import Calculator, Settings
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    settings = Settings(seed=2)
    game = Calculator(settings)
    messages, result = asyncio.run(game.reset(Calculator.tasks(settings)[0])), None
    print(f"    user       {messages[-1]['content']}")
    while result is None or not result.done:
        text = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(messages, **text)
        output = model.generate(**prompt, do_sample=False, max_new_tokens=20)
        said = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        result = asyncio.run(game.step(said))
        print(f"    assistant  {said}\n    {'end' if result.done else 'user':9}  {result.observation or result.info}")
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": result.observation}]


def wilson(solved: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share by Wilson's score."""
    share, square = solved / count, Z * Z / count
    middle, half = share + square / 2, Z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max((middle - half) / (1 + square), 0.0), min((middle + half) / (1 + square), 1.0)


def _success(answers: list[dict[str, Any]]) -> str:
    solved = sum(answer["solved"] for answer in answers)
    low, high = wilson(solved, len(answers))
    return f"{solved / len(answers):.1%} [{low:.1%}, {high:.1%}]"


def _read(file: Path) -> list[dict[str, Any]]:
    return [answer for answer in map(json.loads, file.read_text().splitlines()) if "task" in answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    playing = commands.add_parser("play")
    playing.add_argument("folder", type=Path)
    playing.add_argument("file", type=Path)
    comparing = commands.add_parser("compare")
    for name in ("before", "after", "--run"):
        comparing.add_argument(name, type=Path, **({"required": True} if name == "--run" else {}))
    options = vars(parser.parse_args())
    {"play": play, "compare": compare}[options.pop("command")](**options)


if __name__ == "__main__":
    main()
