"""What vLLM's workers import (`--worker-extension-cls`): it makes the file backend known to them."""

from __future__ import annotations

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from nemo_flashrl.rollout_server.file_transfer import FileTransfer

BACKEND = "flashrl_file"

WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


class WorkerExtension:
    """Adds nothing to a worker: importing this module is what matters."""
