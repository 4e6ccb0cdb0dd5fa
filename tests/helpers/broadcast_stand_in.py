"""A stand-in server that takes its weights through the real broadcast backend, in as many workers as it is told.

The backend is ours and the network is real; vLLM's base class and reload are replaced by what they promise: weights
are gone while a reload lasts. `python broadcast_stand_in.py PORT CHECKPOINT WORKERS`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import stand_in_server
import torch
from aiohttp import web

Init, Update = TypeVar("Init"), TypeVar("Update")


class WeightTransferEngine(Generic[Init, Update]):
    def __init__(self, model: Model, checkpoint: str, rank: int, workers: int) -> None:
        self.model, self.device = model, torch.device("cpu")
        self.model_config = types.SimpleNamespace(model=checkpoint, hf_config=None)
        self.parallel_config = types.SimpleNamespace(data_parallel_index=0, world_size=workers, rank=rank)

    def parse_init_info(self, info: dict[str, Any]) -> Any:
        return self.init_info_cls(**info)

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)


class Model:
    """Its weights by name; `act` is what the server was told to do."""

    def __init__(self, act: dict[str, Any]) -> None:
        self.weights = {"w": torch.from_numpy(stand_in_server.START)}
        self.act = act

    def modules(self) -> list[torch.nn.Module]:
        return []

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.weights[name] = tensor.clone()
            if self.act.get("die_in_broadcast"):
                os._exit(9)


def _module(name: str, **contents: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


_module(
    "vllm.distributed.weight_transfer.base",
    WeightTransferEngine=WeightTransferEngine,
    WeightTransferInitInfo=object,
    WeightTransferUpdateInfo=object,
)
_module(
    "vllm.model_executor.model_loader.reload",
    initialize_layerwise_reload=lambda model: model.weights.clear(),
    finalize_layerwise_reload=lambda model, config: None,
)
_module("vllm.model_executor.layers.quantization.base_config", QuantizeMethodBase=type("QuantizeMethodBase", (), {}))
for parent in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.model_executor"):
    _module(parent)
_module("vllm.model_executor.model_loader")

from nemo_flashrl.rollout_server.vllm_backend import WeightTransfer  # noqa: E402


class Server(stand_in_server.Server):
    def __init__(self, checkpoint: str, workers: int) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.models = [Model(self.act) for _ in range(workers)]
        self.workers = [WeightTransfer(model, checkpoint, n, workers) for n, model in enumerate(self.models)]

    async def behave(self, request: web.Request) -> web.Response:
        answer = await super().behave(request)
        for worker, model in zip(self.workers, self.models, strict=True):
            model.act = self.act
            worker.model_config.model = self.act.get("checkpoint", self.checkpoint)
        return answer

    async def world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": len(self.workers)})

    async def initialise(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        return await self.on_all(lambda worker: worker.init_transfer_engine(worker.parse_init_info(info)))

    async def update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        answer = await self.on_all(lambda worker: worker.update_weights(info))
        if answer.status == 200:
            self.pending = self.models[-1].weights["w"].numpy()
        return answer

    async def on_all(self, call: Any) -> web.Response:
        """As vLLM's collective call: in all workers at once; the first error is the answer."""
        results = await asyncio.gather(*(asyncio.to_thread(call, w) for w in self.workers), return_exceptions=True)
        errors = [result for result in results if result is not None]
        return web.json_response({"error": repr(errors[0])}, status=500) if errors else web.json_response({})

    async def weights(self, request: web.Request) -> web.Response:
        sums = [{name: float(t.sum()) for name, t in model.weights.items()} for model in self.models]
        return web.json_response({"sums": sums, "paused": not self.paused.is_set()})


if __name__ == "__main__":
    port, checkpoint, workers = sys.argv[1:]
    torch.set_num_threads(1)
    server = Server(str(Path(checkpoint)), int(workers))
    application = stand_in_server.app(server)
    application.router.add_get("/get_world_size", server.world_size)
    application.router.add_get("/weights", server.weights)
    web.run_app(application, host="127.0.0.1", port=int(port), print=None)
