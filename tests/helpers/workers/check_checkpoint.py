"""A checkpoint of a model that trains on a device: saved by NeMo's functions, read into another model, bit for bit."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_device import Device
from nemo.lightning._strategy_lib import load_model_state_dict, optimizer_sharded_state_dict
from nemo.lightning.io.pl import MegatronCheckpointIO

from nemo_flashrl.data.rank_step import RankStep
from workers.gpu_step import Rank, answers

MICROBATCHES = 2


def main(experiment: str, overrides: list[str], layers: int) -> dict:
    first = Rank(experiment, overrides, 0, layers)
    steps = [first.microbatches(MICROBATCHES) for _ in range(4)]  # all of the same numbers
    with Device(answers(first)) as device, tempfile.TemporaryDirectory() as folder:
        first.build()
        for step in steps[: 2 if device.is_real else 1]:
            train(first, step)
        metadata = first.trainer.strategy.sharded_state_dict_metadata
        contents = state_of(first, metadata)
        found: dict = {"parameters": sum(p.numel() for p in first.model.parameters())}
        second = Rank(experiment, [*overrides, "trainer.seed=1"], 0, layers, joined=True)
        second.build()
        wanted = state_of(second, metadata, is_loading=True)
        if not device.is_real:  # nothing could be written of tensors without values
            return found | {"tensors": len(list(held(first)))}
        path = Path(folder) / "step=2"
        start = time.monotonic()
        MegatronCheckpointIO().save_checkpoint(contents, path, {"content_metadata": metadata})
        found["save_s"], found["bytes"] = time.monotonic() - start, sum(f.stat().st_size for f in path.rglob("*.*"))
        found["differed_before"] = differing(first, second)
        start = time.monotonic()
        read = MegatronCheckpointIO().load_checkpoint(path, sharded_state_dict=wanted)
        load_model_state_dict(second.pipeline, read)
        second.optimizer.load_state_dict(read["optimizer"][0])
        device.synchronize()
        found["load_s"] = time.monotonic() - start
        found["differ"] = differing(first, second)
        found["tensors"] = len(list(held(first)))
        train(first, steps[2])
        train(second, steps[3])
        found["differ_after_a_step"] = differing(first, second)  # some kernels add in no fixed order
        return found


def train(rank: Rank, step: RankStep) -> None:
    rank.train(step)
    rank.optimizer.step()


def state_of(rank: Rank, metadata: dict, is_loading: bool = False) -> dict:
    """What NeMo's strategy hands to its checkpoint IO."""
    optimizer = optimizer_sharded_state_dict(rank.pipeline, rank.optimizer, is_loading, metadata=metadata)
    model = rank.pipeline.sharded_state_dict(metadata=metadata)
    return {"state_dict" if is_loading else "sharded_state_dict": model, "optimizer": [optimizer]}


def held(rank: Rank) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights, fp32 weights, moments."""
    yield from rank.model.named_parameters()
    for one in rank.optimizer.mcore_optimizer.chained_optimizers:
        for number, group in enumerate(one.shard_fp32_from_float16_groups):
            for index, parameter in enumerate(group):
                if parameter is not None:
                    yield f"fp32 {number} {index}", parameter
        for index, state in enumerate(one.optimizer.state.values()):
            yield from ((f"{name} {index}", value) for name, value in state.items() if torch.is_tensor(value))


def differing(one: Rank, other: Rank) -> list[str]:
    pairs = zip(held(one), held(other), strict=True)
    return [name for (name, own), (_, theirs) in pairs if not torch.equal(own, theirs)]
