"""One rank of a run's own model and layout on a GPU, fake or real: a whole optimizer step, built as a run builds it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import lightning.pytorch  # noqa: F401
import numpy as np
import torch
import transformers  # noqa: F401
from gpu_device import head_answers, join_world
from gpu_recorder import Answer, Recorder, two_clocks

IS_FAKE = fake_cuda.is_installed()
if IS_FAKE:
    fake_cuda.seem_to_have_cuda()

from nemo_flashrl import platform

platform.install()

import megatron.core.distributed.param_and_grad_buffer as buffers
import nemo.lightning as nl
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe import token_dispatcher
from nemo.lightning._strategy_lib import setup_megatron_optimizer

from nemo_flashrl import algorithms, build, config
from nemo_flashrl.batching.planner import BatchingSettings
from nemo_flashrl.callbacks import reference
from nemo_flashrl.callbacks.kl_penalty import KLPenaltyCallback
from nemo_flashrl.data import LengthBatcher
from nemo_flashrl.data.context_parallel import length_multiple
from nemo_flashrl.data.datamodule import Seat, StepSampler, plan_steps
from nemo_flashrl.data.rank_step import RankStep
from nemo_flashrl.models import scoring
from nemo_flashrl.models.policy_model import PolicyModel
from nemo_flashrl.models.shadow_weights import ShadowWeights
from nemo_flashrl.ops import kernels
from nemo_flashrl.plan.fitting import stages
from nemo_flashrl.plan.page import layout_of, sizes_of
from nemo_flashrl.records import Batch, Trajectory
from nemo_flashrl.weights.model_shape import model_shape
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

SEGMENTS = 4  # trajectories of a microbatch
if IS_FAKE:
    kernels.HAS_TRITON = True  # as in the image; fake tensors need its operators' shapes alone


class Rank:
    """One rank of the run `experiment` with `overrides`, the first of pipeline stage `stage`.

    Args:
        layers: of the model; widths, vocabulary and layout stay as they are.
        joined: the process is in its groups already, as the same rank of a run of the same layout.
    """

    def __init__(self, experiment: str, overrides: list[str], stage: int, layers: int, joined: bool = False) -> None:
        self.config = config.load(experiment, overrides, unneeded=("output", "model.path"))
        self.hf_config = {"rms_norm_eps": 1e-5, **self.config.model.hf_config, "num_hidden_layers": layers}
        algorithm = algorithms.load(self.config.algorithm.name)
        self.algorithm = algorithm(config.settings_of(algorithm, self.config.algorithm.settings, "algorithm"))
        self.world = self.config.cluster.nodes * self.config.cluster.gpus_per_node
        if not joined:
            self.join(stage)
        self.scale = float(parallel_state.get_data_parallel_world_size(with_context_parallel=True))

    def join(self, stage: int) -> None:
        parallel = self.config.parallel
        join_world(self.world, self.world // parallel.pipeline * stage)
        spread = parallel.expert > 1
        parallel_state.initialize_model_parallel(
            parallel.tensor,
            parallel.pipeline,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=1 if spread else None,
        )
        if IS_FAKE:
            without_values()
            self._route_evenly(spread)

    def _route_evenly(self, spread: bool) -> None:
        parallel = self.config.parallel
        own = self.config.batching.max_tokens_per_microbatch // parallel.context
        routed = own // (parallel.tensor if parallel.sequence else 1) * self.hf_config.get("num_experts_per_tok", 1)
        # Experts that are cut over tensor ranks get the rows of all of these.
        shared = routed * (1 if spread else parallel.tensor)
        token_dispatcher.maybe_move_tensor_to_cpu = functools.partial(evenly, routed, shared)

    def build(self) -> None:
        """Model, gradients and optimizer, within a Recorder."""
        folder = tempfile.TemporaryDirectory()
        (Path(folder.name) / "config.json").write_text(json.dumps(self.hf_config))
        run = dataclasses.replace(self.config, model=dataclasses.replace(self.config.model, path=folder.name))
        parts = SimpleNamespace(
            algorithm=self.algorithm,
            vocab_size=self.hf_config["vocab_size"],
            folder=SimpleNamespace(checkpoint=True),  # weights come from elsewhere
        )
        model = build.build_model(run, parts)
        trainer = build.build_trainer(run, [])
        strategy = trainer.strategy
        strategy.connect(model)
        self.trainer = SimpleNamespace(
            strategy=strategy, state=SimpleNamespace(fn=TrainerFn.FITTING), global_step=0, is_global_zero=False
        )
        PolicyModel.trainer = property(lambda _: self.trainer)
        model.configure_model()
        self.made_in = sorted({str(parameter.dtype) for parameter in model.parameters()})
        plugin = strategy.precision_plugin
        self.pipeline = nl.megatron_parallel.MegatronParallel(
            model, plugin, ddp_config=strategy.ddp_config, convert_module_fn=plugin.convert_module
        )
        self.pipeline.trainer = self.trainer
        self.pipeline.init_model_parallel()
        model.optim.on_fit_start(None, model)
        self.optimizer = setup_megatron_optimizer(self.pipeline, model.optim.config)
        self.pipeline.callbacks.add(StepSampler())
        self.model = model
        folder.cleanup()

    def microbatches(self, count: int) -> RankStep:
        """A step of full microbatches, of trajectories whose tokens are half the policy's."""
        run = self.config
        parallel, tokens = run.parallel, run.batching.max_tokens_per_microbatch
        settings = BatchingSettings(
            tokens,
            run.model.context_length,
            run.batching.layout,
            length_multiple(parallel.tensor, parallel.sequence, parallel.context),
            context_margin=0.0,
        )
        length = tokens // SEGMENTS
        mask = np.arange(length) % 16 >= 8
        trajectory = Trajectory(
            prompt_index=0,
            group=0,
            token_ids=np.arange(length) % self.hf_config["vocab_size"],
            action_mask=mask,
            behavior_logprobs=np.where(mask, -math.log(self.hf_config["vocab_size"]), 0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            reward=1.0,
            turns=2,
            end_reason="done",
            failed=False,
            temperature=1.0,
        )
        group = self.algorithm.group_size
        many = -(-SEGMENTS * count // group) * group
        batch = Batch(
            tuple(
                dataclasses.replace(trajectory, prompt_index=i, group=i // group, reward=float(i % 2))
                for i in range(many)
            ),
            0,
        )
        (step,) = plan_steps(batch, self.algorithm, LengthBatcher(settings), dp_size=1, seed=0)
        assert len(step.microbatches) == count, f"{len(step.microbatches)} microbatches, not {count}"
        return Seat.own().share(step)

    def train(self, step: RankStep) -> Any:
        """Forward and backward of every microbatch, and the reduction of gradients."""
        for chunk in self.pipeline:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self.pipeline.training_step(iter([(step,)]))

    def planned(self, microbatches: int) -> dict[str, int]:
        sizes = sizes_of(self.config)
        layout, tokens = layout_of(sizes)
        layout = dataclasses.replace(layout, microbatches=microbatches)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        found = stages(model_shape(self.hf_config), layout, tokens)[stage]
        return {**{name: getattr(found, name) for name in found.__slots__}, "device": found.device}


def evenly(own: int, rows: int, tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """How many rows go to each expert or rank, where Megatron copies the counts to the host beside its work."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
        return tensor
    shares = np.full(tuple(tensor.shape), own if tensor.numel() == 1 else rows // tensor.numel())
    return shares if as_numpy else torch.from_numpy(shares)


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module.to` and its like with new parameters: the device of a fake one stays what it was."""
    changed: dict[int, Any] = {}
    for part in module.modules():
        for name, tensor in part._buffers.items():
            part._buffers[name] = tensor if tensor is None else function(tensor)
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                data = function(parameter)
            if (data.dtype, data.device) != (parameter.dtype, parameter.device):
                new = changed.setdefault(id(parameter), torch.nn.Parameter(data, parameter.requires_grad))
                new.__dict__.update(
                    {k: v for k, v in vars(parameter).items() if not k.startswith("_") and "fake" not in k}
                )
                part._parameters[name] = new
    return module


def without_values() -> None:
    """States of generators, and collectives that are handed to NCCL together, have nothing to stand for them."""

    class Handle:
        def wait(self) -> None: ...

        def append(self, work: Any) -> None: ...

    parallel_random._get_cuda_rng_state = lambda *_, **__: None
    parallel_random._set_cuda_rng_state = lambda *_, **__: None
    parallel_random._get_all_rng_states = lambda: (None, None, None)
    parallel_random._set_all_rng_states = lambda *_: None
    parallel_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    platform.seed_model_parallel = lambda seed: None
    torch.nn.Module._apply = _apply
    buffers._coalescing_manager = lambda *_, **__: contextlib.nullcontext(Handle())


def answers(rank: Rank) -> list[Answer]:
    parallel, batching = rank.config.parallel, rank.config.batching
    tokens = batching.max_tokens_per_microbatch // parallel.context // (parallel.tensor if parallel.sequence else 1)
    rows = 1 if batching.layout == "packed" else SEGMENTS
    shape = itertools.cycle([tokens // rows, rows, rank.hf_config["hidden_size"]])
    return [
        *head_answers(tokens // 2, rank.scale),
        Answer("p2p_communication", "tolist()", lambda _: next(shape)),
        Answer("clip_grads", "total_norm.item()", 2.0),
        Answer("rerun_state_machine", "if result_rejected", False),
        Answer("models/scoring", "", lambda mask: mask.numel() // 2),
        Answer("callbacks/", "tolist()", 1.0),
        Answer("shadow_weights", "tolist()", 1.0),
        Answer("hybrid_optimizer", "cpu_optimizer.step", 1.0),  # how often it has been called
    ]


def on_the_host(rank: Rank) -> int:
    """Bytes of weights, gradients and state in the part of the optimizer that is offloaded."""
    held: dict[int, torch.Tensor] = {}
    for optimizer in (one.optimizer for one in rank.optimizer.mcore_optimizer.chained_optimizers):
        for part in getattr(optimizer, "cpu_optimizers", ()):
            for parameter in (p for group in part.param_groups for p in group["params"]):
                state = (part.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))
                held |= {id(tensor): tensor for tensor in (parameter, parameter.grad, *state)}
    assert all(tensor.device.type == "cpu" for tensor in held.values())
    return sum(tensor.nbytes for tensor in held.values())


def around(rank: Rank, recorder: Recorder, step: RankStep) -> dict[str, list[int]]:
    """What callbacks do around a step: launches and host syncs of each."""
    pipeline, module = rank.pipeline, unwrap(rank.model)
    held = StepSampler().on_megatron_step_start(SimpleNamespace(data=iter([(step,)])))
    microbatches = list(held.data)
    shadow = ShadowWeights(module)
    found: dict[str, list[int]] = {}

    def swap() -> None:
        with shadow.swapped_in():
            pass

    def divergence() -> None:
        penalty = KLPenaltyCallback(SimpleNamespace(value=0.1), place="reward", estimator="k3")
        logprobs = [microbatch["behavior_logprobs"] for microbatch in microbatches]
        for microbatch, own in zip(microbatches, logprobs, strict=True):
            microbatch["reference_logprobs"] = torch.empty_like(own)
        penalty._rows(microbatches, logprobs)

    def means() -> None:
        logprobs = [microbatch["behavior_logprobs"] for microbatch in microbatches]
        reference._means(microbatches, [scoring.TokenScores(own, own) for own in logprobs])

    parts = {
        "score": lambda: scoring.score(pipeline, microbatches[:1], entropies=True),
        "pass agreement": lambda: scoring.check_passes_agree(pipeline, microbatches[0]),
        "first states": lambda: scoring.first_states(pipeline, microbatches[:1]),
        "refit stream": lambda: [None for _ in stream_hf_tensors(module, rank.hf_config["vocab_size"])],
        "reference follows": lambda: shadow.follow(0.9),
        "reference swap": swap,
        "KL in the reward": divergence,
        "reference means": means,
    }
    for name, part in parts.items():
        recorder.restart()
        before = recorder.current
        part()
        found[name] = [recorder.launches, recorder.syncs.total(), recorder.peak - before]
    return found


def main(
    experiment: str,
    stage: int,
    layers: int,
    overrides: list[str] = (),
    detailed: bool = False,
    with_callbacks: bool = False,
) -> dict:
    rank = Rank(experiment, list(overrides), stage, layers)
    count = max(2, rank.config.parallel.pipeline)
    step = rank.microbatches(count)
    with Recorder(answers(rank)) as recorder:
        recorder.detailed = detailed
        rank.build()
        built = recorder.peak
        rank.optimizer.step()  # makes its state
        recorder.restart()
        static = recorder.current
        rank.train(step)
        trained = recorder.peak
        if detailed:
            print(recorder.report(40))
        rank.optimizer.step()
        syncs = [[where.file, where.text, kind, n] for (where, kind), n in sorted(recorder.syncs.items())]
        launches, peak, clocks = recorder.launches, recorder.peak, two_clocks(recorder.events)
        parts = around(rank, recorder, step) if with_callbacks else {}
    return {
        "built": built,
        "made_in": rank.made_in,
        "static": static,
        "trained": trained,
        "peak": peak,
        "around": parts,
        "experts": [type(m).__name__ for m in rank.model.modules() if type(m).__name__.endswith("GroupedMLP")],
        "layers_with_experts": layers if rank.model.config.num_moe_experts else 0,
        "metadata": rank.trainer.strategy.sharded_state_dict_metadata,
        "host_optimizer": on_the_host(rank),
        "parameters": sum(p.numel() for p in rank.model.parameters()),
        "plan": rank.planned(count),
        "syncs": syncs,
        "microbatches": count,
        "launches": launches,
        "clocks": clocks,
    }
