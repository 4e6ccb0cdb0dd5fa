"""From a configuration to a trained checkpoint.

prompts -> Collector (rollout/) -> Batch (records.py) -> RolloutDataModule (data/)
        -> PolicyModel + PolicyHead (models/) -> loss (algorithms/) -> optimizer step (NeMo, Megatron)
        -> WeightRefitCallback (callbacks/) -> live shards as HF names (weights/) -> engine (rollout/) -> prompts
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_flashrl import platform
from nemo_flashrl.config import RunConfig
from nemo_flashrl.conflicts import report_conflicts
from nemo_flashrl.diagnostics.monitors import Monitors
from nemo_flashrl.preflight import Parts, prepare
from nemo_flashrl.resume import RunFolder

if TYPE_CHECKING:
    import nemo.lightning as nl

    from nemo_flashrl.models import PolicyModel
    from nemo_flashrl.rollout.driver import RolloutDriver


def train(config: RunConfig) -> Path:
    """Run `config` in the processes that torchrun started; returns the exported Hugging Face folder.

    Raises ValueError for what the configuration cannot mean and AlreadyComplete where the run has ended, both before
    anything is written; Preempted after SIGTERM and StoppedByMonitor when a limit was reached, when all is saved.
    """
    parts = prepare(config, int(os.environ.get("WORLD_SIZE", "1")))
    output = Path(config.output)
    first = int(os.environ.get("RANK", "0")) == 0
    report_conflicts(config, parts.algorithm, shown=first)
    with parts.folder.held(by_this_rank=first):
        platform.install()
        model = build_model(config, parts)
        driver = build_driver(config, parts) if first else None
        data = build_data(config, parts, driver)
        trainer = build_trainer(config, build_callbacks(config, parts, data, driver), parts.folder.step + 1)
        resume(trainer, parts.folder)
        gc.collect()
        gc.freeze()  # answers of servers are many small objects: each full collection over modules too takes .4 s
        try:
            trainer.fit(model, datamodule=data)
            if trainer.should_stop:
                trainer.checkpoint_callback.raise_stop(trainer)
            export_reference(config, parts, model, trainer)
            export(config, parts, model, output / "checkpoint")  # last: with it there, the run is complete
        except SystemExit as end:
            if isinstance(end.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into exit code 1
                raise end.__context__ from None
            raise
        finally:
            gc.unfreeze()  # for a caller who trains again
            if driver is not None:
                driver.close()
    return output / "checkpoint"


def build_model(config: RunConfig, parts: Parts) -> PolicyModel:
    """A NeMo model with the family's configuration, the algorithm's loss and Megatron's optimizer."""
    import nemo.lightning as nl
    from megatron.core.optimizer import OptimizerConfig

    from nemo_flashrl.models import HeadSettings, PolicyModel
    from nemo_flashrl.models.families import nemo_config
    from nemo_flashrl.models.learning_rate import LearningRateScheduler
    from nemo_flashrl.weights.lora import LoraSettings

    nemo = nemo_config(
        config.model.path,
        context_length=config.model.context_length,
        tensor_parallel=config.parallel.tensor,
        pipeline_parallel=config.parallel.pipeline,
        vocab_divisible_by=config.model.vocab_divisible_by,
        dtype=_dtype(config),
        recompute=config.model.recompute,
    )
    optimizer = config.optimizer
    return PolicyModel(
        nemo,
        parts.algorithm,
        HeadSettings(
            vocab_size=parts.vocab_size,
            temperature=config.rollout.temperature,
            chunk_tokens=config.model.head_chunk_tokens,
            logits_budget_bytes=config.model.head_logits_budget_mib * 2**20,
        ),
        hf_folder=None if parts.folder and parts.folder.checkpoint else config.model.path,
        lora=LoraSettings(**vars(config.lora)) if config.lora.rank else None,
        seed=config.trainer.seed,
        optim=nl.MegatronOptimizerModule(
            OptimizerConfig(
                optimizer="adam",
                lr=optimizer.learning_rate,
                adam_beta1=optimizer.beta1,
                adam_beta2=optimizer.beta2,
                weight_decay=optimizer.weight_decay,
                clip_grad=optimizer.max_grad_norm,
                bf16=_dtype(config) == torch.bfloat16,
                use_distributed_optimizer=platform.has_gpu(),
            ),
            LearningRateScheduler(optimizer.warmup_steps, config.trainer.steps, optimizer.schedule),
        ),
    )


