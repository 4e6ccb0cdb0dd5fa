"""Before the first update: the model must say the same in the training pass and without gradients."""

from __future__ import annotations

import lightning.pytorch as pl
from nemo.lightning.megatron_parallel import MegatronStep

from nemo_flashrl.models.scoring import check_passes_agree


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
