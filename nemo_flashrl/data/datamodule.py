"""Collected batches -> what each rank's optimizer step runs, through NeMo's data sampler seam.

rank 0: collect (B trajectories) -> weigh (global advantages and weights) -> plan microbatches for all ranks
all   : receive this rank's microbatches -> keep the context-parallel share of each -> MegatronStrategy runs them
        -> one optimizer step -> the batch is gone
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronStep
from nemo.lightning.pytorch.plugins.data_sampler import DataSampler
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from nemo_flashrl import platform
from nemo_flashrl.algorithms.advantages import Credit
from nemo_flashrl.algorithms.algorithm import Algorithm
from nemo_flashrl.batching.planner import LengthBatcher
from nemo_flashrl.data.collate import pack_rows, pad_rows, truncate
from nemo_flashrl.data.context_parallel import context_share
from nemo_flashrl.data.credit import TrajectoryCredit, token_advantages
from nemo_flashrl.data.rank_step import RankStep, scatter, stage_share
from nemo_flashrl.records import Batch, Trajectory
from nemo_flashrl.rollout.collector import CollectionStopped

Collect = Callable[[int], Batch]
# What of a microbatch the host reads as numbers: from the device it would have to wait for them.
ON_THE_HOST = ("max_seqlen", "num_microbatches", "temperatures", "trajectory")


@dataclass(frozen=True)
class Seat:
    """What of a step a rank reads; tensor-parallel ranks have the same."""

    data: int  # data-parallel rank
    context: int  # context-parallel rank
    context_size: int
    first: bool  # it holds the first pipeline stage
    last: bool

    @classmethod
    def own(cls) -> Seat:
        return cls(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.is_pipeline_first_stage(),
            parallel_state.is_pipeline_last_stage(),
        )

    def share(self, step: RankStep) -> RankStep:
        held = [context_share(microbatch, self.context, self.context_size) for microbatch in step.microbatches]
        return RankStep([stage_share(m, first=self.first, last=self.last) for m in held], step.metrics)


class RolloutDataModule(pl.LightningDataModule):
    """Yields one collected batch a training step.

    Args:
        collect: policy version -> Batch; called on global rank 0 only, None elsewhere.
        algorithm: weighs the whole batch before it is split.
        credit: the techniques around it.
        batcher: plans microbatches.
        seed: orders microbatches.
        saved: what a checkpoint holds under each name, on the collecting rank: objects with `state_dict` and
            `load_state_dict`. The algorithm is one of them if it has both.
    """

    def __init__(
        self,
        collect: Collect | None,
        algorithm: Algorithm,
        batcher: LengthBatcher,
        *,
        credit: TrajectoryCredit = TrajectoryCredit(),
        seed: int = 0,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.collect = collect
        self.algorithm = algorithm
        self.batcher = batcher
        self.credit = credit
        self.seed = seed
        self.data_sampler = StepSampler()
        self.current_step: RankStep | None = None  # what callbacks report to
        self._seats: list[Seat] = []  # of all global ranks
        self._trajectories: tuple[Trajectory, ...] | None = None  # of the last step: a batch may be used again
        self._saved = dict(saved or {})
        if hasattr(algorithm, "state_dict"):
            self._saved["algorithm"] = algorithm

    def state_dict(self) -> dict[str, Any]:
        """Lightning's hook, as a checkpoint is written; global rank 0's is the one that is kept."""
        return {name: part.state_dict() for name, part in self._saved.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning's hook, before the first step; all ranks get rank 0's."""
        for name, part in self._saved.items():
            if name != "algorithm" or name in state_dict:  # the run may have begun with one that keeps nothing
                part.load_state_dict(state_dict[name])

    def train_dataloader(self) -> DataLoader:
        """An endless loader; an element is one rank's share of one optimizer step."""
        return DataLoader(_Steps(self), batch_size=None, num_workers=0)

    def next_step(self, version: int) -> RankStep:
        """Collect on rank 0, plan, and hand each rank its share. A collective over all ranks."""
        group = platform.object_group()
        if not self._seats:
            self._seats = [Seat.own()] * group.size()
            torch.distributed.all_gather_object(self._seats, Seat.own(), group=group)
        shares: list[RankStep] = []
        batch, planned = None, RankStep([])
        if group.rank() == 0:
            try:
                batch, steps = self._collect_and_plan(version)
                planned = steps[0]
                at_seat = {seat: seat.share(steps[seat.data]) for seat in set(self._seats)}
                shares = [at_seat[seat] for seat in self._seats]
            except BaseException as error:
                shares = [RankStep([], error=error)] * group.size()
        step = scatter(shares, group)
        if step.error is not None:
            raise step.error
        step.batch, step.advantages = batch, planned.advantages
        step.assign, step.rewards = planned.assign, planned.rewards
        self.current_step = step
        return step

    def _collect_and_plan(self, version: int) -> tuple[Batch, list[RankStep]]:
        started = time.perf_counter()
        batch = self.collect(version)
        waited = time.perf_counter() - started
        if hasattr(self.algorithm, "next_batch") and batch.trajectories is not self._trajectories:
            self.algorithm.next_batch()
        self._trajectories = batch.trajectories
        steps = plan_steps(
            batch,
            self.algorithm,
            self.batcher,
            credit=self.credit,
            dp_size=parallel_state.get_data_parallel_world_size(),
            seed=self.seed + version,
        )
        for step in steps:
            step.metrics["rollout_seconds"] = waited
        return batch, steps