def _dtype(config: RunConfig) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[config.model.precision]


def build_driver(config: RunConfig, parts: Parts) -> RolloutDriver:
    """The engine, the prompts and the collector that feeds from both; on the collecting rank alone."""
    from nemo_flashrl.rollout import setup
    from nemo_flashrl.rollout.collector import Collector
    from nemo_flashrl.rollout.draining import DrainingEngine
    from nemo_flashrl.rollout.driver import RolloutDriver
    from nemo_flashrl.rollout.engines import make_engine

    rollout = config.rollout
    limits = setup.episode_limits(config)
    engine = make_engine(rollout, config.model.path, parts.vocab_size, limits.max_context)
    if rollout.mode == "async":
        engine = DrainingEngine(engine)
    collector = Collector(
        engine,
        lambda: parts.environment(parts.environment_settings),
        parts.tasks,
        parts.tokenizer,
        setup.prompt_source(config, parts.tasks),
        limits,
        setup.episode_sampling(config, parts.tokenizer),
        batch_size=rollout.batch_size,
        group_size=parts.algorithm.group_size,
        max_in_flight=rollout.slots,
        streaming=rollout.mode != "sync",
        max_staleness=rollout.max_staleness,
        dynamic_sampling_max_groups=rollout.dynamic_sampling_max_groups,
        seed=config.trainer.seed,
        temperature=setup.temperature_schedule(config),
        group_sizes=setup.moving_group_size(config, parts.algorithm.group_size),
    )
    return RolloutDriver(engine, collector, lag=rollout.lag, updates_per_batch=rollout.updates_per_batch)


def build_data(config: RunConfig, parts: Parts, driver: RolloutDriver | None) -> Any:
    """The data module that turns collected batches into microbatches."""
    from nemo_flashrl.data import LengthBatcher, RolloutDataModule
    from nemo_flashrl.data.context_parallel import length_multiple
    from nemo_flashrl.data.credit import trajectory_credit
    from nemo_flashrl.data.length_batcher import BatchingSettings

    parallel = config.parallel
    batcher = LengthBatcher(
        BatchingSettings(
            max_tokens_per_microbatch=config.batching.max_tokens_per_microbatch,
            layout=config.batching.layout,
            multiple=length_multiple(parallel.tensor, parallel.sequence, parallel.context),
            context_length=config.model.context_length,
            context_margin=config.batching.context_margin,
            on_too_long=config.batching.on_too_long,
        )
    )
    return RolloutDataModule(
        driver.collect if driver else None,
        parts.algorithm,
        batcher,
        credit=trajectory_credit(config, parts.tokenizer),
        seed=config.trainer.seed,
        saved={"rollouts": driver} if driver else {},
    )


def build_callbacks(config: RunConfig, parts: Parts, data: Any, driver: RolloutDriver | None) -> list[Any]:
    """What acts around an optimizer step, in this order."""
    from nemo_flashrl.callbacks import PassAgreementCallback, RLMetricsCallback, RunCheckpoint, WeightRefitCallback
    from nemo_flashrl.callbacks.value_baseline import value_baseline

    monitors = Monitors(asdict(config.monitors))
    probed, adapter = config.rollout.engine != "transformers", config.rollout.weight_transfer == "adapter"
    refit = WeightRefitCallback(driver, parts.vocab_size, probed=probed, adapter=adapter)
    logged = config.trainer.log_trajectories
    metrics = RLMetricsCallback(Path(config.output), data, refit, parts.tokenizer, monitors, log_trajectories=logged)
    saving, stop = config.checkpoint, driver.stop_collecting if driver else None
    checkpoint = RunCheckpoint(
        parts.folder, monitors, every_steps=saving.every_steps, keep=saving.keep, stop_collecting=stop
    )
    reference = build_reference(config, parts)
    evaluation = build_evaluation(config, parts, driver, refit, reference)
    values = value_baseline(config.value_head)
    return [PassAgreementCallback(), *reference, *values, refit, *evaluation, metrics, checkpoint]


