"""What vLLM's workers import (`--worker-extension-cls`): it makes our backend known to them."""

from __future__ import annotations

from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from nemo_flashrl.rollout_server.vllm_backend import WeightTransfer

BACKEND = "flashrl"

WeightTransferEngineFactory.register_engine(BACKEND, WeightTransfer)


class WorkerExtension:
    """Adds nothing to a worker: importing this module is what matters."""
