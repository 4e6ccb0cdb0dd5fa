"""The KL penalty of a step: its coefficient travels with the microbatches, or is taken off the rewards before the step.

Comes after the reference callback, which has left `reference_logprobs` in every microbatch. And the check that it rests
on: before the first update, the model must say the same in the training pass and without gradients.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MegatronStep
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.algorithms.kl import kl_estimate
from nemo_flashrl.algorithms.schedules import KlCoefficient
from nemo_flashrl.models.scoring import check_passes_agree, score

Row = tuple[int, float]  # place in the batch that is trained on, mean KL


class KLPenaltyCallback(pl.Callback):
    """Puts the penalty where it belongs and moves its coefficient.

    Args:
        coefficient: of the step, with its schedule.
        place: "loss": microbatches carry `kl_coefficient`; "reward": coefficient times the mean KL over a trajectory's
            action tokens is taken off its reward, and advantages are formed anew.
        estimator: of the KL in the reward.
    """

    def __init__(self, coefficient: KlCoefficient, *, place: str, estimator: str) -> None:
        self.coefficient = coefficient
        self.place = place
        self.estimator = estimator
        self._means = (math.nan, math.nan)  # KL and entropy per action token

    def on_megatron_microbatches_start(self, step: MegatronStep) -> None:
        """Before the microbatches are trained on."""
        microbatches = list(step.data)
        step.data = iter(microbatches)
        step.trainer.datamodule.current_step.report({"beta": self.coefficient.value})
        if self.place == "loss":
            for microbatch in microbatches:
                microbatch["kl_coefficient"] = torch.tensor(self.coefficient.value)
        elif self.coefficient.value > 0:
            self._reduce_rewards(step, microbatches)

    def on_megatron_reduce_microbatches_end(self, reduced: dict[str, Tensor], **_: Any) -> None:
        """The last pipeline stage knows what the step measured: nothing where every trajectory is left out."""
        tokens = float(reduced["policy_tokens"]) or math.nan
        self._means = tuple(float(reduced.get(name, math.nan)) / tokens for name in ("kl", "entropy"))

    def on_train_batch_end(self, *_: Any) -> None:
        """Every rank moves the coefficient alike."""
        means = torch.tensor(self._means, dtype=torch.float64, device=platform.device())
        group = parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast(means, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        self.coefficient.after_step(*means.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Lightning's hook."""
        return self.coefficient.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning's hook."""
        self.coefficient.load_state_dict(state_dict)

    def _reduce_rewards(self, step: MegatronStep, microbatches: list[dict[str, Tensor]]) -> None:
        """By the mean KL of each trajectory, on every rank's microbatches. A collective."""
        scores = score(step.pipeline, microbatches)
        rows = self._rows(microbatches, [answer.logprobs for answer in scores]) if scores is not None else []
        everyone: list[list[Row] | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, rows, group=platform.object_group())
        divergences = dict(row for part in everyone for row in part)
        penalties = self.coefficient.value * torch.tensor([divergences[place] for place in sorted(divergences)])
        current = step.trainer.datamodule.current_step
        current.reduce_rewards(microbatches, penalties)
        current.report({"kl_penalty": float(penalties.mean())})

    def _rows(self, microbatches: list[dict[str, Tensor]], logprobs: list[Tensor]) -> list[Row]:
        """Of the trajectories here, with the mean KL over their action tokens on all context-parallel ranks.

        The host looks at the device once.
        """
        sums = torch.cat([self._sums(*own) for own in zip(microbatches, logprobs, strict=True)], 1)
        torch.distributed.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        means = sums[0] / sums[1].clamp(min=1)  # one that is left out may have no token
        places = torch.cat([microbatch["trajectory"] for microbatch in microbatches])
        return [row for row in zip(places.tolist(), means.tolist(), strict=True) if row[0] >= 0]

    def _sums(self, microbatch: dict[str, Tensor], logprobs: Tensor) -> Tensor:
        """KL and number of the action tokens here of each of R trajectories, float64 [2, R]."""
        mask = microbatch["target_mask"]
        both = (torch.where(mask, values, 0).double() for values in (logprobs, microbatch["reference_logprobs"]))
        divergence, _ = kl_estimate(self.estimator, *both)  # 0 where both are
        counted = torch.stack([torch.where(mask, divergence, 0).flatten(), mask.double().flatten()])
        sums = counted.new_zeros(2, len(microbatch["trajectory"]))
        return sums.index_add_(1, microbatch["row_index"].flatten(), counted)


class PassAgreementCallback(pl.Callback):
    """Refuses a model whose dropout, or any other noise, sets the two passes apart; one microbatch is enough to see.

    Ratios to the sampler, which has no dropout, and the KL to a reference would measure that noise.
    """

    def __init__(self) -> None:
        self._checked = False

    def on_megatron_microbatches_start(self, step: MegatronStep) -> None:
        """ValueError, on every rank, before the first microbatch is trained on."""
        if self._checked:
            return
        microbatches = list(step.data)
        step.data = iter(microbatches)
        check_passes_agree(step.pipeline, microbatches[0])
        self._checked = True
