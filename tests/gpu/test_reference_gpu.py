"""The reference policy on a GPU: bits, pinned host memory, and what a swap takes of the device."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here")

LAYERS, WIDTH = 32, 2048


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    from megatron.core import parallel_state

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swap_keeps_every_bit_and_takes_one_piece(dtype) -> None:
    from nemo_flashrl.models.shadow_weights import ShadowWeights

    layers = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    model = torch.nn.Sequential(*layers).to("cuda", dtype)
    shadow = ShadowWeights(model)
    assert all(value.is_pinned() and value.dtype == torch.float32 for value in shadow.values.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    shadow.follow(0.5)
    policy = [p.detach().clone() for p in model.parameters()]
    average = [value.clone() for value in shadow.values.values()]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with shadow.swapped_in():
        for parameter, value in zip(model.parameters(), average, strict=True):
            # A tie is rounded away from zero here: one in 65536 may differ by the last bit.
            assert (parameter.cpu() != value.to(dtype)).float().mean() < 1e-3
    peak = torch.cuda.max_memory_allocated() - before
    assert all(torch.equal(a, b) for a, b in zip(policy, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(average, shadow.values.values(), strict=True))
    policy_bytes = LAYERS * WIDTH**2 * (18 if dtype == torch.bfloat16 else 16)
    assert peak < 4 * WIDTH**2 + 0.02 * policy_bytes
