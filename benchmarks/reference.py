"""What the reference policy costs: host memory, memory of a swap, and time as a share of a training step.

    OMP_NUM_THREADS=1 python benchmarks/reference.py            # a Qwen2 of 22.6 million parameters, one process

A real step of the trainer (FlashREINFORCE, KL k3 in the loss, EMA after every step) on trajectories that are made up.
Times are medians over the steps after the first. `score pass` is the forward pass of the reference, which any
reference needs, wherever its weights rest.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

VOCAB_SIZE = 8192
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


def write_model(folder: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB_SIZE, tie_word_embeddings=False, **MODEL)).save_pretrained(folder)


def make_batch(count: int, length: int):
    from nemo_flashrl.records import Batch, Trajectory

    rng = np.random.default_rng(0)
    mask = np.arange(length) >= length // 4
    trajectories = [
        Trajectory(
            prompt_index=index,
            group=index,
            token_ids=rng.integers(0, VOCAB_SIZE, length),
            action_mask=mask,
            behavior_logprobs=np.where(mask, -np.log(VOCAB_SIZE), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            reward=float(index % 2),
            turns=1,
            end_reason="done",
            failed=index % 2 == 0,
        )
        for index in range(count)
    ]
    return Batch(tuple(trajectories), 0)


def timed(times: dict[str, list[float]], name: str, function):
    def call(*arguments, **options):
        started = time.perf_counter()
        answer = function(*arguments, **options)
        times.setdefault(name, []).append(time.perf_counter() - started)
        return answer

    return call


def measure(steps: int, count: int, length: int, precision: str) -> None:
    from nemo_flashrl import platform
    from nemo_flashrl.preflight.prepare import prepare as preflight

    platform.install()
    import lightning.pytorch as pl

    from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
    from nemo_flashrl.build import build_data, build_model, build_reference, build_trainer
    from nemo_flashrl.callbacks import reference as ema_reference
    from nemo_flashrl.config import load
    from nemo_flashrl.models.shadow_weights import ShadowWeights

    times: dict[str, list[float]] = {}
    swapped_in = ShadowWeights.swapped_in

    @contextlib.contextmanager
    def split(self: ShadowWeights) -> Iterator[None]:
        context = swapped_in(self)
        timed(times, "swap in", context.__enter__)()
        try:
            yield
        finally:
            timed(times, "swap out", context.__exit__)(None, None, None)

    ShadowWeights.swapped_in = split
    ShadowWeights.follow = timed(times, "EMA update", ShadowWeights.follow)
    ema_reference.score = timed(times, "score pass", ema_reference.score)

    class Clock(pl.Callback):
        def on_train_batch_start(self, *_) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer, module, *_) -> None:
            times.setdefault("step", []).append(time.perf_counter() - self.started)

    class Driver:
        def collect(self, version: int):
            return make_batch(count, length)

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        config = load(
            "rehearsal",
            [
                f"output={folder}/unused",
                f"model.path={folder}/model",
                "model.context_length=256",
                f"model.precision={precision}",
                f"trainer.steps={steps}",
                "reference.mode=ema",
                "kl.coefficient=0.01",
            ],
        )
        algorithm = FlashReinforce(FlashReinforceSettings(delta=float("inf"), ratio_guard=float("inf")))
        algorithm = preflight.with_reference(config, algorithm)
        parts = preflight.Parts(algorithm, object, None, [], None, VOCAB_SIZE, data_parallel=1)
        reference, penalty = build_reference(config, parts)
        trainer = build_trainer(config, [reference, penalty, Clock()])
        trainer.fit(build_model(config, parts), datamodule=build_data(config, parts, Driver()))
        report(times, reference.shadow, count * length, precision)


def report(times: dict[str, list[float]], shadow, tokens: int, precision: str) -> None:
    parameters = sum(value.numel() for value in shadow.values.values())
    host = sum(value.untyped_storage().nbytes() for value in shadow.values.values())
    print(f"{precision}: {parameters / 1e6:.1f} million parameters, {tokens} tokens a step")
    print(f"host memory: {host / parameters:.2f} bytes a parameter ({host / 2**20:.0f} MiB)")
    step = statistics.median(times["step"][1:])
    moves = 0.0
    print("| part | seconds | share of the step |\n| --- | --- | --- |")
    for name in ("swap in", "swap out", "EMA update", "score pass", "step"):
        seconds = statistics.median(times[name][1:])
        moves += seconds if name in ("swap in", "swap out", "EMA update") else 0.0
        print(f"| {name} | {seconds:.3f} | {seconds / step:.1%} |")
    print(f"| EMA update + swap in and out | {moves:.3f} | {moves / step:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29641")
    measure(options.steps, options.trajectories, options.length, options.precision)


if __name__ == "__main__":
    main()
