"""Requests whose head is too long or too slow, and requests that only resemble them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from pensieve_jax.server.http import connections
from pensieve_jax.server.http.connections import MAX_HEAD_BYTES
from pensieve_jax.server.main import Listening
from pensieve_jax.server.sockets import bind
from tests.deadlines import TIMEOUT_S

START = b"POST /echo HTTP/1.1\r\nhost: here\r\n"


class App:
    """Application that answers with the length of the body, once the test allows it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.leaves = False  # simulates that the client leaves instead of getting an answer
        self.left = asyncio.Event()
        self.num_asked = 0
        self.connect: Callable[[], Awaitable[Client]]

    async def __call__(self, scope, receive, send) -> None:
        assert scope["type"] == "http"
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message["body"])
            more = message["more_body"]
        self.num_asked += 1
        self.asked.set()
        await self.may_answer.wait()
        if self.leaves:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            return
        body = b"%d" % num_bytes
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Client:
    """Client side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        return int(head.split()[1]), await self.reader.readexactly(int(length.split()[1]))

    async def is_closed(self) -> bool:
        return await self.reader.read() == b""


@asynccontextmanager
async def clients(num: int = 1) -> AsyncIterator[tuple[App, list[Client]]]:
    app, listening = App(), bind("127.0.0.1", 0)
    address = listening.getsockname()
    server = Listening(app, listening)
    async with asyncio.timeout(TIMEOUT_S):
        await server.begun()
        found: list[Client] = []

        async def connect() -> Client:
            found.append(Client(*await asyncio.open_connection(*address)))
            return found[-1]

        app.connect = connect
        for _ in range(num):
            await connect()
        try:
            yield app, found
        finally:
            for client in found:
                client.writer.close()
            await server.end()


def head_of(num_bytes: int, ends: bytes = b"\r\ncontent-length: 0\r\n\r\n") -> bytes:
    begin = START + b"x: "
    return begin + b"a" * (num_bytes - len(begin) - len(ends)) + ends


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"a" * MAX_HEAD_BYTES,
        START + b"x: " + b"a" * MAX_HEAD_BYTES,
        START + b"a" * MAX_HEAD_BYTES,
        START + b"a: b\r\n" * (MAX_HEAD_BYTES // 6),
        b"\r\n" * (MAX_HEAD_BYTES // 2 + 1),
    ],
    ids=["address", "value", "name", "fields", "empty lines"],
)
def test_an_endless_head_is_refused(endless: bytes) -> None:
    async def work() -> None:
        async with clients() as (_, (client,)):
            for at in range(0, len(endless), 10_000):
                await client.send(endless[at : at + 10_000])
            status, body = await client.answer()
            assert status == 431 and str(MAX_HEAD_BYTES) in json.loads(body)["error"]["message"]
            assert await client.is_closed()

    asyncio.run(work())


def test_the_limit_applies_to_each_head_and_to_nothing_else() -> None:
    async def work() -> None:
        async with clients(2) as (_, (client, other)):
            for _ in range(2):  # on one connection: each head has its own limit
                await client.send(head_of(MAX_HEAD_BYTES))
                assert await client.answer() == (200, b"0")
            body = b"b" * (3 * MAX_HEAD_BYTES)
            await client.send(START + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            assert await client.answer() == (200, b"%d" % len(body))
            await client.send(START + b"transfer-encoding: chunked\r\n\r\n")
            num_chunks = MAX_HEAD_BYTES // 5
            await client.send(b"1\r\nb\r\n" * num_chunks + b"0\r\n\r\n")
            assert await client.answer() == (200, b"%d" % num_chunks)
            await client.send(head_of(1000) * 100)  # pipelined requests, which wait for each other
            for _ in range(100):
                assert await client.answer() == (200, b"0")
            await other.send(head_of(MAX_HEAD_BYTES + 1))
            assert (await other.answer())[0] == 431

    asyncio.run(work())


@pytest.mark.parametrize("num_bytes", [MAX_HEAD_BYTES, 70_000, 140_000])
@pytest.mark.parametrize(
    "begin",
    [b"1\r\nb\r\n0\r\nx: ", b"1;", b"1\r\nb\r\n1;x="],
    ids=["trailer", "extension", "later extension"],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_long_trailers_and_chunk_extensions_are_refused_in_words(
    begin: bytes, num_bytes: int, at_once: bool
) -> None:
    async def work() -> None:
        async with clients() as (app, (client,)):
            data = START + b"transfer-encoding: chunked\r\n\r\n" + begin + b"a" * num_bytes
            step = len(data) if at_once else 1000
            for at in range(0, len(data), step):
                await client.send(data[at : at + step])
            status, body = await client.answer()
            assert status == 431 and str(MAX_HEAD_BYTES) in json.loads(body)["error"]["message"]
            assert app.num_asked == 0

    asyncio.run(work())


def test_short_trailers_and_chunk_extensions_are_read() -> None:
    async def work() -> None:
        async with clients() as (_, (client,)):
            long = b"a" * (MAX_HEAD_BYTES - 10_000)
            for _ in range(2):
                await client.send(START + b"transfer-encoding: chunked\r\n\r\n1;x=%b\r\nb\r\n" % long)
                await client.send(b"2;x=%b\r\nbb\r\n0\r\nx: %b\r\n\r\n" % (long, long))
                assert await client.answer() == (200, b"3")

    asyncio.run(work())


def test_a_refusal_does_not_stand_before_an_earlier_answer() -> None:
    async def work() -> None:
        async with clients() as (app, (client,)):
            app.may_answer.clear()
            await client.send(START + b"content-length: 0\r\n\r\n")
            await app.asked.wait()
            await client.send(START + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * (2 * MAX_HEAD_BYTES))
            with suppress(ConnectionResetError):  # the server has not read all that was sent
                assert await client.is_closed()
            app.may_answer.set()  # the application ends by itself

    asyncio.run(work())


def test_a_head_that_does_not_arrive_in_time_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with clients(2) as (app, [late, lines]):
            for client in (late, lines):
                await client.send(head_of(1000))
                assert await client.answer() == (200, b"0")
            monkeypatch.setattr(connections, "HEAD_S", 1.0)  # time to send what comes
            silent, half = [await app.connect() for _ in range(2)]
            await half.send(START)
            await late.send(START)
            await lines.send(b"\r\n")
            for client in (half, late):
                status, body = await client.answer()
                assert status == 408 and json.loads(body)["error"]["code"] == "request_timeout"
            for client in (silent, half, late, lines):
                assert await client.is_closed()

    asyncio.run(work())


def test_a_connection_that_waits_for_an_answer_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does a client that has begun another request before that answer has come."""
    looks, is_late = asyncio.Semaphore(0), connections.RequestHeadLimits._is_late

    def noted(protocol: connections.RequestHeadLimits) -> None:
        is_late(protocol)
        looks.release()

    async def work() -> None:
        async with clients() as (app, (client,)):
            app.may_answer.clear()
            await client.send(head_of(1000))
            await app.asked.wait()
            monkeypatch.setattr(connections, "HEAD_S", 0.001)
            monkeypatch.setattr(connections.RequestHeadLimits, "_is_late", noted)
            await client.send(START)
            for _ in range(2):
                await looks.acquire()
            app.may_answer.set()
            assert await client.answer() == (200, b"0")
            assert (await client.answer())[0] == 408

    asyncio.run(work())


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQBAAAA\r\n"


