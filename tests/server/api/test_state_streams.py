"""Maps of chunks that are watched: how many there may be, and that the server's times hold for them."""

from __future__ import annotations

import asyncio
import json

from pensieve_jax.core.errors import EngineClosedError
from pensieve_jax.server.api.routes import ROUTES
from pensieve_jax.server.api.state import MAX_STREAMS
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import FakeEngine, Harness

PATH = "/v1/pensieve/chunks?stream=true"


def harness_of(**settings: float) -> Harness:
    engine = FakeEngine()
    engine.answers["chunk_map"] = {"chunks": []}
    return Harness(ROUTES, engine, ServerSettings(**settings))


def test_an_owner_may_watch_a_few_maps_at_a_time() -> None:
    async def work() -> None:
        harness = harness_of()
        watching = [harness.open("GET", PATH) for _ in range(MAX_STREAMS)]
        for one in watching:
            assert (await one.next())["status"] == 200
        status, headers, body = await harness.open("GET", PATH).whole()
        assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["retry-after"]) > 0
        assert (await harness.open("GET", "/v1/pensieve/chunks").whole())[0] == 200
        watching[0].leave()
        await watching[0].task
        watching[0] = harness.open("GET", PATH)
        assert (await watching[0].next())["status"] == 200
        for one in watching:
            one.leave()
            await one.task
        assert not harness.services.map_streams

    asyncio.run(work())


def test_an_engine_that_tells_no_map_is_a_status_before_any_byte() -> None:
    class Starting(FakeEngine):
        async def call(self, name: str, *arguments: object) -> object:
            raise EngineClosedError("The engine takes no calls: it is starting.")

    async def work() -> None:
        harness = Harness(ROUTES, Starting())
        for _ in range(MAX_STREAMS + 1):
            status, _, body = await harness.open("GET", PATH).whole()
            assert status == 503 and "starting" in json.loads(body)["error"]["message"]
        assert not harness.services.map_streams

    asyncio.run(work())


def test_the_times_of_the_server_hold_for_maps() -> None:
    async def work() -> None:
        harness = harness_of(heartbeat_s=0.01)
        watching = harness.open("GET", PATH)
        assert (await watching.next())["status"] == 200
        assert (await watching.next())["body"].startswith(b"data: ")
        assert (await watching.next())["body"].startswith(b":")
        watching.leave()
        await watching.task
        stalled = harness_of(heartbeat_s=0.01, stall_timeout_s=0.01).open("GET", PATH)
        assert (await stalled.next())["status"] == 200
        stalled.takes.clear()
        await stalled.task

    async def limited() -> None:
        async with asyncio.timeout(5):
            await work()

    asyncio.run(limited())
