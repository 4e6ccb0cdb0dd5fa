"""Models with experts: a step of the real trainer, experts spread over ranks, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from plain import VOCAB_SIZE, make_case, worst_error
from processes import run_ranks

from nemo_flashrl.config import load
from nemo_flashrl.preflight.model import check_experts

LAYOUTS = {
    "ep2": (2, ["parallel.expert=2", "batching.max_tokens_per_microbatch=200"]),
    "ep2 tp2 sequence": (2, ["parallel.expert=2", "parallel.tensor=2", "parallel.sequence=true"]),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("experts"), "qwen3_moe")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients(case, tmp_path, layout: str) -> None:
    processes, overrides = LAYOUTS[layout]
    run_ranks(processes, "parity", case.folder, case.pickled, tmp_path / "out.pt", VOCAB_SIZE, *overrides)
    step = torch.load(tmp_path / "out.pt")
    assert step["stats"]["loss"] == pytest.approx(case.loss, rel=1e-5)
    assert worst_error(step["gradients"], case.gradients) < (1e-5,)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.expert=3"], r"parallel.expert=3: does not divide the model's experts \(4 a layer\)"),
        (["parallel.expert=4"], "does not divide the 2 processes of a pipeline stage"),
        (["parallel.tensor=2"], "parallel.sequence=False: Megatron trains experts"),
    ],
)
def test_sizes_are_checked(overrides: list[str], message: str) -> None:
    config = load("rehearsal", ["output=out", "model.path=here", *overrides])
    with pytest.raises(ValueError, match=message):
        check_experts(config, {"num_experts": 4}, 2)
