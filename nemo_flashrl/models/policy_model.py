"""NeMo's GPTModel with a policy loss: what runs between a microbatch and its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from nemo.collections import llm
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.algorithms.algorithm import Algorithm
from nemo_flashrl.algorithms.flash_reinforce import FlashReinforce, FlashReinforceSettings
from nemo_flashrl.algorithms.grpo import Grpo, GrpoSettings
from nemo_flashrl.models.families import read_hf_config
from nemo_flashrl.models.loss_reduction import PolicyLossReduction, loss_scale, token_batch
from nemo_flashrl.models.policy_head import HeadSettings, PolicyHead, PolicyRequest, find_head, temperatures_of
from nemo_flashrl.weights.hf_folder import load_hf_folder, write_hf_folder
from nemo_flashrl.weights.lora import LoraSettings, add_lora
from nemo_flashrl.weights.shards import stream_hf_tensors, unwrap


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

    def forward_step(self, batch: dict[str, Tensor]) -> Tensor:
        """The policy loss, float32 [1, 1], on the last stage; hidden states before it."""
        head = find_head(self.module)
        if head is None:
            return self._run(batch)
        overlap = self.trainer.strategy.ddp_config.overlap_grad_reduce
        request = PolicyRequest(self.algorithm, token_batch(batch), loss_scale(), grad_hooks=overlap)
        with head.scoring(batch["targets"], request, temperatures=temperatures_of(batch)):
            loss = self._run(batch)
        self.training_loss_reduction.request = request
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
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
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
