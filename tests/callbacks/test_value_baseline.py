"""What the value head's callback hands to the rank that predicts."""

from __future__ import annotations

import pickle

import pytest
import torch

from nemo_flashrl import platform
from nemo_flashrl.callbacks.value_baseline import _on_first_rank


def test_each_state_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(platform, "object_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "gather_object", lambda own, *_, **__: sent.append(pickle.dumps(own)))
    states = torch.randn(16, 2048)
    assert _on_first_rank([{"trajectory": torch.arange(16)}], [states]) is None
    assert len(sent[0]) < 1.1 * states.nbytes
    assert all(torch.equal(state, states[place]) for place, state in pickle.loads(sent[0]).items())
