"""vLLM servers: `POST /inference/v1/generate` with token ids, weights through our transfer backend.

Written for and tested with vLLM 0.32, the first with these routes; `flashrl serve-rollout` starts one as it must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from nemo_flashrl.engines.base import Context, Span
from nemo_flashrl.engines.http import check_sampling, token_versions
from nemo_flashrl.engines.http_refit import RemoteEngine, Weights
from nemo_flashrl.engines.server_pool import Fault, Server, ServerPool
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.weight_sync.hf_writer import write_peft
from nemo_flashrl.weight_sync.probe import NamedTensors

SUPPORTED = "vLLM 0.32"
MAX_TEMPERATURE = 2.0  # vLLM refuses more
NO_LOGPROB = -9999.0  # what vLLM writes for -inf and NaN
ADAPTER = "policy"  # its name on a server
LOAD_ADAPTER = "/v1/load_lora_adapter"
_HOW = f"start it with `flashrl serve-rollout` from an environment with {SUPPORTED}"


class VLLMDialect:
    """vLLM's routes."""

    health_path = "/health"
    generate_path = "/inference/v1/generate"

    def request(self, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> dict[str, Any]:
        """Everything is said, whatever the server's defaults: nothing truncates or tilts the distribution."""
        return {
            "token_ids": Context.of(token_ids).as_json(),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "seed": sampling.seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,  # the end-of-sequence token is among the stop tokens, if it shall stop
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "logprobs": 0,
                "detokenize": bool(sampling.stop),
                **({"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}),
                **more,
            },
        }

    def read(self, answer: bytes, initial_version: int | None) -> Generation:
        """See `Dialect.read`."""
        choice = _ANSWER.decode(answer).choices[0]
        token_ids, rows = choice.token_ids, choice.logprobs.content
        logprobs = tuple(map(_LOGPROB, rows))
        if len(rows) == len(token_ids) and list(map(_TOKEN, rows)) != token_ids:  # else the engine counts and refuses
            rows = _WHOLE_ANSWER.decode(answer).choices[0].logprobs.content
            logprobs = tuple(map(_sampled, rows, token_ids))
        if sum(logprobs) <= NO_LOGPROB / 2 and min(logprobs) <= NO_LOGPROB:  # a sum is had for a quarter
            logprobs = tuple(x if x > NO_LOGPROB else -math.inf for x in logprobs)
        versions = token_versions(choice.weight_versions, initial_version)
        if choice.finish_reason not in ("stop", "length"):
            raise ValueError(f"finish_reason={choice.finish_reason!r}")
        return Generation(tuple(token_ids), logprobs, versions, choice.finish_reason)

    def weights_replaced(self) -> None:
        """See `Dialect.weights_replaced`."""

    def lost(self, error: ValueError) -> str | None:
        """See `Dialect.lost`."""
        return None

    async def check(self, pool: ServerPool, server: Server, vocab_size: int) -> None:
        """Routes, transfer backend, then what the log-probs are of; a server that was left paused is continued."""
        try:
            await pool.call(server, "/is_paused")
            await pool.call(server, "/weight_info")
        except ValueError as error:
            raise ValueError(
                f"{server.url} lacks the routes for new weights ({error}): VLLM_SERVER_DEV_MODE=1 is not set, or it is "
                f"not {SUPPORTED}; {_HOW}"
            ) from error
        await pool.call(server, "/resume", {})
        try:
            await check_sampling(self, pool, server, vocab_size)
        except ValueError as error:
            raise ValueError(f"{server.url}: {error}; {_HOW}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{server.url} does not answer as {SUPPORTED} does ({error!r}); {_HOW}") from error
        try:
            await pool.call(server, "/init_weight_transfer_engine", {"init_info": {}})
        except (Fault, ValueError) as error:
            raise ValueError(f"{server.url} lacks our weight-transfer backend ({error}); {_HOW}") from error

    async def longest_context(self, pool: ServerPool, server: Server) -> int | None:
        """See `Dialect.longest_context`: `--max-model-len`, or what the checkpoint says."""
        return (await pool.call(server, "/v1/models"))["data"][0].get("max_model_len")

    async def top_logprobs(
        self, pool: ServerPool, server: Server, token_ids: Sequence[int], temperature: float, count: int
    ) -> dict[int, float]:
        """Of the next token, the most likely `count` and the sampled one."""
        sampling = Sampling(temperature=temperature, max_tokens=1)
        answer = await pool.call(server, self.generate_path, self.request(token_ids, sampling, logprobs=count))
        (row,) = answer["choices"][0]["logprobs"]["content"]
        return {entry["token_id"]: entry["logprob"] for entry in row["top_logprobs"]}

    async def score(self, pool: ServerPool, server: Server, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of a prompt, which vLLM computes without temperature."""
        body = self.request(token_ids, Sampling(max_tokens=1), prompt_logprobs=0)
        rows = (await pool.call(server, self.generate_path, body))["prompt_logprobs"]
        return [row[str(token)]["logprob"] for row, token in zip(rows[1:], token_ids[1:], strict=True)]

    async def load(
        self,
        pool: ServerPool,
        server: Server,
        weights: Weights,
        broadcast: dict[str, Any] | None = None,
        untouched: Callable[[], bool] = lambda: True,
    ) -> None:
        """Pause between two tokens, load, reset the KV cache, continue.

        The server reads the folder itself, or takes part in the `broadcast` that this describes. After a failed load
        the old weights are served again, where they are `untouched`; else the server stays paused.
        """
        await pool.call(server, "/pause?mode=keep&clear_cache=true", {})
        try:
            await self._start(pool, server)
            await self._load_paused(pool, server, broadcast or {"folder": str(weights.folder)})
        except (Fault, ValueError) as error:
            if untouched():
                await pool.call(server, "/resume", {})
            raise error if isinstance(error, Fault) else Fault("status", str(error)) from error
        await pool.call(server, "/finish_weight_update", {"weight_version": str(weights.version)})
        await pool.call(server, "/resume", {})

    async def _load_paused(self, pool: ServerPool, server: Server, update_info: dict[str, Any]) -> None:
        await pool.call(server, "/update_weights", {"update_info": update_info})

    async def _start(self, pool: ServerPool, server: Server) -> None:
        try:
            await pool.call(server, "/start_weight_update", {})
        except Fault:  # a trainer died within an update; with our backend, none has been begun on the model
            await pool.call(server, "/finish_weight_update", {})
            await pool.call(server, "/start_weight_update", {})


class _Row(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _WholeRow(_Row, gc=False):
    top_logprobs: list[_Row]


_AnyRow = TypeVar("_AnyRow")


class _Rows(msgspec.Struct, Generic[_AnyRow]):
    content: list[_AnyRow]


class _Choice(msgspec.Struct, Generic[_AnyRow]):
    token_ids: list[int]
    logprobs: _Rows[_AnyRow]
    weight_versions: list[Span]
    finish_reason: str


class _Answer(msgspec.Struct, Generic[_AnyRow]):
    choices: list[_Choice[_AnyRow]]


# A row begins with the sampled token; the entries below it are read only where one does not.
_ANSWER, _WHOLE_ANSWER = (msgspec.json.Decoder(_Answer[row]) for row in (_Row, _WholeRow))
_TOKEN, _LOGPROB = attrgetter("token_id"), attrgetter("logprob")


def _sampled(row: _WholeRow, token: int) -> float:
    """The log-prob of the token that was sampled, which need not be the first or the likeliest of the row."""
    return [entry.logprob for entry in (row, *row.top_logprobs) if entry.token_id == token][0]


class VLLMEngine(RemoteEngine):
    """An `Engine` over vLLM servers that read new weights from a folder; arguments as `RemoteEngine` has them."""

    dialect = VLLMDialect


class AdapterDialect(VLLMDialect):
    """As vLLM's; whatever is asked for after the first sync is asked of the adapter."""

    def __init__(self) -> None:
        self._base = VLLMDialect()
        self._loaded = False

    def request(self, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> dict[str, Any]:
        body = super().request(token_ids, sampling, **more)
        return body | {"model": ADAPTER} if self._loaded else body

    async def check(self, pool: ServerPool, server: Server, vocab_size: int) -> None:
        """Of the base: a server that was started anew has no adapter yet."""
        await self._base.check(pool, server, vocab_size)

    async def _load_paused(self, pool: ServerPool, server: Server, update_info: dict[str, Any]) -> None:
        """A load that fails leaves the adapter before it."""
        body = {"lora_name": ADAPTER, "lora_path": update_info["folder"], "load_inplace": True}
        try:
            await pool.call(server, LOAD_ADAPTER, body)
        except Fault as fault:
            if fault.reason != "malformed":  # it answers in words
                raise
        self._loaded = True

    def weights_replaced(self) -> None:
        self._loaded = True

    def lost(self, error: ValueError) -> str | None:
        """It names an adapter that the server does not have."""
        return "has lost the adapter: it was restarted" if f"`{ADAPTER}` does not exist" in str(error) else None


class AdapterEngine(RemoteEngine):
    """An `Engine` over vLLM servers that get a LoRA adapter alone; arguments as `RemoteEngine` has them.

    The base is the checkpoint that a server was started with, and stays; what comes with every sync is some thousandth
    of it. vLLM computes the adapter beside the base, as the trainer does.

    `load_weights` takes PEFT's names and factors, alpha / rank multiplied in.
    """

    dialect = AdapterDialect

    async def _write(self, stream: NamedTensors, folder: Path) -> None:
        folder.mkdir(parents=True)
        write_peft(dict(stream), folder)
