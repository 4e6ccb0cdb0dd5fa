"""Answers of servers as bytes: what is read of them, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest

from nemo_flashrl.engines.base import Context
from nemo_flashrl.engines.server_pool import Fault
from nemo_flashrl.engines.sglang import SGLangDialect
from nemo_flashrl.engines.vllm import VLLMDialect
from nemo_flashrl.records import Generation, Sampling

SPANS = [{"version": "3", "start": 0, "end": 1}, {"version": "default", "start": 1, "end": 3}]
IDS, LOGPROBS = [7, 8, 9], [-0.5, -1.25, -2.0]


def vllm(ids: list[Any] = IDS, rows: list[Any] | None = None, **more: Any) -> bytes:
    entries = [{"token_id": t, "logprob": x, "rank": 1} for t, x in zip(IDS, LOGPROBS, strict=True)]
    rows = [{**entry, "top_logprobs": [entry]} for entry in entries] if rows is None else rows
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": rows}, "weight_versions": SPANS, **more}
    return json.dumps({"request_id": "a", "choices": [{"finish_reason": "stop", **choice}], "usage": None}).encode()


def row(token: Any, logprob: Any, *others: tuple[int, float]) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob, "top_logprobs": [{"token_id": t, "logprob": x} for t, x in others]}


def test_vllms_answer() -> None:
    assert VLLMDialect().read(vllm(), 0) == Generation((7, 8, 9), (-0.5, -1.25, -2.0), (3, 0, 0), "stop")


def test_the_sampled_token_may_stand_below_another() -> None:
    rows = [row(1, -0.1, (7, -0.5)), row(8, -1.25), row(1, -0.2, (2, -0.3), (9, -2.0))]
    assert VLLMDialect().read(vllm(rows=rows), 0).logprobs == (-0.5, -1.25, -2.0)
    with pytest.raises(IndexError):
        VLLMDialect().read(vllm(rows=[row(1, -0.1, (2, -0.5)), *rows[1:]]), 0)


@pytest.mark.parametrize("worst", [-9999.0, -1e30])
def test_what_vllm_writes_for_nan_is_no_logprob(worst: float) -> None:
    rows = [row(7, -0.5), row(8, worst), row(9, 0.0)]
    assert VLLMDialect().read(vllm(rows=rows), 0).logprobs == (-0.5, -math.inf, 0.0)
    many = [row(7, -5.0)] * 2000  # their sum alone is less
    assert VLLMDialect().read(vllm([7] * 2000, many), 0).logprobs == (-5.0,) * 2000


@pytest.mark.parametrize(
    "answer",
    [
        vllm(["7", 8, 9]),
        vllm(rows=[row(7, None), row(8, -1.0), row(9, -1.0)]),
        vllm(rows=[row(7, "-1"), row(8, -1.0), row(9, -1.0)]),
        vllm(rows=None, logprobs=None),
        vllm(finish_reason="abort"),
        vllm(finish_reason=None),
        vllm(weight_versions=[{"version": "3", "start": 1, "end": 3}]),
        vllm(weight_versions=[{"version": "third", "start": 0, "end": 3}]),
        vllm(weight_versions=None),
        b'{"choices": {}}',
        b"[]",
        b'{"choices": [',
        b"",
    ],
)
def test_another_form_is_a_value_error(answer: bytes) -> None:
    with pytest.raises(ValueError):
        VLLMDialect().read(answer, 0)


def test_weights_of_the_command_line_are_of_a_server_that_was_started_anew() -> None:
    with pytest.raises(Fault, match="started anew"):
        VLLMDialect().read(vllm(), None)


def test_sglangs_answer() -> None:
    rows = [[x, t, None] for t, x in zip(IDS, LOGPROBS, strict=True)]
    meta = {"finish_reason": {"type": "length", "length": 3}, "weight_versions": SPANS, "output_token_logprobs": rows}
    answer = json.dumps({"text": "", "output_ids": IDS, "meta_info": meta}).encode()
    assert SGLangDialect().read(answer, 0) == Generation((7, 8, 9), (-0.5, -1.25, -2.0), (3, 0, 0), "length")
    rows[1][0] = None  # what it writes for NaN
    with pytest.raises(ValueError):
        SGLangDialect().read(json.dumps({"meta_info": meta}).encode(), 0)


def test_a_context_that_grows_is_checked_and_written_as_a_whole_one() -> None:
    context, ids = Context([5, 1]), [5, 1]
    for new in ([], [7, 3], [0], [], [9] * 300):
        context += new
        ids += new
        assert context == ids and context.within(10) and not context.within(max(ids))
        for dialect, name in ((VLLMDialect(), "token_ids"), (SGLangDialect(), "input_ids")):
            body = dialect.request(context, Sampling(max_tokens=3))
            assert json.loads(msgspec.json.encode(body))[name] == ids
            assert msgspec.json.encode(body) == msgspec.json.encode(dialect.request(tuple(ids), Sampling(max_tokens=3)))
    assert Context.of(context) is context and Context.of((1, 2)) == [1, 2]
    context += [10]
    assert not context.within(10) and context.within(11)
    context += [-1]
    assert not context.within(11)
    assert json.loads(msgspec.json.encode(Context().as_json())) == []
