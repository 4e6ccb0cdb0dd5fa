"""A configuration and what was checked of it -> the objects that train: model, driver, data, callbacks, trainer."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_flashrl import platform
from nemo_flashrl.config import RunConfig
from nemo_flashrl.metrics.monitors import Monitors
from nemo_flashrl.preflight.prepare import Parts
from nemo_flashrl.run.record import wandb_run_id

if TYPE_CHECKING:
    import nemo.lightning as nl

    from nemo_flashrl.models import PolicyModel
    from nemo_flashrl.rollout.driver import RolloutDriver
    from nemo_flashrl.run.folder import RunFolder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}  # current scaling


def build_model(config: RunConfig, parts: Parts) -> PolicyModel:
    """A NeMo model with the family's configuration, the algorithm's loss and Megatron's optimizer."""
    import nemo.lightning as nl

    from nemo_flashrl.models import HeadSettings, PolicyModel
    from nemo_flashrl.models.families import nemo_config
    from nemo_flashrl.models.lr_schedule import LearningRateScheduler
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
            build_optimizer_config(config),
            LearningRateScheduler(optimizer.warmup_steps, config.trainer.steps, optimizer.schedule),
        ),
    )


def build_optimizer_config(config: RunConfig) -> Any:
    """Megatron's Adam; its precision-aware form where something of it is bf16 or on the host."""
    from megatron.core.optimizer import Adam, OptimizerConfig

    optimizer = config.optimizer
    moments = DTYPES[optimizer.moments_dtype]
    smaller: dict[str, Any] = {"fp8_recipe": FP8["fp8_recipe"]} if optimizer.fp8_param_gather else {}
    if optimizer.offload_fraction or "bf16" in (optimizer.moments_dtype, optimizer.gradients_dtype):
        smaller |= {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": DTYPES[optimizer.gradients_dtype],
            "exp_avg_dtype": moments,
            "exp_avg_sq_dtype": moments,
            # Half a master weight would not load: a checkpoint for other parallel sizes gives fp32, and it wants int16.
            "store_param_remainders": False,
            "optimizer_cpu_offload": optimizer.offload_fraction > 0,
            "optimizer_offload_fraction": optimizer.offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": platform.may_overlap_offload(),
        }
    if optimizer.offload_fraction:  # a checkpoint names the classes of the two parts, and torch loads what it knows
        torch.serialization.add_safe_globals([Adam, torch.optim.AdamW])
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.learning_rate,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.max_grad_norm,
        bf16=_dtype(config) == torch.bfloat16,
        use_distributed_optimizer=platform.has_gpu(),
        **smaller,
    )


def _dtype(config: RunConfig) -> torch.dtype:
    return DTYPES[config.model.precision]


def build_driver(config: RunConfig, parts: Parts) -> RolloutDriver:
    """The engine, the prompts and the collector that feeds from both; on the collecting rank alone."""
    from nemo_flashrl.engines.factory import make_engine
    from nemo_flashrl.rollout import from_config as setup
    from nemo_flashrl.rollout.collector import Collector
    from nemo_flashrl.rollout.driver import RolloutDriver

    rollout, limits, tokenizer = config.rollout, setup.episode_limits(config), parts.tokenizer
    if rollout.engine == "transformers":  # it shares the trainer's weights, so episodes are played in this process
        engine = make_engine(rollout, config.model.path, parts.vocab_size, limits.max_context)
        play = None
    else:
        engine = setup.start_workers(config, tokenizer, parts.vocab_size)
        play = engine.play
    collector = Collector(
        engine,
        lambda: parts.environment(parts.environment_settings),
        parts.tasks,
        tokenizer,
        parts.prompts,
        limits,
        setup.episode_sampling(config, tokenizer),
        batch_size=rollout.batch_size,
        group_size=parts.algorithm.group_size,
        max_in_flight=rollout.slots,
        streaming=rollout.mode != "sync",
        max_staleness=rollout.max_staleness,
        dynamic_sampling_max_groups=rollout.dynamic_sampling_max_groups,
        seed=config.trainer.seed,
        temperature=setup.temperature_schedule(config),
        group_sizes=setup.moving_group_size(config, parts.algorithm.group_size),
        novelty=parts.novelty,
        play=play,
    )
    return RolloutDriver(engine, collector, lag=rollout.lag, updates_per_batch=rollout.updates_per_batch)