@pytest.mark.parametrize("in_pieces", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize(
    "rest", [b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"]
)
def test_a_request_that_offers_another_protocol_is_answered_in_http_1(rest: bytes, in_pieces: bool) -> None:
    """Java's client sends such an offer, with the body behind it."""

    async def work() -> None:
        async with clients() as (_, (client,)):
            request = START + UPGRADE + rest
            step = 1 if in_pieces else len(request)
            for _ in range(2):
                for at in range(0, len(request), step):
                    await client.send(request[at : at + step])
                assert await client.answer() == (200, b"3")
            await client.send(request + head_of(1000) + request)
            for num_bytes in (b"3", b"0", b"3"):
                assert await client.answer() == (200, num_bytes)

    asyncio.run(work())


def test_a_websocket_offer_is_treated_as_any_other_and_waits_for_the_answer_before_it() -> None:
    async def work() -> None:
        async with clients() as (app, (client,)):
            app.may_answer.clear()
            await client.send(head_of(1000))
            await app.asked.wait()
            offer = b"connection: Upgrade\r\nupgrade: websocket\r\n"
            await client.send(START + offer + b"content-length: 3\r\n\r\nabc")
            app.may_answer.set()
            for num_bytes in (b"0", b"3"):
                assert await client.answer() == (200, num_bytes)

    asyncio.run(work())


def test_an_offer_has_the_limit_of_any_head_and_connect_opens_no_tunnel() -> None:
    async def work() -> None:
        async with clients(3) as (_, (fits, longer, tunnel)):
            await fits.send(head_of(MAX_HEAD_BYTES, b"\r\n" + UPGRADE + b"content-length: 0\r\n\r\n"))
            assert await fits.answer() == (200, b"0")
            await longer.send(head_of(MAX_HEAD_BYTES + 1, b"\r\n" + UPGRADE + b"content-length: 0\r\n\r\n"))
            assert (await longer.answer())[0] == 431
            await tunnel.send(b"CONNECT here:80 HTTP/1.1\r\nhost: here\r\n" + UPGRADE + b"\r\n")
            assert (await tunnel.answer())[0] == 400

    asyncio.run(work())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_disconnect_with_several_pipelined_requests_is_reported_to_the_first(at_once: bool) -> None:
    async def work() -> None:
        async with clients() as (app, (client,)):
            app.leaves = True
            first, *others = [START + b"content-length: 1\r\n\r\nb"] * 3
            await client.send(first + b"".join(others) if at_once else first)
            await app.asked.wait()
            if not at_once:
                await client.send(b"".join(others))
            client.writer.close()
            await app.left.wait()
            assert app.num_asked == 1

    asyncio.run(work())
