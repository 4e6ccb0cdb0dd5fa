"""Who ends a request that waits: its server, or whoever asked."""

from __future__ import annotations

import asyncio

import pytest

from nemo_flashrl.engines.server_pool import Fault, Server, ServerPool, say


async def adopt(server: Server) -> None:
    raise NotImplementedError


def pool_of_one() -> tuple[ServerPool, Server]:
    pool = ServerPool(
        ["http://127.0.0.1:9"], timeout=1.0, health_path="/health", health_seconds=60.0, adopt=adopt, tell=say
    )
    pool.servers[0].up = True
    return pool, pool.servers[0]


@pytest.mark.parametrize("also_cancelled", [False, True])
def test_a_server_that_goes_down_is_a_fault_and_a_cancellation_stays_one(also_cancelled: bool, capfd) -> None:
    async def story() -> None:
        pool, server = pool_of_one()
        left: list[int] = []

        async def ask() -> None:
            try:
                await pool.watched(server, asyncio.sleep(60.0))
            finally:
                left.append(asyncio.current_task().cancelling())

        asking = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.sleep(0)
        assert server.in_flight == 3
        pool.drop(server)
        if also_cancelled:
            asking[0].cancel()
        ended = await asyncio.gather(*asking, return_exceptions=True)
        faults = ended[1:] if also_cancelled else ended
        assert all(isinstance(end, Fault) and end.reason == "dead" for end in faults)
        assert asking[0].cancelled() == also_cancelled
        assert sorted(left) == [0, 0, int(also_cancelled)]  # a time-out around the request counts cancellations
        assert (server.in_flight, server.abandon) == (0, set())
        await pool.close()

    asyncio.run(story())
    assert "is down, removed from the pool" in capfd.readouterr().err


def test_a_request_that_is_answered_leaves_nothing_behind() -> None:
    async def story() -> None:
        pool, server = pool_of_one()
        assert await pool.watched(server, asyncio.sleep(0, "answer")) == "answer"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await pool.watched(server, asyncio.sleep(60.0))
        assert (server.in_flight, server.abandon, asyncio.current_task().cancelling()) == (0, set(), 0)
        await pool.close()

    asyncio.run(story())
