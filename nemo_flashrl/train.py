"""From a configuration to a trained checkpoint: prepare, build, fit, export.

One trajectory, from hand to hand, each line a file and the function in it that takes over:

    prompt
      1  rollout/prompts.py:PromptStream.next                       its task is drawn
      2  rollout/collector.py:Collector.collect                     a rollout slot is free for it
      3  rollout/episode.py:run_episode                             turns: actions sampled, observations appended
      4  engines/http.py:RemoteSampler.generate                     token ids -> tokens, log-probs, policy versions
      5  rollout/groups.py:Siblings.add                             ended; with its group where there are groups
      6  rollout/driver.py:RolloutDriver.collect                    a batch crosses to the trainer's thread
      7  data/datamodule.py:RolloutDataModule.next_step             advantages, weights, microbatches of all ranks
      8  data/rank_step.py:scatter                                  to each rank its own
      9  models/policy_model.py:PolicyModel.forward_step            through the pipeline, Megatron's schedule
     10  models/policy_head.py:PolicyHead.forward                   log-probs and loss, without logits
     11  models/policy_model.py:PolicyLossReduction.forward         the loss's scale, the step's statistics
    optimizer step (NeMo, Megatron)
     12  callbacks/weight_refit.py:WeightRefitCallback.on_train_batch_end   the new weights leave
     13  weights/shards.py:stream_hf_tensors                        live shards -> Hugging Face names, one at a time
     14  rollout/driver.py:RolloutDriver.load_weights               they cross to the rollouts' thread
     15  engines/http_refit.py:RemoteEngine.load_weights            to every server: pause, load, probe, resume
     16  rollout_server/vllm_backend.py:WeightTransfer.receive_weights      into the model that serves
    prompt

Who loops, and what it waits for:

    loop, where it runs                 waits for                     unblocked by             produces
    trainer.fit, every rank             the next step: rank 0 for a   6, then 8                optimizer steps
                                        batch, others for rank 0
    RolloutDriver's event loop, in a    ended episodes, a free slot   3, or a batch taken      batches
      thread of rank 0                                                by 6
    a rollout worker, a process of      answers of servers and        4, an environment, or    trajectories
      its own; with transformers the    environments                  the end of a sync
      loop above
    ServerPool, on both                 health of servers that owe    an answer, or a server   which servers are used
                                        answers, and of lost ones     that is back
    a rollout server, a process of      requests; in a sync, for      4 and 15                 tokens; new weights
      its own                           the end of the pause
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_flashrl import platform
from nemo_flashrl.build import build_callbacks, build_data, build_driver, build_model, build_trainer
from nemo_flashrl.config import RunConfig
from nemo_flashrl.metrics.progress import logged
from nemo_flashrl.preflight.admission import report_disk
from nemo_flashrl.preflight.conflicts import report_conflicts
from nemo_flashrl.preflight.prepare import prepare
from nemo_flashrl.run.folder import RunFolder

if TYPE_CHECKING:
    import nemo.lightning as nl

    from nemo_flashrl.models import PolicyModel


def train(config: RunConfig) -> Path:
    """Run `config` in the processes that torchrun started; returns the exported Hugging Face folder.

    Raises ValueError for what the configuration cannot mean and AlreadyComplete where the run has ended, both before
    anything is written; Preempted after SIGTERM, Interrupted after Ctrl-C and StoppedByMonitor when a limit was
    reached, when all is saved.
    """
    parts = prepare(config, int(os.environ.get("WORLD_SIZE", "1")))
    output = Path(config.output)
    first = int(os.environ.get("RANK", "0")) == 0
    report_conflicts(config, parts.algorithm, shown=first)
    with parts.folder.held(by_this_rank=first), logged(output, int(os.environ.get("RANK", "0"))):
        if first:
            report_disk(config, parts.hf_config)
        with platform.importing():
            platform.install()
            model = build_model(config, parts)
            driver = build_driver(config, parts) if first else None
            data = build_data(config, parts, driver)
            trainer = build_trainer(config, build_callbacks(config, parts, data, driver), parts.folder)
            resume(trainer, parts.folder)
        gc.collect()
        gc.freeze()  # answers of servers are many small objects: each full collection over modules too takes .4 s
        try:
            trainer.fit(model, datamodule=data)
            if trainer.should_stop:
                trainer.checkpoint_callback.raise_stop(trainer)
            export_reference(config, model, trainer)
            export(config, model, output / "checkpoint")  # last: with it there, the run is complete
        except SystemExit as end:
            if isinstance(end.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
                raise end.__context__ from None
            raise
        finally:
            gc.unfreeze()  # for a caller who trains again
            if driver is not None:
                driver.close()
    return output / "checkpoint"


def resume(trainer: nl.Trainer, folder: RunFolder) -> None:
    """Let `fit` start from the folder's newest complete checkpoint, if it has one."""
    import nemo.lightning as nl

    if folder.checkpoint is not None:
        nl.AutoResume(resume_from_path=str(folder.checkpoint)).setup(trainer)


def export(config: RunConfig, model: PolicyModel, target: Path) -> None:
    """Write the policy as a Hugging Face folder; every rank takes part."""
    from nemo_flashrl.weights.hf_folder import run_card

    model.save_hf_folder(target, config.model.path, run_card(asdict(config), config.trainer.steps))


def export_reference(config: RunConfig, model: PolicyModel, trainer: nl.Trainer) -> None:
    """Write the reference beside the policy, to be generated from, where it is evaluated."""
    from nemo_flashrl.callbacks import EMAReferenceCallback

    for callback in trainer.callbacks:
        if isinstance(callback, EMAReferenceCallback) and callback.evaluate:
            with callback.swapped_in():
                export(config, model, Path(config.output) / "reference")
