"""The stand-in's signatures against those recorded from Transformer Engine's sources."""

from __future__ import annotations

import importlib.util
import json

import pytest
from paths import HELPERS, TESTS

STAND_IN = TESTS / "transformer_engine_stand_in"
OWN = STAND_IN / "transformer_engine/pytorch"
OWN_FILES = {
    **dict.fromkeys(("Linear", "LayerNormLinear", "GroupedLinear", "RMSNorm"), OWN / "module/__init__.py"),
    "DotProductAttention": OWN / "attention/__init__.py",
    "FusedAdam": HELPERS / "fused_adam.py",
    "apply_rotary_pos_emb": OWN / "attention/rope.py",
    "get_dummy_wgrad": OWN / "module/base.py",
}
RECORDED = json.loads((STAND_IN / "signatures.json").read_text())


@pytest.mark.parametrize("version", RECORDED)
def test_signatures(version: str) -> None:
    """Of 2.9 the same, in order; later ones have more arguments between them, and leave none out."""
    spec = importlib.util.spec_from_file_location("signatures", STAND_IN / "signatures.py")
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    own: dict[str, list[str]] = {}
    for name in reader.FILES:
        own |= reader.signatures(name, OWN_FILES.get(name, OWN / "permutation.py").read_text())
    recorded = RECORDED[version]
    assert len(recorded) >= 16
    for name in recorded.keys() & own.keys():
        known = [argument for argument in recorded[name] if argument in own[name]]
        assert known == own[name], name
        if version == "v2.9":
            assert recorded[name] == own[name], name
