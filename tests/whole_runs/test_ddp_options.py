"""Megatron's data-parallel options beside a head that sums its gradient into `main_grad` during the forward pass."""

from __future__ import annotations

import pytest
import torch
from plain import VOCAB_SIZE, make_case, worst_error
from processes import run_ranks
from safetensors.torch import load_file

SMALL_BUCKETS = {"bucket_size": 5000}  # parameters; the model has some 80,000, so that several reductions are under way
MANY_MICROBATCHES = "batching.max_tokens_per_microbatch=100"
OPTIONS = {  # processes, overrides, fields of Megatron's DistributedDataParallelConfig
    "overlapped reduction": (2, [MANY_MICROBATCHES, "parallel.overlap_gradients=true"], SMALL_BUCKETS),
    "distributed optimizer": (2, [MANY_MICROBATCHES], {"use_distributed_optimizer": True}),
    "both and overlapped gather, pp2": (
        4,
        [MANY_MICROBATCHES, "parallel.overlap_gradients=true", "parallel.pipeline=2"],
        {"use_distributed_optimizer": True, "overlap_param_gather": True, **SMALL_BUCKETS},
    ),
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def case(request, tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("ddp"), tied=request.param)


@pytest.fixture(scope="module")
def update(case):
    """What a step in one process, without any of the options, adds to the parameters."""
    out = case.folder.parent / "alone.pt"
    run_ranks(1, "parity", case.folder, case.pickled, out, VOCAB_SIZE)
    before = load_file(case.folder / "model.safetensors")
    return {name: after - before[name] for name, after in torch.load(out)["parameters"].items()}


@pytest.mark.parametrize("option", OPTIONS)
def test_loss_gradients_and_parameters(case, update, tmp_path, option: str) -> None:
    processes, overrides, ddp = OPTIONS[option]
    out = tmp_path / "step.pt"
    run_ranks(processes, "parity", case.folder, case.pickled, out, VOCAB_SIZE, *overrides, ddp=ddp)
    step = torch.load(out)
    assert step["stats"]["loss"] == pytest.approx(case.loss, rel=1e-5)
    assert step["stats"]["admitted"] == case.admitted
    assert worst_error(step["gradients"], case.gradients) < (1e-5,)
    before = load_file(case.folder / "model.safetensors")
    # Adam's first step is the gradient's sign: entries near 0 may differ. A step not taken, or not gathered, is 1 off.
    assert worst_error({n: p - before[n] for n, p in step["parameters"].items()}, update) < (1e-2,)
