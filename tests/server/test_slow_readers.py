"""What a stream holds for a client that does not read is charged, and too much ends that stream alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.async_engine import num_entries
from pensieve_jax.server.engine_process.unread import MAX_ENTRIES, UnreadOutput
from pensieve_jax.server.http.ledger import RESOURCES
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import MODEL, FakeEngine, Harness, Open
from tests.server.stored_server import StoredServer

MEGABYTE = 2**20
MESSAGES = [{"role": "user", "content": "Hello"}]
STREAMS = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 8}),
    "text": ("/v1/completions", {"prompt": "Hello", "logprobs": 8, "max_tokens": 4000}),
    "response": (
        "/v1/responses",
        {"input": "Hello", "include": ["message.output_text.logprobs"], "top_logprobs": 8},
    ),
}


@contextmanager
def serving(tmp_path, num_bytes: int) -> Iterator[Harness]:
    settings = ServerSettings(heartbeat_s=0.02, budgets={"answer_bytes": num_bytes})
    server = StoredServer(tmp_path / "history.sqlite", settings=settings)
    server.engine.script = None
    yield server.harness
    server.close()


async def stalled(harness: Harness, path: str, fields: dict) -> Open:
    """Begin a stream whose client reads nothing but the first event."""
    asked = harness.open("POST", path, {"model": MODEL, "stream": True, **fields})
    await harness.engine.submitted.wait()
    harness.engine.submitted.clear()
    await asked.next()
    await asked.next()
    asked.takes.clear()
    return asked


async def until(condition) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("path, fields", STREAMS.values(), ids=STREAMS)
def test_what_a_client_does_not_read_is_charged_and_ends_its_stream_beyond_the_budget(tmp_path, path, fields):
    async def scenario(harness: Harness) -> bytes:
        ledger = harness.services.ledger
        asked = await stalled(harness, path, fields)
        (turn,) = harness.engine.turns
        turn.feed("a")  # what the stream waits to write
        await asyncio.sleep(0)
        turn.feed("b" * 600)
        await until(lambda: ledger.held("answer_bytes"))
        assert not turn.cancelled and ledger.held("answer_bytes") < MEGABYTE
        turn.feed("c" * 3000)
        await until(lambda: turn.cancelled)
        asked.takes.set()
        await asked.task
        raw = b""
        while b"answers that clients have not read" not in raw:
            raw += (await asked.next())["body"]
        assert all(ledger.held(name) == 0 for name in RESOURCES)
        return raw

    with serving(tmp_path, MEGABYTE) as harness:
        raw = asyncio.run(scenario(harness))
    events = [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: {")]
    errors = [one for one in map(json.loads, events) if one.get("type") == "error" or "error" in one]
    error = errors[0].get("error") or errors[0]
    assert error["code"] in ("request_too_large", "rate_limit_exceeded"), errors
    assert "bytes of answers that clients have not read" in error["message"]


def test_another_stream_goes_on(tmp_path):
    async def scenario(harness: Harness) -> tuple[bytes, bool]:
        path, fields = STREAMS["chat"]
        slow = await stalled(harness, path, fields)
        other = harness.open("POST", path, {"model": MODEL, "stream": True, **fields})
        await harness.engine.submitted.wait()
        first, second = harness.engine.turns
        first.feed("a")
        await asyncio.sleep(0)
        first.feed("b" * 4000)
        await until(lambda: first.cancelled)
        for _ in range(20):
            second.feed("x" * 30)
            await asyncio.sleep(0)
        second.feed("", (257,))
        second.finish()
        _, _, raw = await other.whole()
        slow.leave()
        slow.takes.set()
        await slow.task
        return raw, second.cancelled

    with serving(tmp_path, MEGABYTE) as harness:
        raw, is_cancelled = asyncio.run(scenario(harness))
    assert not is_cancelled and b'"finish_reason":"stop"' in raw and raw.endswith(b"data: [DONE]\n\n")


def test_a_client_that_reads_is_charged_nothing():
    harness = Harness(ROUTES, FakeEngine(), ServerSettings(heartbeat_s=0.02, budgets={"answer_bytes": 1}))
    path, fields = STREAMS["chat"]

    async def scenario() -> bytes:
        _, _, raw = await harness.open("POST", path, {"model": MODEL, "stream": True, **fields}).whole()
        return raw

    assert b'"finish_reason":"stop"' in asyncio.run(scenario())


def test_many_unread_logprobs_are_read_in_several_deltas():
    """One delta of them all would be encoded at once, while every other stream waits."""

    unread = UnreadOutput(has_logprobs=True)
    top = dict.fromkeys(range(20), -1.0)
    for index in range(1000):
        unread.add(str(index % 10), index, [TokenLogprob(index, -1.0, top)])
    assert unread.num_entries == 21_000
    deltas = []
    while unread:
        deltas.append(unread.take())
    assert unread.num_entries == 0 and len(deltas) > 3
    assert all(num_entries(delta.logprobs) <= MAX_ENTRIES + 21 for delta in deltas)
    assert [token for delta in deltas for token in delta.token_ids] == list(range(1000))
    assert all(len(delta.text) == len(delta.token_ids) == len(delta.logprobs) for delta in deltas)
