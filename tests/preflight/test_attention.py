"""fp32 on a GPU, where Transformer Engine has no attention kernel for some of it."""

from __future__ import annotations

import pytest

from nemo_flashrl import config
from nemo_flashrl.preflight import model as preflight
from nemo_flashrl.preflight.model import check_attention


@pytest.mark.parametrize(
    ("overrides", "gpu", "engine", "refused"),
    [
        ([], False, (), None),
        (
            [],
            True,
            (2, 9),
            "batching.layout=packed: in fp32 it needs Transformer Engine 2.11 or newer on a GPU, and 2.9",
        ),
        ([], True, (2, 11), None),
        (["batching.layout=padded"], True, (2, 9), None),
        (["model.precision=bf16"], True, (2, 9), None),
        (["parallel.context=2"], True, (2, 16), "parallel.context=2: needs model.precision=bf16 on a GPU, not fp32"),
    ],
)
def test_attention_of_fp32(monkeypatch, overrides: list[str], gpu: bool, engine: tuple, refused: str | None) -> None:
    run = config.load("rehearsal", ["output=x", "model.path=x", *overrides])
    assert run.model.precision == ("bf16" if "model.precision=bf16" in overrides else "fp32")
    monkeypatch.setattr(preflight.platform, "has_gpu", lambda: gpu)
    monkeypatch.setattr(preflight.platform, "transformer_engine", lambda: engine)
    if refused is None:
        check_attention(run)
        return
    with pytest.raises(ValueError) as error:
        check_attention(run)
    assert str(error.value).startswith(refused)
