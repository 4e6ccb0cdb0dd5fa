"""The embedded engine: a transformers causal LM in this process, sampled in waves with a KV cache.

    generate ---> waiting --(no new request for some rounds of the event loop)--> wave: prefill, then token by token
                                                                                     |  a row that ends leaves
    load_weights ---> staged, checked --(between two tokens)--> model, version       +--> its caller goes on

Requests that come while a wave runs form the next one. A wave whose weights were replaced begins anew with what it has
sampled so far as its prompt: later tokens are of the new weights, and no key or value outlives those that made it.

Legend: R = rows (requests) still in the wave, K = columns (padded prompt + tokens sampled so far), V = vocabulary.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from nemo_flashrl.engines.base import completes_stop
from nemo_flashrl.records import Generation, Sampling
from nemo_flashrl.weight_sync.hf_config import context_limit, read_config
from nemo_flashrl.weight_sync.probe import NamedTensors

# A caller needs a few rounds of the event loop to get from one answer to its next request (through timeouts and
# the collector's refilling). Waiting for this many without an arrival joins them all in one wave, at a few
# microseconds a round, and makes the waves the same in every run.
_QUIET_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """How the model is held."""

    dtype: str = "float32"  # of weights and activations; log-probs are float32 whatever it is
    device: str = "cpu"


@dataclass(slots=True, eq=False)
class _Request:
    token_ids: list[int]
    sampling: Sampling
    draws: torch.Tensor  # float64 [max_tokens], one uniform number a token
    answer: asyncio.Future
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class TransformersEngine:
    """An `Engine` over a Hugging Face folder; for one event loop at a time.

    Temperature 0 takes the most likely token and reports its log-prob at temperature 1. A request's tokens depend on
    its own `Sampling.seed` only: each is the inverse of the cumulative distribution at a uniform number drawn from
    that seed, so they are the same whoever shares the wave (up to a tie within the rounding of the logits).
    """

    Settings = Settings

    def __init__(self, folder: str | Path, settings: Settings = Settings(), *, version: int = 0) -> None:
        """Load config and weights from `folder`; they are served as `version`."""
        self.version = version
        self.faults: Counter[str] = Counter()  # stays empty: what fails here is not tried again
        config = read_config(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=AutoConfig.for_model(**config),  # transformers 4 would pass over rope_parameters
            dtype=getattr(torch, settings.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        )
        self._model: PreTrainedModel = model.to(settings.device).eval().requires_grad_(False)
        self._context: int | None = context_limit(config)
        self._waiting: list[_Request] = []
        self._loads = 0
        self._server: asyncio.Task | None = None
        self._closed = False

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Continue `token_ids` by at most `sampling.max_tokens` tokens.

        Raises:
            ValueError: no token to continue, one outside the vocabulary, or more than the model's positions.
            RuntimeError: the engine was closed.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        self._check(token_ids, sampling)
        generator = torch.Generator().manual_seed(sampling.seed)
        draws = torch.rand(sampling.max_tokens, generator=generator, dtype=torch.float64)
        request = _Request(list(token_ids), sampling, draws, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve())
        return await request.answer

    async def load_weights(self, stream: NamedTensors, version: int) -> None:
        """Replace all weights and serve them as `version`, in the middle of requests in flight if there are any.

        The stream is first copied beside the model, a second set of weights for the time of the call, so that an
        error in the middle of it leaves the old weights serving. With tied embeddings `lm_head.weight` may be absent.

        Raises:
            ValueError: an unknown, duplicate or missing tensor, or another shape.
        """
        staged = self._stage(stream)
        if self._closed:
            raise RuntimeError("the engine is closed")
        parameters = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in staged.items():
                parameters[name].copy_(tensor)
        self.version = version
        self._loads += 1

    async def close(self) -> None:
        """Let go of the model; requests in flight fail with RuntimeError."""
        self._closed = True
        if self._server is not None and not self._server.done():
            self._server.cancel()
            await asyncio.gather(self._server, return_exceptions=True)
        _fail(self._waiting, RuntimeError("the engine was closed"))
        self._waiting = []
        self._model = None

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        vocabulary = self._model.config.vocab_size
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= vocabulary:
            raise ValueError(
                f"a prompt needs at least one token, each in 0..{vocabulary - 1}, not {list(token_ids)[:20]}"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0:
            raise ValueError(
                f"max_tokens={sampling.max_tokens} must be at least 1, temperature={sampling.temperature} at least 0"
            )
        if self._context is not None and len(token_ids) + sampling.max_tokens > self._context:
            raise ValueError(
                f"{len(token_ids)} tokens and max_tokens={sampling.max_tokens} exceed the model's "
                f"max_position_embeddings={self._context}"
            )

    def _stage(self, stream: NamedTensors) -> dict[str, torch.Tensor]:
        """Copies of the stream's tensors by name, complete and of the model's shapes and types."""
        parameters = self._model.state_dict()
        optional = {"lm_head.weight"} if self._model.config.tie_word_embeddings else set()
        staged: dict[str, torch.Tensor] = {}
        for name, tensor in stream:
            if name not in parameters:
                raise ValueError(f"weights: the model has no tensor named {name}")
            if name in staged:
                raise ValueError(f"weights: duplicate tensor {name}")
            own = parameters[name]
            if tensor.shape != own.shape:
                raise ValueError(f"weights: {name} has shape {tuple(tensor.shape)}, the model's is {tuple(own.shape)}")
            staged[name] = tensor.detach().to(device=own.device, dtype=own.dtype, copy=True)
        if missing := [name for name in parameters if name not in staged and name not in optional]:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise ValueError(f"weights: missing tensor {missing[0]}{more}")
        if optional & staged.keys() and not torch.equal(staged["lm_head.weight"], staged["model.embed_tokens.weight"]):
            raise ValueError(
                "weights: the embeddings are tied, but lm_head.weight differs from model.embed_tokens.weight"
            )
        return staged

    async def _serve(self) -> None:
        """Run waves until nobody waits."""
        while self._waiting:
            await self._settle()
            requests, self._waiting = [r for r in self._waiting if not r.answer.done()], []
            try:
                await self._run_wave(requests)
            except Exception as error:  # whatever the model raises belongs to those who wait for it
                _fail(requests, error)
            except asyncio.CancelledError:
                _fail(requests, RuntimeError("the engine was closed"))
                raise

    async def _settle(self) -> None:
        """Return when no request has come for some rounds of the event loop."""
        quiet, seen = 0, len(self._waiting)
        while quiet < _QUIET_ROUNDS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)

    async def _run_wave(self, requests: list[_Request]) -> None:
        if not requests:
            return
        wave, loads = _Wave(self._model, requests), self._loads
        while wave.requests:
            if loads != self._loads:
                wave, loads = _Wave(self._model, wave.requests), self._loads
            for request, reason in wave.step(self.version):
                if not request.answer.done():
                    answer = tuple(request.sampled), tuple(request.logprobs), tuple(request.versions)
                    request.answer.set_result(Generation(*answer, reason))
            await asyncio.sleep(0)  # tools and timeouts run between two tokens


class _Wave:
    """A left-padded batch of requests and its KV cache. `requests` are those that have not ended: rows of the batch."""

    def __init__(self, model: PreTrainedModel, requests: list[_Request]) -> None:
        self.requests = list(requests)
        self._model = model
        self._device = model.device
        self._cache = DynamicCache(config=model.config)
        rows = [r.token_ids + r.sampled for r in requests]
        width = max(map(len, rows))
        padding = [width - len(row) for row in rows]
        self._inputs = self._to_device([[0] * n + row for n, row in zip(padding, rows, strict=True)])
        self._padding = self._to_device(padding)[:, None]  # [R, 1], columns before a row's first token
        self._columns = width  # K
        self._temperatures = self._to_device([r.sampling.temperature for r in requests], torch.float32)[:, None]

    @torch.inference_mode()
    def step(self, version: int) -> list[tuple[_Request, str]]:
        """Sample one token for each row; returns the requests that ended with it, and their finish reasons."""
        logits = self._forward()  # float32 [R, V]
        greedy = self._temperatures == 0
        logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, self._temperatures), dim=-1)
        uniform = torch.stack([r.draws[len(r.sampled)] for r in self.requests]).to(self._device)
        tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), _inverse_cdf(logprobs, uniform[:, None]))
        chosen = logprobs.gather(-1, tokens)
        ended, staying = [], []
        for row, (request, token, logprob) in enumerate(
            zip(self.requests, tokens[:, 0].tolist(), chosen[:, 0].tolist(), strict=True)
        ):
            if not math.isfinite(logprob):
                raise FloatingPointError("the model's logits are not finite: its weights are broken")
            request.sampled.append(token)
            request.logprobs.append(logprob)
            request.versions.append(version)
            if token in request.sampling.stop_token_ids or completes_stop(request.sampling, request.sampled):
                ended.append((request, "stop"))
            elif len(request.sampled) == request.sampling.max_tokens:
                ended.append((request, "length"))
            elif not request.answer.done():  # a caller that was cancelled leaves too
                staying.append(row)
        self._advance(tokens, staying)
        return ended

    def _forward(self) -> torch.Tensor:
        """Logits of each row's next token, float32 [R, V]; the cache grows by the inputs' columns."""
        columns = torch.arange(self._columns, device=self._device)
        queries = columns[self._columns - self._inputs.shape[1] :]
        seen = columns[None, None, :] >= self._padding[:, :, None]  # [R, 1, K], not padding
        mask = seen & (columns[None, None, :] <= queries[None, :, None])
        # A padding query would see nothing, and a softmax over nothing is NaN in some kernels: let it see itself.
        mask |= columns[None, None, :] == queries[None, :, None]
        output = self._model(
            input_ids=self._inputs,
            # Four dimensions are used as they are; transformers would take longer to make its own than to run a
            # small model.
            attention_mask=mask[:, None],
            position_ids=(queries[None, :] - self._padding).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _advance(self, tokens: torch.Tensor, staying: list[int]) -> None:
        """Make `tokens` [R, 1] the next inputs, and let the rows that ended go."""
        self._columns += 1
        if len(staying) == len(self.requests):
            self._inputs = tokens
            return
        self.requests = [self.requests[row] for row in staying]
        if staying:
            rows = self._to_device(staying)
            self._inputs, self._padding = tokens[rows], self._padding[rows]
            self._temperatures = self._temperatures[rows]
            self._cache.batch_select_indices(rows)

    def _to_device(self, values: list, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def _inverse_cdf(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution passes `uniform` in [0, 1): float32 [R, V], [R, 1] -> [R, 1]."""
    cumulative = logprobs.double().exp().cumsum(-1)
    # Scaled by the total, which rounding leaves near 1, so that no draw falls beyond the last token.
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp(max=logprobs.shape[-1] - 1)


def _fail(requests: list[_Request], error: Exception) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)