def build_data(config: RunConfig, parts: Parts, driver: RolloutDriver | None) -> Any:
    """The data module that turns collected batches into microbatches."""
    from nemo_flashrl.batching.planner import BatchingSettings
    from nemo_flashrl.data import LengthBatcher, RolloutDataModule
    from nemo_flashrl.data.context_parallel import length_multiple
    from nemo_flashrl.data.credit import trajectory_credit

    parallel = config.parallel
    batcher = LengthBatcher(
        BatchingSettings(
            max_tokens_per_microbatch=config.batching.max_tokens_per_microbatch,
            layout=config.batching.layout,
            multiple=length_multiple(
                parallel.tensor, parallel.sequence, parallel.context, fp8=config.optimizer.fp8_param_gather
            ),
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
    """What acts around an optimizer step, in this order, and what each may change.

    PassAgreementCallback   nothing: refuses a model whose training and no-grad passes differ, at the first step
    EMAReferenceCallback    microbatches get `reference_logprobs`; after the step, the reference
    KLPenaltyCallback       microbatches get `kl_coefficient`, or `RankStep.reduce_rewards`; after the step, beta
    ValueBaselineCallback   `RankStep.reduce_rewards`, and the value head
    WeightRefitCallback     after the step: the sampler's weights
    EvaluationCallback      after the step: the sampler's weights, and back
    RLMetricsCallback       after the step: the run's files; reads what the others `RankStep.report`
    RunCheckpoint           after the step, last: the checkpoint, and whether the run continues

    Each may `RankStep.report` metrics; none writes to a step in another way.
    """
    from nemo_flashrl.callbacks import PassAgreementCallback, RLMetricsCallback, RunCheckpoint, WeightRefitCallback
    from nemo_flashrl.callbacks.value_baseline import value_baseline

    monitors = Monitors(asdict(config.monitors))
    probed, adapter = config.rollout.engine != "transformers", config.rollout.weight_transfer == "adapter"
    refit = WeightRefitCallback(driver, probed=probed, adapter=adapter)
    logged = config.trainer.log_trajectories
    metrics = RLMetricsCallback(config.output, data, refit, parts.tokenizer, monitors=monitors, log_trajectories=logged)
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
    from nemo_flashrl.rollout import from_config as setup

    asked = config.evaluation
    if not asked.every_steps:
        return []
    play = setup.held_out(config, parts.environment, parts.tokenizer)
    classes = setup.held_out_classes(config, parts.environment)
    own = {"every_steps": asked.every_steps, "samples": asked.samples, "classes": classes}
    return [
        EvaluationCallback(driver, play, refit, **own, reference=reference[0] if config.reference.evaluate else None)
    ]


def build_reference(config: RunConfig, parts: Parts) -> list[Any]:
    """The reference policy and the KL penalty to it; nothing where none is configured."""
    from nemo_flashrl.algorithms.schedules import KlCoefficient
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


def build_trainer(config: RunConfig, callbacks: list[Any], folder: RunFolder | None = None) -> nl.Trainer:
    """NeMo's trainer with Megatron's strategy, for a run that resumes as `folder` says."""
    import nemo.lightning as nl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fp32_gradients = config.optimizer.gradients_dtype == "fp32"
    plugins: list[Any] = []
    if _dtype(config) == torch.bfloat16:  # what it says of gradients replaces what DDP's own configuration says
        fp8 = FP8 if config.optimizer.fp8_param_gather else {}
        # It resets params_dtype, to fp32 where it is told nothing: weights would be made in twice their size.
        precision = {"params_dtype": torch.bfloat16, "grad_reduce_in_fp32": fp32_gradients}
        plugins.append(nl.MegatronMixedPrecision("bf16-mixed", **precision, **fp8))
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
        logger=run_loggers(config, folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.callbacks.extend(callbacks)  # not through the constructor, which deep-copies its arguments, engines too
    return trainer


def run_loggers(config: RunConfig, folder: RunFolder | None = None) -> list[Any]:
    """Where Lightning sends a step's numbers: TensorBoard, and Weights & Biases when `trainer.wandb_project` is set.

    A run that `folder` resumes hides in TensorBoard what was logged after its checkpoint, and keeps its id in Weights &
    Biases.
    """
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    done = folder.step if folder else 0
    board = TensorBoardLogger(config.output, name="tensorboard", version="", purge_step=done + 1)
    loggers: list[Any] = [board]
    if config.trainer.wandb_project:
        project, own_id = config.trainer.wandb_project, wandb_run_id(Path(config.output), resumed=done > 0)
        loggers.append(
            WandbLogger(project=project, save_dir=config.output, config=asdict(config), id=own_id, resume="allow")
        )
    return loggers
