"""NeMo's GPTModel with a policy loss: what runs between a microbatch and its gradient.

Legend: R = rows of a microbatch, S = row length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from nemo.collections import llm
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.algorithms.algorithm import Algorithm, ContextShare, TokenBatch
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.models.families import read_hf_config
from nemo_flashrl.models.policy_head import HeadSettings, PolicyHead, PolicyRequest, find_head, flat, temperatures_of
from nemo_flashrl.weights.hf_folder import load_hf_folder, write_hf_folder
from nemo_flashrl.weights.lora import LoraSettings, add_lora
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap

Stats = dict[str, Tensor]
STATS = "stats"  # the entry of a microbatch under which `forward_step` leaves what the head measured of it


class PolicyModel(llm.GPTModel):
    """A NeMo language model trained by a policy-gradient algorithm.

    Args:
        config: any NeMo GPTConfig (Llama, Qwen2, Qwen3, Mixtral, ...); `nemo_config` makes that of a checkpoint.
        algorithm: the loss; see `nemo_flashrl.algorithms.algorithm`.
        head: the tokenizer's vocabulary size, the sampler's temperature, and how the policy head computes; None takes
            the vocabulary size from `hf_folder` and the defaults for the rest.
        hf_folder: Hugging Face checkpoint whose weights the shards are filled with; None leaves them as initialised.
        lora: train adapters beside a frozen model; None trains the model.
        seed: of initialisation and dropout.
        optim: a `nl.MegatronOptimizerModule`.

    Raises:
        ValueError: `head` and `hf_folder` are both None, or the folder's family is not supported.
    """

    def __init__(
        self,
        config: llm.GPTConfig,
        algorithm: Algorithm,
        head: HeadSettings | None = None,
        *,
        hf_folder: str | Path | None = None,
        lora: LoraSettings | None = None,
        seed: int = 0,
        optim: Any = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(config, optim=optim, tokenizer=tokenizer)
        if head is None:
            if hf_folder is None:
                raise ValueError("head=None: give HeadSettings(vocab_size=...), or hf_folder, whose config.json has it")
            head = HeadSettings(read_hf_config(hf_folder)["vocab_size"])
        self.algorithm = algorithm
        self.seed = seed
        self.hf_folder = hf_folder
        self.lora = lora
        self.head = head

    def configure_model(self, vp_stage: int | None = None) -> None:
        """Build this rank's shard; on the last stage its output layer becomes the policy head."""
        platform.seed_model_parallel(self.seed)
        super().configure_model(vp_stage)
        if self.module.post_process:
            PolicyHead.install(self.module, self.head)
        if self.hf_folder is not None:
            load_hf_folder(self.module, self.hf_folder, self.head.vocab_size)
        if self.lora is not None:
            add_lora(self.module, self.lora)

    def data_step(self, dataloader_iter: Any) -> dict[str, Tensor]:
        """The next microbatch, as the data module made it."""
        return next(dataloader_iter)

    def forward_step(self, batch: dict[str, Any]) -> Tensor:
        """The policy loss, float32 [1, 1], on the last stage, and `batch[STATS]`; hidden states before it."""
        head = find_head(self.module)
        if head is None:
            return self._run(batch)
        overlap = self.trainer.strategy.ddp_config.overlap_grad_reduce
        request = PolicyRequest(self.algorithm, token_batch(batch), loss_scale(), grad_hooks=overlap)
        with head.scoring(batch["targets"], request, temperatures=temperatures_of(batch)):
            loss = self._run(batch)
        batch[STATS] = request.stats
        return loss

    def score_step(self, batch: dict[str, Tensor], *, entropies: bool = False) -> Tensor:
        """Log-probs of `targets`, float32 [R, S], on the last stage; with entropies [R, S, 2]; hidden states before."""
        head = find_head(self.module)
        if head is None:
            return self._run(batch)
        with head.scoring(batch["targets"], entropies=entropies, temperatures=temperatures_of(batch)):
            return self._run(batch)

    def _run(self, batch: dict[str, Tensor]) -> Tensor:
        return self(batch["tokens"], batch["position_ids"], packed_seq_params=packed_seq_params(batch))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Leaves whole parameters on every rank: refit, reference and export read them before a forward pass does.

        Megatron's `overlap_param_gather` would gather them no sooner than that.
        """
        super().optimizer_step(*args, **kwargs)
        strategy = self.trainer.strategy
        if strategy.ddp_config.overlap_param_gather:
            strategy.megatron_parallel.force_param_sync()

    def save_hf_folder(
        self, target: str | Path, source: str | Path | None = None, card: Mapping[str, Any] | None = None
    ) -> None:
        """Write the policy as a Hugging Face folder, once `fit` has built it. A collective over all ranks.

        Args:
            target: the new folder; it appears whole or not at all.
            source: where configuration and tokenizer are copied from; None: `hf_folder`.
            card: what README.md says of the model in place of the source's.

        Raises:
            ValueError: there is no source, the target exists or cannot be written, or a weight is NaN or inf.
        """
        source = self.hf_folder if source is None else source
        if source is None:
            raise ValueError("source=None: the model has no hf_folder; name one whose configuration and tokenizer fit")
        stream = stream_hf_tensors(unwrap(self), self.head.vocab_size)
        if self.trainer.is_global_zero:
            write_hf_folder(stream, source, target, card)
        for _ in stream:  # every rank walks to the end
            pass

    @property
    def training_loss_reduction(self) -> PolicyLossReduction:
        """NeMo asks for it at every microbatch."""
        if self._training_loss_reduction is None:
            self._training_loss_reduction = PolicyLossReduction()
        return self._training_loss_reduction


def packed_seq_params(batch: dict[str, Tensor]) -> PackedSeqParams | None:
    """Where the trajectories of a packed row begin and end; None for padded rows."""
    if "cu_seqlens" not in batch:
        return None
    bounds, longest = batch["cu_seqlens"], int(batch["max_seqlen"])
    # Transformer Engine asks for the padded bounds under context parallelism. A segment's padding counts as its tokens,
    # so they are the same; and being one tensor, they are compared without waiting for the device.
    padded = bounds if parallel_state.get_context_parallel_world_size() > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )


class FlashReinforceModel(PolicyModel):
    """A NeMo model trained by FlashREINFORCE (NVIDIA, September 2026); `options` are those of `PolicyModel`."""

    def __init__(
        self,
        config: llm.GPTConfig,
        head: HeadSettings | None = None,
        settings: FlashReinforceSettings = FlashReinforceSettings(),
        **options: Any,
    ) -> None:
        super().__init__(config, FlashReinforce(settings), head, **options)


class GRPOModel(PolicyModel):
    """A NeMo model trained by GRPO (Shao et al. 2024); `options` are those of `PolicyModel`."""

    def __init__(
        self,
        config: llm.GPTConfig,
        head: HeadSettings | None = None,
        settings: GrpoSettings = GrpoSettings(),
        **options: Any,
    ) -> None:
        super().__init__(config, Grpo(settings), head, **options)


def token_batch(batch: dict[str, Tensor]) -> TokenBatch:
    """A microbatch [R, S] as the head sees it."""
    reference, by_token = batch.get("reference_logprobs"), batch.get("token_advantages")
    group = parallel_state.get_context_parallel_group()
    return TokenBatch(
        behavior_logprobs=flat(batch["behavior_logprobs"]),
        action_mask=flat(batch["target_mask"]),
        row=flat(batch["row_index"]),
        advantages=batch["advantages"],
        token_weights=batch["token_weights"],
        failures=batch["failures"],
        reference_logprobs=None if reference is None else flat(reference),
        context=ContextShare(group, flat(batch["position_ids"])) if group.size() > 1 else None,
        token_advantages=None if by_token is None else flat(by_token),
        kl_coefficient=float(batch.get("kl_coefficient", 0.0)),
    )


def loss_scale() -> float:
    """The gradient that a microbatch's loss is given: what undoes the average over ranks."""
    return float(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


class PolicyLossReduction(MegatronLossReduction):
    """NeMo's loss seam; the head has formed the loss, here it gets its scale and its statistics.

    The algorithm's loss is a plain sum with global weights. Megatron divides by the number of microbatches and averages
    over data-parallel and context-parallel ranks; all is multiplied back here, the one place that knows of it.
    """

    def forward(self, batch: dict[str, Any], forward_out: Tensor) -> tuple[Tensor, Stats]:
        """`batch`: as `PolicyModel.forward_step` leaves it; `forward_out`: its loss, float32 [1, 1]."""
        loss = forward_out.sum()
        stats = {**batch[STATS], "loss": loss.detach().clone()}
        # Megatron's schedule multiplies by the context-parallel size itself.
        left = loss_scale() / parallel_state.get_context_parallel_world_size()
        return loss * (left * int(batch["num_microbatches"])), stats

    def reduce(self, losses_reduced_per_micro_batch: Sequence[Stats]) -> Stats:
        """Sums (maxima for `*_max`) over microbatches and ranks, float32 scalars."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        reduced: Stats = {}
        for kind, operation in (("sum", torch.distributed.ReduceOp.SUM), ("max", torch.distributed.ReduceOp.MAX)):
            names = sorted(n for n in losses_reduced_per_micro_batch[0] if n.endswith("_max") == (kind == "max"))
            if not names:
                continue
            table = torch.stack(
                [torch.stack([stats[n].float() for n in names]) for stats in losses_reduced_per_micro_batch]
            )
            values = table.amax(0) if kind == "max" else table.sum(0)
            torch.distributed.all_reduce(values, op=operation, group=group)
            reduced.update(zip(names, values.unbind(), strict=True))
        return reduced