def build_evaluation(config: RunConfig, parts: Parts, driver: Any, refit: Any, reference: list[Any]) -> list[Any]:
    """What plays held-out tasks; nothing where none is asked for."""
    from nemo_flashrl.callbacks import EvaluationCallback
    from nemo_flashrl.rollout import setup

    asked = config.evaluation
    if not asked.every_steps:
        return []
    play = setup.held_out(config, parts.environment, parts.tokenizer)
    other = reference[0] if config.reference.evaluate else None
    steps, samples = asked.every_steps, asked.samples
    return [EvaluationCallback(driver, play, refit, every_steps=steps, samples=samples, reference=other)]


def build_reference(config: RunConfig, parts: Parts) -> list[Any]:
    """The reference policy and the KL penalty to it; nothing where none is configured."""
    from nemo_flashrl.algorithms.kl_schedule import KlCoefficient
    from nemo_flashrl.callbacks import EMAReferenceCallback, KLPenaltyCallback

    if config.reference.mode == "none":
        return []
    schedule = asdict(config.kl)
    place, estimator = schedule.pop("place"), schedule.pop("estimator")
    coefficient = KlCoefficient(**schedule, steps=config.trainer.steps)
    return [
        EMAReferenceCallback(**asdict(config.reference)),
        KLPenaltyCallback(coefficient, place=place, estimator=estimator),
    ]


def build_trainer(config: RunConfig, callbacks: list[Any], first_step: int = 1) -> nl.Trainer:
    """NeMo's trainer with Megatron's strategy."""
    import nemo.lightning as nl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    from nemo_flashrl.callbacks.loggers import run_loggers

    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    plugins: list[Any] = [nl.MegatronMixedPrecision("bf16-mixed")] if _dtype(config) == torch.bfloat16 else []
    if "RANK" in os.environ:  # inside a Slurm job Lightning would count Slurm's tasks instead
        plugins.append(TorchElasticEnvironment())
    trainer = nl.Trainer(
        accelerator=platform.accelerator(),
        devices=local,
        num_nodes=world // local,
        max_steps=config.trainer.steps,
        strategy=platform.make_strategy(
            tensor_model_parallel_size=config.parallel.tensor,
            pipeline_model_parallel_size=config.parallel.pipeline,
            context_parallel_size=config.parallel.context,
            expert_model_parallel_size=config.parallel.expert,
            expert_tensor_parallel_size=1 if config.parallel.expert > 1 else None,  # spread experts are whole
            sequence_parallel=config.parallel.sequence,
            overlap_gradients=config.parallel.overlap_gradients,
            pipeline_dtype=_dtype(config),
        ),
        plugins=plugins or None,
        logger=run_loggers(config, first_step),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.callbacks.extend(callbacks)  # not through the constructor, which deep-copies its arguments, engines too
    return trainer


def resume(trainer: nl.Trainer, folder: RunFolder) -> None:
    """Let `fit` start from the folder's newest complete checkpoint, if it has one."""
    import nemo.lightning as nl

    if folder.checkpoint is not None:
        nl.AutoResume(resume_from_path=str(folder.checkpoint)).setup(trainer)


def export(config: RunConfig, parts: Parts, model: PolicyModel, target: Path) -> None:
    """Write the policy as a Hugging Face folder; every rank takes part."""
    from nemo_flashrl.weights.hf_folder import run_card, write_hf_folder
    from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

    stream = stream_hf_tensors(unwrap(model), parts.vocab_size)
    if int(os.environ.get("RANK", "0")) == 0:
        write_hf_folder(stream, config.model.path, target, run_card(asdict(config), config.trainer.steps))
    for _ in stream:
        pass


def export_reference(config: RunConfig, parts: Parts, model: PolicyModel, trainer: nl.Trainer) -> None:
    """Write the reference beside the policy, to be generated from, where it is evaluated."""
    from nemo_flashrl.callbacks import EMAReferenceCallback

    for callback in trainer.callbacks:
        if isinstance(callback, EMAReferenceCallback) and callback.evaluate:
            with callback.swapped_in():
                export(config, parts, model, Path(config.output) / "reference")
