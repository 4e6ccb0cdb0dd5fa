"""vLLM servers that get a LoRA adapter alone: `rollout.weight_transfer: adapter`.

The base is the checkpoint that a server was started with, and stays; what comes with every sync is some thousandth of
it. vLLM computes the adapter beside the base, as the trainer does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nemo_flashrl.records import Sampling
from nemo_flashrl.rollout.engine import NamedTensors
from nemo_flashrl.rollout.remote_engine import RemoteEngine, Weights
from nemo_flashrl.rollout.server_pool import Fault, Server, ServerPool
from nemo_flashrl.rollout.vllm_engine import VLLMDialect

ADAPTER = "policy"  # its name on a server
LOAD = "/v1/load_lora_adapter"


class AdapterEngine(RemoteEngine):
    """An `Engine` over vLLM servers that hold the base; arguments as `RemoteEngine` has them.

    `load_weights` takes PEFT's names and factors, alpha / rank multiplied in.
    """

    def __init__(self, servers: Sequence[str], vocab_size: int, **options: Any) -> None:
        super().__init__(AdapterDialect(vocab_size), servers, vocab_size, **options)

    async def _write(self, stream: NamedTensors, folder: Path) -> None:
        write_peft_folder(dict(stream), folder)

    async def _ask(self, server: Server, body: dict[str, Any]) -> Any:
        try:
            return await super()._ask(server, body)
        except ValueError as error:
            if f"`{ADAPTER}` does not exist" not in str(error):
                raise
            raise Fault("version", f"{server.url} has lost the adapter: it was restarted") from error


class AdapterDialect(VLLMDialect):
    """As vLLM's; whatever is asked for after the first sync is asked of the adapter."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._base = VLLMDialect(vocab_size)
        self._loaded = False

    def request(self, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> dict[str, Any]:
        body = super().request(token_ids, sampling, **more)
        return body | {"model": ADAPTER} if self._loaded else body

    async def check(self, pool: ServerPool, server: Server) -> None:
        """Of the base: a server that was started anew has no adapter yet."""
        await self._base.check(pool, server)

    async def install(self, pool: ServerPool, server: Server, weights: Weights) -> None:
        """See `update`. A load that fails leaves the adapter before it."""
        await self.update(pool, server, {"folder": str(weights.folder)}, weights.version)
        self._loaded = True

    async def _replace(self, pool: ServerPool, server: Server, update_info: dict[str, Any]) -> None:
        body = {"lora_name": ADAPTER, "lora_path": update_info["folder"], "load_inplace": True}
        try:
            await pool.call(server, LOAD, body)
        except Fault as fault:
            if fault.reason != "malformed":  # it answers in words
                raise


def write_peft_folder(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write factors under PEFT's names, already scaled, as a new folder that vLLM loads.

    Raises:
        ValueError: one of them is not finite.
    """
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"weights: {name} is not finite")
    rank = next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    folder.mkdir(parents=True)
    save_file(
        {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
