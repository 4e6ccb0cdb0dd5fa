"""A rollout server in a process of its own that misbehaves on command; speaks vLLM's routes and SGLang's.

Its "model" is one distribution over V tokens, whatever the prompt: the logits are the tensor `w` of the weights it was
given. `POST /behave` sets how it acts; `GET /counts` tells how often each route was called.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.numpy import load_file

V = 32
START = np.linspace(0.0, 2.0, V, dtype=np.float32)  # logits before any weights came


class Server:
    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        self.logits, self.version, self.pending = START, "default", None
        self.paused = asyncio.Event()
        self.paused.set()  # set: runs
        self.counts: Counter[str] = Counter()
        self.act: dict[str, Any] = {}

    async def behave(self, request: web.Request) -> web.Response:
        self.act = await request.json()
        if self.act.get("begin_anew"):
            self.begin_anew()
        return web.json_response({})

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.act.get("context", 4096)}]})

    async def tell(self, request: web.Request) -> web.Response:
        return web.json_response(self.counts)

    @web.middleware
    async def count(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.counts[request.path] += 1
        if self.act.get("fail_always") == request.path:
            raise web.HTTPInternalServerError
        if self.act.get("fail") == request.path:
            self.act.pop("fail")
            return web.json_response({"error": "told to"}, status=500)
        return await handler(request)

    def logprobs(self, temperature: float) -> np.ndarray:
        logits = self.logits / (1.0 if self.act.get("raw") else temperature)
        if keep := self.act.get("top_k"):
            logits = np.where(logits >= np.sort(logits)[-keep], logits, -np.inf)
        return logits - math.log(np.exp(logits).sum())

    async def sample(self, sampling: dict[str, Any], count: int) -> tuple[list[int], np.ndarray, list[dict]]:
        """Tokens, the log-probs of all, spans of versions; half before and half after whatever pauses it."""
        rng = np.random.default_rng(sampling.get("seed", sampling.get("sampling_seed")))
        await asyncio.sleep(self.act.get("seconds", 0))
        await self.paused.wait()
        table = self.logprobs(sampling["temperature"])
        tokens = rng.choice(V, count, p=np.exp(table) / np.exp(table).sum()).tolist()
        return tokens, table, [{"version": self.version, "start": 0, "end": count}]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        tokens, table, spans = await self.sample(sampling, sampling["max_tokens"])
        if answer := self.nonsense():
            return answer
        rows = [{"token_id": t, "logprob": max(float(table[t]), -9999.0), "top_logprobs": []} for t in tokens]
        best = np.argsort(-table, kind="stable")[: sampling["logprobs"]].tolist()
        for row in rows:
            others = [{"token_id": t, "logprob": max(float(table[t]), -9999.0)} for t in best if t != row["token_id"]]
            row["top_logprobs"] = [{"token_id": row["token_id"], "logprob": row["logprob"]}, *others]
        if self.act.get("nan"):
            rows[0]["logprob"] = rows[0]["top_logprobs"][0]["logprob"] = -9999.0  # what vLLM writes for NaN
        if self.act.get("other_first"):  # the row's own entry is the likeliest token, the sampled one stands below
            for row in rows:
                row["token_id"], row["logprob"] = best[0] if best else V - 1, -0.1
        if self.act.get("token"):
            tokens[0] = rows[0]["token_id"] = rows[0]["top_logprobs"][0]["token_id"] = V
        if self.act.get("other_token"):  # one that no row is about
            tokens[0] = (tokens[0] + 1) % V
        if self.act.get("drop_row"):
            rows = rows[:-1]
        choice = {"token_ids": tokens, "logprobs": {"content": rows}, "finish_reason": "length"}
        prompt = [None] + [{str(t): {"logprob": float(self.whole()[t])}} for t in body["token_ids"][1:]]
        return web.json_response({"choices": [choice | {"weight_versions": spans}], "prompt_logprobs": prompt})

    def whole(self) -> np.ndarray:
        return self.logits - math.log(np.exp(self.logits).sum()) + self.act.get("off", 0.0)

    def nonsense(self) -> web.Response | None:
        kind = self.act.get("nonsense")
        if kind == "status":
            return web.Response(status=500, text="CUDA error")
        if kind == "malformed":
            return web.Response(text='{"choices": [{"token_ids": [1, 2')
        if kind == "shape":
            return web.json_response({"choices": []})
        return None

    async def pause(self, request: web.Request) -> web.Response:
        self.paused.clear()
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        self.paused.set()
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.act.get("update_seconds", 0))
        self.pending = load_folder(Path((await request.json())["update_info"]["folder"]))
        return web.json_response({})

    async def finish(self, request: web.Request) -> web.Response:
        self.logits, self.version = self.pending, (await request.json())["weight_version"]
        return web.json_response({})

    async def initialise(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def fine(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def generate_sglang(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens, table, spans = await self.sample(body["sampling_params"], body["sampling_params"]["max_new_tokens"])
        best = np.argsort(-table, kind="stable")[: body.get("top_logprobs_num", 0)].tolist()
        meta = {
            "finish_reason": {"type": "length", "length": len(tokens)},
            "weight_version": self.version,
            "weight_versions": spans,
            "output_token_logprobs": [[float(table[t]), t, None] for t in tokens],
            "output_top_logprobs": [[[float(table[t]), t, None] for t in best] for _ in tokens],
        }
        if "logprob_start_len" in body:
            ids = body["input_ids"]
            meta["input_token_logprobs"] = [[None, ids[0], None]] + [[float(self.whole()[t]), t, None] for t in ids[1:]]
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})

    async def update_sglang(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            self.logits, self.version = load_folder(Path(body["model_path"])), body["weight_version"]
        except (OSError, KeyError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": ""})


def load_folder(folder: Path) -> np.ndarray:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return load_file(folder / index["w"])["w"]


def app(server: Server) -> web.Application:
    application = web.Application(middlewares=[server.count])
    gets = {"/health": server.fine, "/is_paused": server.fine, "/weight_info": server.fine, "/counts": server.tell}
    gets["/v1/models"] = server.list_models
    posts = {
        "/behave": server.behave,
        "/inference/v1/generate": server.generate,
        "/init_weight_transfer_engine": server.initialise,
        "/pause": server.pause,
        "/start_weight_update": server.fine,
        "/update_weights": server.update,
        "/finish_weight_update": server.finish,
        "/resume": server.resume,
        "/generate": server.generate_sglang,
        "/pause_generation": server.pause,
        "/update_weights_from_disk": server.update_sglang,
        "/continue_generation": server.resume,
    }
    for path, handler in gets.items():
        application.router.add_get(path, handler)
    for path, handler in posts.items():
        application.router.add_post(path, handler)
    return application


if __name__ == "__main__":
    web.run_app(app(Server()), host="127.0.0.1", port=int(sys.argv[1]), print=None)
