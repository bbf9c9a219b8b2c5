"""Maps of chunks: limits on the number of streams."""

from __future__ import annotations

import asyncio
import json

from pensieve_jax.core.errors import EngineClosedError, UnknownTurnError
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.cache_view import ROUTES as STATE_ROUTES
from pensieve_jax.server.http.settings import ServerSettings
from tests.deadlines import TIMEOUT_S
from tests.server.fakes import FakeEngine, Harness, ask

PATH = "/v1/pensieve/chunks?stream=true"
MAX_MAPS = 8


def harness_of(**settings: float) -> Harness:
    engine = FakeEngine()
    engine.answers["chunk_map"] = {"chunks": []}
    return Harness(ROUTES, engine, ServerSettings(budgets={"maps": MAX_MAPS}, **settings))


def test_an_owner_may_watch_a_few_maps_at_a_time() -> None:
    async def work() -> None:
        harness = harness_of()
        watching = [harness.open("GET", PATH) for _ in range(MAX_MAPS)]
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
        assert harness.services.ledger.held("maps") == 0

    asyncio.run(work())


def test_an_engine_without_a_map_gives_an_error_status_before_any_byte() -> None:
    class Starting(FakeEngine):
        async def call(self, name: str, *arguments: object) -> object:
            raise EngineClosedError("The engine accepts no calls: it is starting.")

    async def work() -> None:
        harness = Harness(ROUTES, Starting())
        for _ in range(MAX_MAPS + 1):
            status, _, body = await harness.open("GET", PATH).whole()
            assert status == 503 and "starting" in json.loads(body)["error"]["message"]
        assert harness.services.ledger.held("maps") == 0

    asyncio.run(work())


def test_the_servers_timeouts_apply_to_maps() -> None:
    async def work() -> None:
        harness = harness_of(heartbeat_s=0.5)  # the map comes before, however busy the machine
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
        async with asyncio.timeout(TIMEOUT_S):
            await work()

    asyncio.run(limited())


CHUNK = {"start": 0, "end": 32, "tier": "cpu", "place": "in host memory", "worth": 0.5, "is_shared": False}


def test_a_response_is_explained_chunk_by_chunk() -> None:
    harness = Harness(STATE_ROUTES)
    drop = {"at_s": harness.clock.now() - 2.5, "reason": "NO_SLOT", "why": "no room", "worth": 0.25}
    gone = {"start": 32, "end": 60, "tier": None, "place": None, "worth": None, "is_shared": False}
    harness.engine.answers["explain_turn"] = {
        "conversation_id": "0" * 32,
        "num_tokens": 61,
        "policy": "retention",
        "idle_s": 3.0,
        "chunks": [CHUNK | {"drop": None}, gone | {"drop": drop}],
        "lines": ["one", "two"],
    }
    for prefix in ("resp_", "chatcmpl-", "cmpl-"):
        response_id = prefix + "0" * 32
        assert ask(harness, "GET", f"/v1/pensieve/explain?response_id={response_id}") == (
            200,
            {
                "response_id": response_id,
                "num_tokens": 61,
                "policy": "retention",
                "idle_s": 3.0,
                "chunks": [CHUNK | {"drop": None}, gone | {"drop": drop | {"ago_s": 2.5}}],
                "text": ["one", "two"],
            },
        )
        assert harness.engine.calls[-1] == ("explain_turn", ("", "0" * 32))


def test_a_response_that_cannot_be_explained_is_an_error() -> None:
    class Missing(FakeEngine):
        async def call(self, name: str, *arguments: object) -> object:
            raise UnknownTurnError(str(arguments[1]))

    harness = Harness(STATE_ROUTES, Missing())
    for query in ("", "?response_id="):
        status, body = ask(harness, "GET", f"/v1/pensieve/explain{query}")
        error = body["error"]
        expected = (400, "missing_required_parameter", "response_id")
        assert (status, error["code"], error["param"]) == expected
    for name in ("resp_" + "0" * 32, "nothing", "%00"):
        status, body = ask(harness, "GET", f"/v1/pensieve/explain?response_id={name}")
        assert (status, body["error"]["code"]) == (404, "not_found")
