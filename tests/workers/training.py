"""`flashrl train`, as torchrun starts it."""

from __future__ import annotations

from nemo_flashrl.cli import main as flashrl


def main(*arguments: str) -> None:
    code = flashrl(["train", *arguments])
    assert code == 0, f"flashrl train ended with {code}"
