"""What requests are charged, where they would be refused, and that all of it is released."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing

import pytest

from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.ledger import RESOURCES
from pensieve_jax.server.http.replies import BytesResponse
from pensieve_jax.server.http.request import ClientGoneError
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import FakeEngine, Harness, say
from tests.server.stored_server import StoredServer

MESSAGES = [{"role": "user", "content": "Hello"}]
LONG = "a" * 30_000
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
STREAMED = {"messages": MESSAGES, "stream": True}
CASES = [
    ("streams", CHAT, STREAMED),
    ("streams", COMPLETION, {"prompt": "a", "stream": True}),
    ("streams", "/v1/messages", {**STREAMED, "max_tokens": 5}),
    ("answer_bytes", CHAT, {"messages": MESSAGES}),
    ("body_bytes", CHAT, {"messages": MESSAGES}),
    ("jobs", "/tokenize", {"prompt": LONG}),
    ("encoded_characters", "/tokenize", {"prompt": LONG}),
]
STORED = [
    ("streams", "/v1/responses", {"input": "a", "stream": True}),
    ("written_rows", "/v1/responses", {"input": "a"}),
    ("written_rows", "/v1/conversations", {"items": [{"role": "user", "content": "a"}] * 3}),
]


def check(status: int, headers: dict[str, str], raw: bytes, resource: str) -> None:
    error = json.loads(raw)["error"]
    code = error.get("code") or error["details"]["error_code"]
    if resource == "streams" or resource == "jobs":
        assert (status, code, headers["retry-after"]) == (429, "rate_limit_exceeded", "1"), raw
    else:
        assert (status, code) == (413, "request_too_large"), raw


@pytest.mark.parametrize(("resource", "path", "body"), CASES)
def test_a_request_beyond_a_budget_is_refused_before_its_turn_and_holds_nothing(resource, path, body):
    async def scenario() -> None:
        engine = FakeEngine()
        harness = Harness(ROUTES, engine, ServerSettings(budgets={resource: 1}))
        ledger = harness.services.ledger
        with ledger.ticket("") as other:
            other.charge(resource, 1)
            check(*await harness.open("POST", path, body).whole(), resource)
        assert all(ledger.held(name) == 0 for name in RESOURCES)
        if resource != "answer_bytes":
            assert not engine.turns

    asyncio.run(scenario())


@pytest.mark.parametrize(("resource", "path", "body"), STORED)
def test_a_stored_request_beyond_a_budget_is_refused_and_holds_nothing(tmp_path, resource, path, body):
    async def scenario() -> None:
        settings = ServerSettings(budgets={resource: 1})
        with closing(StoredServer(tmp_path / "history", say("ok"), settings=settings)) as server:
            ledger = server.harness.services.ledger
            with ledger.ticket("") as other:
                other.charge(resource, 1)
                check(*await server.harness.open("POST", path, body).whole(), resource)
            assert all(ledger.held(name) == 0 for name in RESOURCES)

    asyncio.run(scenario())


def test_a_long_body_is_charged_before_it_is_decoded():
    class Texts:
        min_characters = 1000

        def decode_body(self, body, kind, offers):
            raise AssertionError("decoded before it was charged")

    async def scenario() -> None:
        settings = ServerSettings(budgets={"json_values": 300})
        harness = Harness(ROUTES, FakeEngine(), settings, texts=Texts())
        body = {"prompt": "a", "zz": [[]] * 1000}
        check(*await harness.open("POST", COMPLETION, body).whole(), "json_values")
        assert all(harness.services.ledger.held(name) == 0 for name in RESOURCES)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_long_answer_is_held_until_its_client_has_read_it(is_watched):
    """It used to stay in the connection's buffer when its request was over, and counted for nothing."""

    async def scenario() -> None:
        sent: list[bytes] = []
        takes, left = asyncio.Event(), []

        async def send(message) -> None:
            await takes.wait()
            sent.append(message.get("body", b""))

        async def receive():
            await asyncio.Event().wait()

        body = b"x" * 300_000
        reply = BytesResponse(
            body, "text/plain", undelivered=(lambda: left.append(1)) if is_watched else None
        )
        sending = asyncio.ensure_future(reply.send(receive, send, 5.0))
        await asyncio.sleep(0)
        assert not sending.done()
        takes.set()
        await sending
        assert b"".join(sent) == body and max(map(len, sent)) <= 2**16 and not left

    asyncio.run(scenario())


def test_a_client_that_reads_nothing_of_a_long_answer_is_disconnected():
    async def scenario() -> None:
        async def send(message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async def receive():
            await asyncio.Event().wait()

        with pytest.raises(ClientGoneError):
            await BytesResponse(b"x" * 300_000, "text/plain").send(receive, send, 0.01)

    asyncio.run(scenario())


FAR = "a" * 200_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": FAR}),
        ("/tokenize", {"messages": [{"role": "user", "content": FAR}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": FAR}]}),
        ("/v1/responses/input_tokens", {"input": FAR}),
    ],
)
def test_counting_tokens_reads_no_more_text_than_a_turn_could_have(tmp_path, path, body):
    async def scenario() -> tuple[int, bytes]:
        with closing(StoredServer(tmp_path / "history", say("ok"))) as server:
            limit = server.harness.services.engine.info.limits.max_context_tokens
            assert limit < len(FAR) // 20
            status, _, raw = await server.harness.open("POST", path, body).whole()
            return status, raw

    status, raw = asyncio.run(scenario())
    assert status == 400 and b"far more than" in raw, raw


def test_more_ids_than_a_context_has_are_not_decoded():
    async def scenario() -> None:
        harness = Harness(ROUTES)
        most = harness.services.engine.info.limits.max_context_tokens
        for count, expected in ((most, 200), (most + 1, 400)):
            status, _, raw = await harness.open("POST", "/detokenize", {"tokens": [97] * count}).whole()
            assert status == expected
        assert json.loads(raw)["error"]["param"] == "tokens" and f"at most {most}" in raw.decode()

    asyncio.run(scenario())
