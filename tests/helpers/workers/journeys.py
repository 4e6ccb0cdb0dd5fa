"""NeMo checkpoints -> shards at one TP x PP -> one step of the real trainer -> Hugging Face folders."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from nemo.lightning.pytorch.strategies.utils import init_model_parallel

from nemo_flashrl.models.scoring import weight_probe
from nemo_flashrl.weights.hf_folder import write_hf_folder
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap
from workers.parity import Driver, make_run


@dataclass(frozen=True)
class Journey:
    """From the NeMo checkpoint `nemo` of the Hugging Face folder `source` to a new folder `target`."""

    source: Path
    nemo: Path
    target: Path
    vocab_size: int
    tensor: int
    pipeline: int
    overrides: tuple[str, ...]
    learning_rate: float = 0.0
    probed: bool = False  # `target`.json gets token ids, and the log-probs of all but the first, of the live shards


class OwnGroups(pl.Callback):
    """NeMo makes Megatron's groups only where it makes torch's; both are made once, for all journeys."""

    def setup(self, trainer, model, stage) -> None:
        if not parallel_state.model_parallel_is_initialized():
            init_model_parallel(model)


def main(trajectories: Path, *journeys: Journey) -> None:
    first = os.environ["RANK"] == "0"
    for journey in journeys:
        driver = Driver(trajectories) if first else None
        trainer, model, data = make_run(
            journey.source, journey.target, journey.vocab_size, driver, [OwnGroups()], journey.overrides, gate=False
        )
        model.hf_folder = None  # the weights come out of the NeMo checkpoint, through NeMo's own loader
        restore = nl.RestoreConfig(path=str(journey.nemo), load_optim_state=False, load_artifacts=False)
        nl.AutoResume(restore_config=restore).setup(trainer)
        model.optim.config.lr = journey.learning_rate
        trainer.fit(model, datamodule=data)
        if journey.probed:
            probe = weight_probe(trainer.strategy.megatron_parallel, journey.vocab_size)
            if first:
                journey.target.with_suffix(".json").write_text(json.dumps([probe.token_ids, probe.logprobs]))
        stream = stream_hf_tensors(unwrap(model), journey.vocab_size)
        if first:
            write_hf_folder(stream, journey.source, journey.target)
        for _ in stream:
            pass
        torch.distributed.barrier()
        destroy_num_microbatches_calculator()
