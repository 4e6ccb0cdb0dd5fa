"""Our weight-transfer backend for vLLM: new weights come as a folder, or are broadcast by the trainer over the network.

    folder      safetensors files that every worker reads itself: shared memory on one node, else a shared file system
    broadcast   tensor by tensor from the trainer, for nodes without a file system in common

Either way names and shapes are checked against the checkpoint that the server started from before the first weight is
touched, so a refused update leaves the old weights serving; a broadcast begins when every worker of every server has
found them good. Beside the model, one tensor and the layer that is being put together are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nemo_flashrl.weight_sync.hf_reader import DTYPES, HfTensors, check_finite, check_shapes
from nemo_flashrl.weight_sync.process_group import CONNECT, WeightGroup


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A group to join in place of the one before; of size 1, none."""

    size: int = 1  # the trainer and all workers of all servers
    host: str = ""  # the trainer's store
    port: int = 0
    group: str = ""
    rank_offset: int = 1  # rank of this server's first worker
    timeout: float = 300.0  # seconds


@dataclass
class Folder(WeightTransferUpdateInfo):
    """Where the new weights lie: a folder in the layout of a Hugging Face checkpoint."""

    folder: str


@dataclass
class Broadcast(WeightTransferUpdateInfo):
    """What will be broadcast, in this order."""

    step: str
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]  # keys of DTYPES


class WeightTransfer(WeightTransferEngine[InitInfo, WeightTransferUpdateInfo]):
    """One worker of one server. The whole of an update happens in `update_weights`.

    vLLM's layerwise reload puts the model on the meta device while it runs. Between two HTTP calls that would be
    a server without weights, and fatal where the second call never comes.
    """

    init_info_cls = InitInfo
    update_info_cls = Broadcast
    _group: WeightGroup | None = None
    _broken: Exception | None = None  # what the last broadcast broke off with

    def parse_update_info(self, update_info: dict[str, Any]) -> WeightTransferUpdateInfo:
        """Which of the two it is."""
        return Folder(**update_info) if "folder" in update_info else super().parse_update_info(update_info)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a group, with all others that it is for.

        Raises:
            RuntimeError: it did not come about.
        """
        self.shutdown()
        if init_info.size == 1:
            return
        limit = timedelta(seconds=init_info.timeout)
        store = TCPStore(init_info.host, init_info.port, is_master=False, timeout=limit)
        within = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        rank = init_info.rank_offset + within
        group = WeightGroup(store, init_info.group, rank, init_info.size, init_info.timeout)
        group.report(CONNECT)
        group.await_decision(CONNECT)
        group.connect()
        self._group = group

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which synchronises an accelerator that a CPU lacks."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        """Check, then load.

        Raises:
            ValueError: a file, tensor or shape is not what the served checkpoint has; the model is untouched.
            RuntimeError: a rank refused, or the broadcast broke off. Before the first tensor the model is untouched;
                after it the weights are a mixture, good for nothing until an update has gone through.
        """
        if isinstance(update_info, Folder):
            self._load_folder(Path(update_info.folder))
        else:
            self._load_broadcast(update_info)

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _load_folder(self, folder: Path) -> None:
        tensors, where = HfTensors(folder), f"weights in {folder}"
        self._check(tensors.shapes(), where)
        check_finite(tensors, where)
        self._reload(tensors.items())

    def _load_broadcast(self, update: Broadcast) -> None:
        if self._group is None:
            raise ValueError("weights: this server is in no group with a trainer")
        try:
            shapes = dict(zip(update.names, map(tuple, update.shapes), strict=True))
            self._check(shapes, "weights")
            dtypes = [DTYPES[name] for name in update.dtypes]
        except Exception as error:  # whatever it is, the trainer must not wait for this worker
            self._group.report(update.step, str(error))
            raise
        self._group.report(update.step)
        self._group.await_decision(update.step)
        stream = self._receive(update.step, shapes, dtypes)
        self._reload(stream)
        for _ in stream:  # what the model has no use for; the other ranks wait until it is taken
            pass
        if self._broken is not None:
            self.shutdown()
            raise self._broken

    def _receive(
        self, step: str, shapes: dict[str, tuple[int, ...]], dtypes: list[torch.dtype]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What is broadcast; where it breaks off, the rest is the served checkpoint's.

        A layerwise reload that ends early leaves layers without values, and a server without numbers.
        """
        self._broken = None
        first = HfTensors(self.model_config.model)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True):
            if self._broken is None:
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                try:
                    self._group.broadcast(tensor, step)
                except RuntimeError as error:
                    self._broken = error
            if self._broken is not None:
                tensor = first[name]
            yield name, tensor

    def _check(self, shapes: dict[str, tuple[int, ...]], where: str) -> None:
        check_shapes(shapes, Path(self.model_config.model), self.model_config.hf_config, where)

    def _reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights; `tensors` must not raise."""
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors)
        finalize_layerwise_reload(self.model, self.model_config)
        _process_shared(self.model)


def _process_shared(model: torch.nn.Module) -> None:
    """Let layers that share a weight do again what they do after loading.

    vLLM's reload does it for layers that tensors were loaded into. A tied head gets none: its weight is the embedding's
    and has the new values, but what was computed from the old ones stays, as the packed matrix that the CPU build
    multiplies by.
    """
    sharing: dict[int, set[torch.nn.Module]] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            if parameter.numel():  # a layer that has packed its weight may leave an empty one
                sharing.setdefault(parameter.untyped_storage().data_ptr(), set()).add(layer)
    for layers in sharing.values():
        for layer in layers if len(layers) > 1 else ():
            if isinstance(method := getattr(layer, "quant_method", None), QuantizeMethodBase):
                method.process_weights_after_loading(layer)
