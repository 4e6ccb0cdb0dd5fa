"""One optimizer step of a model on a device: memory against `flashrl plan`, host syncs against the budget, time."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence

from gpu_device import Device
from gpu_sizes import over_budget

from nemo_flashrl.data.rank_step import RankStep
from nemo_flashrl.plan.devices import USABLE
from workers.gpu_step import Rank, answers

MICROBATCHES = 2


def main(experiment: str, overrides: list[str], layers: Sequence[int]) -> dict:
    """A step of the largest of `layers` that the plan gives this device."""
    rank = Rank(experiment, overrides, 0, min(layers))
    device = Device(answers(rank))
    for count in layers:
        rank.hf_config["num_hidden_layers"] = count
        plan = rank.planned(MICROBATCHES)
        if plan["device"] <= USABLE * device.memory:
            break
    else:
        return {"skipped": f"{count} layers take {plan['device'] / 2**30:.0f} GiB, by the plan"}
    steps = [rank.microbatches(MICROBATCHES) for _ in range(4)]
    with device:
        return {"layers": count, "plan": plan, "microbatches": MICROBATCHES} | measured(rank, device, iter(steps))


def measured(rank: Rank, device: Device, steps: Iterator[RankStep]) -> dict:
    found: dict = {}
    start = time.monotonic()
    rank.build()
    found["build_s"] = time.monotonic() - start

    def step() -> None:
        rank.train(next(steps))
        _, norm, _ = rank.optimizer.step()
        found["grad_norm"] = float(norm)

    device.warm_up(step)  # and makes the optimizer's state
    if not device.is_real:
        rank.optimizer.step()
    gc.collect()
    found["static_bytes"] = device.held
    found["peak_bytes"], found["syncs"] = device.peak_and_waits_of(step)
    found["step_ms"] = device.milliseconds(step, 1)
    found["over_budget"] = over_budget(found["syncs"], MICROBATCHES)
    found["finite"] = math.isfinite(found["grad_norm"])
    found["reserved_bytes"] = device.reserved
    return found
