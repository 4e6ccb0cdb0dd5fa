"""The second set of weights: bits that change places, and an average that moves where bf16 stands still."""

from __future__ import annotations

import json

import pytest
import torch
from processes import run_ranks

from nemo_flashrl.models.shadow_weights import ShadowWeights, _put_in, _take_out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_two_sets_change_places_and_back_bit_for_bit(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator).to(torch.int32)
    patterns[:6] = torch.tensor([0, -(2**31), 0x7FFFFFFF, -1, 0x3F808000, 0x7F7FFFFF])  # NaN, a tie, the largest number
    shadow = patterns.view(torch.float32).clone()
    policy = torch.randint(-(2**15), 2**15, (1 << 20,), generator=generator).to(torch.int16).view(torch.bfloat16)
    policy = policy.to(dtype)
    before = bits(policy).clone(), bits(shadow).clone()
    _put_in(policy, shadow)
    finite = before[1].view(torch.float32).abs() < 1e38
    expected = before[1].view(torch.float32).to(dtype)
    away = (before[1] & 0xFFFF) == 0x8000  # a tie goes away from zero here, to the even neighbour in torch
    same = bits(policy) == bits(expected)
    assert same[finite & ~away].all()
    assert not torch.equal(bits(policy), before[0])
    _take_out(policy, shadow)
    assert torch.equal(bits(policy), before[0]) and torch.equal(bits(shadow), before[1])


def test_average_of_bf16_weights_moves_as_in_float64() -> None:
    """1000 steps of a constant drift at 0.999: the mean lags by (1 - 0.999^n) and the sum of what it has seen."""
    model = torch.nn.Linear(4, 3).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    shadow = ShadowWeights(model)
    right, wrong = torch.ones(3, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.bfloat16)
    for step in range(1, 1001):
        with torch.no_grad():
            model.weight.fill_(1 + step / 1000)  # rounded to bf16: what the policy is
        shadow.follow(0.999)
        right = 0.999 * right + 0.001 * model.weight.detach().double()
        wrong = wrong * 0.999 + 0.001 * model.weight.detach()
    moved = right - 1  # 0.368 by hand: 1 - (1 - e^-1) of the drift of 1
    assert moved.mean().item() == pytest.approx(0.368, abs=2e-3)
    ours, plain_bf16 = (
        ((a.detach().double() - 1 - moved) / moved).abs().max() for a in (shadow.values["weight"], wrong)
    )
    assert ours < 1e-3
    assert plain_bf16 > 0.1


def test_copy_is_exact_and_other_dtypes_are_refused() -> None:
    model = torch.nn.BatchNorm1d(5)  # its buffers belong to the place
    shadow = ShadowWeights(model)
    assert shadow.values.keys() == {"weight", "bias"}
    with torch.no_grad():
        model.weight.copy_(torch.arange(5) / 7)
    shadow.follow(0.0)
    assert torch.equal(shadow.values["weight"], model.weight)
    with pytest.raises(ValueError, match=r"reference: weight is torch.float16"):
        ShadowWeights(torch.nn.Linear(2, 2).half())


def test_it_takes_4_bytes_a_parameter_of_the_host_and_a_piece_of_the_device(tmp_path) -> None:
    """16 layers of 2^20 parameters. The policy holds weights, fp32 gradients, Adam's moments, and for bf16 a master."""
    layers, parameters = 16, 2**20
    run_ranks(1, "swap_memory", tmp_path / "report.json", layers, 1024)
    report = json.loads((tmp_path / "report.json").read_text())
    for dtype, policy_bytes in (("torch.float32", 4 + 4 + 8), ("torch.bfloat16", 2 + 4 + 12)):
        measured = report[dtype]
        assert measured["host"] == 4 * layers * parameters
        allowed = 4 * parameters + 0.02 * policy_bytes * layers * parameters  # one layer's buffer and 2%
        assert max(measured["swap"], measured["follow"]) < allowed < 4 * layers * parameters  # a second model is more
