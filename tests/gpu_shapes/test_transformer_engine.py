"""Megatron's layers of Transformer Engine, in its stand-in's numbers on a CPU."""

from __future__ import annotations

import pytest
from stand_in_process import StandInProcess
from tiny import FAMILIES


def test_adapters_have_the_gradients_that_they_have_beside_local_layers(stand_in: StandInProcess) -> None:
    """Two tensor ranks with sequence parallelism: what an adapter sends back through the norm reaches those below."""
    found = stand_in.run("te_lora", ranks=2)
    assert found["adapters"] == 2 * 3 * 2
    assert found["worst"][1] < 1e-4, found["worst"]


def test_packed_rows_over_two_context_ranks_are_those_of_one(stand_in: StandInProcess) -> None:
    """Log-probs and gradients of transformers in float64; keys left in the order of the ranks would show."""
    for family, found in stand_in.run("te_context", ranks=2).items():
        assert found["right"]["logprobs"] < 1e-5, family
        assert found["right"]["gradients"][0] < 1e-5, (family, found["right"]["gradients"])
        wrong = found["in the order of ranks"]
        assert wrong["logprobs"] > 0.1 and wrong["gradients"][0] > 0.1, family


@pytest.fixture(scope="module")
def families(stand_in: StandInProcess) -> dict:
    return stand_in.run("te_families")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_say_the_same_in_both_kinds_of_layers(family: str, families: dict) -> None:
    """Log-probs of packed and of padded rows, gradients, and names in a checkpoint."""
    found = families[family]
    assert found["class"] == "TELayerNormColumnParallelLinear"
    assert found["experts"] == ("TEGroupedMLP" if family in ("mixtral", "qwen3_moe") else "MLP")
    assert found["packed"] < 1e-5 and found["padded"] < 1e-5
    assert found["transformers"] < 1e-5
    assert found["gradient"] < 1e-5
    assert not found["keys"]
