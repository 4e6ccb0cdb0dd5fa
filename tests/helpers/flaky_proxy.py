"""A server between the engine and a real one: every so often it takes a request and hangs up.

`python flaky_proxy.py PORT TARGET EVERY`: of the requests for a generation each EVERY-th has its connection cut; made
again, it goes through.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

GENERATE = "/inference/v1/generate"


def app(target: str, every: int) -> web.Application:
    known: set[bytes] = set()
    application = web.Application(client_max_size=2**26)

    async def session(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as app["session"]:
            yield

    async def forward(request: web.Request) -> web.Response:
        if request.path == "/behave":
            return web.json_response({})
        url, body = target + request.path_qs, await request.read()
        if request.path == GENERATE and body not in known:
            known.add(body)
            if len(known) % every == 0:
                request.transport.abort()
                return web.Response()
        headers = {"Content-Type": "application/json"}
        async with application["session"].request(request.method, url, data=body, headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read())

    application.cleanup_ctx.append(session)
    application.router.add_route("*", "/{path:.*}", forward)
    return application


if __name__ == "__main__":
    port, target, every = sys.argv[1:]
    web.run_app(app(target, int(every)), host="127.0.0.1", port=int(port), print=None)
