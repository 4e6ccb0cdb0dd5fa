"""SGLang servers: `POST /generate` with `input_ids`, weights through `POST /update_weights_from_disk`.

Written from the source of SGLang 0.5.23, the first that tells the weights' version of every token; tested against
answers of that form, not against a running server, which needs a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec

from nemo_flashrl.engines.base import Context, Span
from nemo_flashrl.engines.http import check_sampling, token_versions
from nemo_flashrl.engines.http_refit import RemoteEngine, Weights
from nemo_flashrl.engines.server_pool import Fault, Server, ServerPool
from nemo_flashrl.records import Generation, Sampling

SUPPORTED = "SGLang 0.5.23"
_SEEDS = 2**31  # SGLang keeps a seed in 32 bits


class SGLangDialect:
    """SGLang's own routes. The end-of-sequence token always stops: who ignores it ignores stop tokens too."""

    health_path = "/health"
    generate_path = "/generate"

    def request(self, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> dict[str, Any]:
        """Everything is said, whatever the server's defaults: nothing truncates or tilts the distribution."""
        return {
            "input_ids": Context.of(token_ids).as_json(),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_tokens,
                "sampling_seed": sampling.seed % _SEEDS,  # heeded with --enable-deterministic-inference
                "stop_token_ids": list(sampling.stop_token_ids),
                **({"stop": list(sampling.stop), "no_stop_trim": True} if sampling.stop else {}),
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            },
            "return_logprob": True,
            **more,
        }

    def read(self, answer: bytes, initial_version: int | None) -> Generation:
        """See `Dialect.read`."""
        meta = _ANSWER.decode(answer).meta_info
        rows, reason = meta.output_token_logprobs, meta.finish_reason.type
        if reason not in ("stop", "length"):
            raise ValueError(f"finish_reason={reason!r}")
        versions = token_versions(meta.weight_versions, initial_version)
        return Generation(tuple(map(_TOKEN, rows)), tuple(map(_LOGPROB, rows)), versions, reason)

    def weights_replaced(self) -> None:
        """See `Dialect.weights_replaced`."""

    def lost(self, error: ValueError) -> str | None:
        """See `Dialect.lost`."""
        return None

    async def check(self, pool: ServerPool, server: Server, vocab_size: int) -> None:
        """Routes, versions, then what the log-probs are of; a server that was left paused is continued."""
        try:
            await pool.call(server, "/continue_generation", {})
            answer = await pool.call(server, self.generate_path, self.request([0], Sampling(max_tokens=1)))
            if "weight_versions" not in answer["meta_info"]:
                raise ValueError("it does not report the weight version of each token")
            await check_sampling(self, pool, server, vocab_size)
        except ValueError as error:
            raise ValueError(f"{server.url}: {error}; supported is {SUPPORTED}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{server.url} does not answer as {SUPPORTED} does ({error!r})") from error

    async def longest_context(self, pool: ServerPool, server: Server) -> int | None:
        """See `Dialect.longest_context`; only its own log says."""
        return None

    async def top_logprobs(
        self, pool: ServerPool, server: Server, token_ids: Sequence[int], temperature: float, count: int
    ) -> dict[int, float]:
        """Of the next token, the most likely `count` and the sampled one."""
        sampling = Sampling(temperature=temperature, max_tokens=1)
        body = self.request(token_ids, sampling, top_logprobs_num=count)
        meta = (await pool.call(server, self.generate_path, body))["meta_info"]
        rows = [*meta["output_top_logprobs"][0], *meta["output_token_logprobs"]]
        return {token: logprob for logprob, token, *_ in rows}

    async def score(self, pool: ServerPool, server: Server, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a prompt, which SGLang computes without temperature."""
        body = self.request(token_ids, Sampling(max_tokens=1), logprob_start_len=0)
        rows = (await pool.call(server, self.generate_path, body))["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != list(token_ids):
            raise Fault("malformed", f"{server.url} scored tokens other than those it was asked for")
        return [row[0] for row in rows[1:]]

    async def load(self, pool: ServerPool, server: Server, weights: Weights) -> None:
        """Take back what is in flight, load, reset the KV cache, continue."""
        await pool.call(server, "/pause_generation", {"mode": "retract"})
        body = {"model_path": str(weights.folder), "weight_version": str(weights.version), "flush_cache": True}
        try:
            await pool.call(server, "/update_weights_from_disk", body)
        except ValueError as error:
            await pool.call(server, "/continue_generation", {})
            raise Fault("status", str(error)) from error
        await pool.call(server, "/continue_generation", {})


class _Row(msgspec.Struct, array_like=True, gc=False):
    """[log-prob, token id, text]."""

    logprob: float
    token_id: int


class _Reason(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    output_token_logprobs: list[_Row]
    finish_reason: _Reason
    weight_versions: list[Span]


class _Answer(msgspec.Struct):
    meta_info: _Meta


_ANSWER = msgspec.json.Decoder(_Answer)
_TOKEN, _LOGPROB = attrgetter("token_id"), attrgetter("logprob")


class SGLangEngine(RemoteEngine):
    """An `Engine` over SGLang servers; arguments as `RemoteEngine` has them."""

    dialect = SGLangDialect
