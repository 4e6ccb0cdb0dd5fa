"""The ways of a policy head that `make gpu-check` compares, on the CPU: all have one gradient, and its bounds hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from policy_head_methods import ON_A_GPU, naive
from policy_head_problem import Problem
from workers import check_head


@pytest.mark.parametrize("way", sorted(ON_A_GPU.keys() - {"floor", "naive", "liger"}))
def test_gradients(way: str) -> None:
    problem = Problem(48, 16, 300, 16)
    naive(problem)()
    hidden, weight = problem.hidden.grad, problem.weight.grad
    problem.clear()
    run = ON_A_GPU[way](problem)
    run()
    torch.testing.assert_close(problem.hidden.grad, hidden, rtol=1e-4, atol=1e-5)
    if way not in ("one pass", "gated"):  # theirs is in a matrix of its own
        torch.testing.assert_close(problem.weight.grad, weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["one pass", "gated"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_distances_to_float64(way: str, dtype: str) -> None:
    host = SimpleNamespace(name="cpu", generator=lambda: torch.Generator().manual_seed(0))
    found = check_head.exactness(host, way, dtype, tokens=256, hidden=64, vocab=500, chunk=64)
    for name, ours in found["ours"].items():
        assert 0 < ours <= max(1.05 * found["naive"][name], 1e-5 if dtype == "float32" else 0.0), name