def plan_steps(
    batch: Batch,
    algorithm: Algorithm,
    batcher: LengthBatcher,
    *,
    credit: TrajectoryCredit = TrajectoryCredit(),
    dp_size: int,
    seed: int,
) -> list[RankStep]:
    """The share of every data-parallel rank: global weights first, then the split, which cannot change the loss."""
    settings = batcher.settings
    lay_out = pack_rows if settings.layout == "packed" else pad_rows
    lengths = [[part.stop - part.start for part in t.segments] for t in batch.trajectories]
    plan = batcher.plan(lengths, dp_size, seed=seed)
    kept = [i for i, length in enumerate(plan.lengths) if length]
    whole = [truncate(batch.trajectories[i], plan.lengths[i]) for i in kept]
    trajectories = {i: credit.trained_tokens(own) for i, own in zip(kept, whole, strict=True)}
    outcomes, counts = credit.outcomes(whole, list(trajectories.values()), step=batch.policy_version)
    place = {i: row for row, i in enumerate(kept)}

    def assign(penalties: Tensor | float = 0.0) -> tuple[Credit, dict[str, float], list[float]]:
        assigned, numbers = credit.assign(algorithm, replace(outcomes, rewards=outcomes.rewards - penalties))
        own = torch.where(outcomes.left_out, math.nan, assigned.advantages).tolist()
        return assigned, numbers, [own[place[i]] if i in place else math.nan for i in range(len(lengths))]

    assigned, numbers, shown = assign()
    metrics = {**batch.metrics, **plan.metrics(), **counts, **numbers}
    by_token = {
        i: token_advantages(trajectories[i], assigned.turn_advantages[place[i]])
        for i in (kept if assigned.turn_advantages else ())
    }
    known = [t.temperature for t in batch.trajectories if t.temperature is not None]
    with_temperatures = len(known) == len(batch.trajectories)
    steps = []
    for rank_plan in plan.ranks:
        microbatches = []
        for members in rank_plan:
            rows = torch.tensor([place[i] for i in members], dtype=torch.int64)
            held = [trajectories[i] for i in members]
            tempered = {"temperatures": _sampled_at(held)} if with_temperatures else {}
            microbatches.append(
                {
                    **tempered,
                    **lay_out(held, settings.multiple, [by_token[i] for i in members] if by_token else ()),
                    "advantages": _rows_or_zero(assigned.advantages[rows]),
                    "token_weights": _rows_or_zero(assigned.token_weights[rows]),
                    "failures": _rows_or_zero(torch.tensor([t.failed for t in held], dtype=torch.bool)),
                    # Places in the batch that is trained on; -1 is no trajectory.
                    "trajectory": rows if members else rows.new_full((1,), -1),
                    "num_microbatches": torch.tensor(len(rank_plan)),
                }
            )
        steps.append(RankStep(microbatches, dict(metrics), shown, assign=assign, rewards=outcomes.rewards))
    return steps


def _sampled_at(held: Sequence[Trajectory]) -> Tensor:
    """The temperature of each trajectory, float64 [R]; 1 for a row of padding."""
    return torch.tensor([t.temperature for t in held] or [1.0], dtype=torch.float64)


def _rows_or_zero(values: Tensor) -> Tensor:
    """A microbatch without trajectories is one row of padding."""
    return values if len(values) else values.new_zeros(1)


class _Steps(IterableDataset):
    """Asks for the next step when the trainer does, never ahead of it."""

    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data

    def __iter__(self) -> Iterator[RankStep]:
        while True:
            try:
                step = self.data.next_step(self.data.trainer.global_step)
            except CollectionStopped:  # on every rank
                self.data.trainer.should_stop = True
                return
            yield step


class StepSampler(DataSampler):
    """Gives MegatronStrategy the microbatches of each step in place of its fixed micro-batch size."""

    dataloader_type = "single"

    def setup(self, global_rank: int) -> None:
        """Nothing to prepare: sizes are known only when a batch has been collected."""

    def transform_dataloader(self, dataloader: DataLoader, consumed_samples: int = 0) -> DataLoader:
        """The loader yields whole steps already."""
        return dataloader

    def on_megatron_step_start(self, step: MegatronStep) -> MegatronStep:
        """Take one RankStep from the loader and turn it into this step's microbatches."""
        rank_step, *_ = next(step.data)
        device = platform.device()
        microbatches = [
            {name: value if name in ON_THE_HOST else value.to(device) for name, value in microbatch.items()}
            for microbatch in rank_step.microbatches
        ]
        step.data = iter(microbatches)
        step.num_microbatches = len(microbatches)
        step.micro_batch_size, step.seq_length = microbatches[0]["tokens"].shape
        return step
