"""Streams of events, and what happens if their client is silent, slow or gone."""

from __future__ import annotations

import asyncio
import json

import pytest
import uvloop

from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.replies import (
    DONE,
    Events,
    HttpResponse,
    _close_on_disconnect,
    _Writer,
    encode_json,
    event,
    json_reply,
)
from pensieve_jax.server.http.request import ClientGoneError, HttpRequest
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.main import Listening
from pensieve_jax.server.sockets import bind
from tests.deadlines import TIMEOUT_S
from tests.server.fakes import Harness


class Source:
    """Events that a test sends one by one; records how the stream ended for its producer."""

    def __init__(self, **settings: float) -> None:
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.num_asked_for = 0
        self.closed = asyncio.Event()
        self.settings = ServerSettings(**settings)

    async def handler(self, call: HttpRequest) -> HttpResponse:
        return Events(self.events(), self.settings.heartbeat_s)

    async def events(self):
        try:
            while True:
                self.num_asked_for += 1
                data = await self.queue.get()
                if data is None:
                    return
                yield event(data)
        finally:
            self.closed.set()

    def open(self):
        routes = [Route("GET", "/events", self.handler)]
        return Harness(routes, settings=self.settings).open("GET", "/events")


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029"])
def test_the_data_of_an_event_is_one_line_for_every_client(end):
    text = f"\u00c2{end}\u2027{end}{end}\u202a"
    name, data, blank = event(encode_json({"text": text}), "delta").decode().splitlines()
    assert (name, blank) == ("event: delta", "")
    assert json.loads(data.removeprefix("data: ")) == {"text": text}


def test_every_event_is_one_write():
    async def scenario():
        source = Source()
        client = source.open()
        start = await client.next()
        headers = dict(start["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        for data in (b'{"a":1}', b'{"a":2}'):
            source.queue.put_nowait(data)
            assert (await client.next())["body"] == b"data: " + data + b"\n\n"
        source.queue.put_nowait(None)
        assert await client.next() == {"type": "http.response.body", "body": b"", "more_body": False}
        await client.task
        assert source.closed.is_set()

    asyncio.run(scenario())
    assert event(b"{}", "response.created") == b"event: response.created\ndata: {}\n\n"
    assert DONE == b"data: [DONE]\n\n"


def test_a_client_that_leaves_ends_the_stream_before_and_after_the_first_event():
    async def scenario(num_events: int):
        source = Source()
        client = source.open()
        await client.next()
        for _ in range(num_events):
            source.queue.put_nowait(b"{}")
            await client.next()
        client.leave()
        await asyncio.wait_for(source.closed.wait(), TIMEOUT_S)
        await client.task

    asyncio.run(scenario(0))
    asyncio.run(scenario(2))


def test_silence_is_broken_by_comments():
    async def scenario():
        source = Source(heartbeat_s=0.01)
        client = source.open()
        await client.next()
        comments = [(await client.next())["body"] for _ in range(3)]
        source.queue.put_nowait(b"{}")
        while (body := (await client.next())["body"]).startswith(b":"):
            comments.append(body)
        assert body == b"data: {}\n\n"
        assert all(comment.startswith(b":") and comment.endswith(b"\n\n") for comment in comments)
        client.leave()
        await client.task

    asyncio.run(scenario())


def test_a_stream_whose_client_reads_nothing_stops_and_is_closed():
    async def scenario():
        source = Source(stall_timeout_s=0.02)
        client = source.open()
        await client.next()
        client.takes.clear()
        for _ in range(3):
            source.queue.put_nowait(b"{}")
        await asyncio.wait_for(source.closed.wait(), TIMEOUT_S)
        assert source.num_asked_for == 1
        await client.task

    asyncio.run(scenario())


async def never():
    await asyncio.Event().wait()


def test_a_stream_of_ready_events_lets_other_tasks_run():
    num_events, num_turns = 1000, 0

    async def send(message):
        """Return without waiting, as uvicorn's does while its buffer has room."""

    async def others():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def kept():
        for _ in range(num_events):
            yield event(b"a" * 1000)

    async def scenario():
        beside = asyncio.ensure_future(others())
        await Events(kept()).send(never, send)
        beside.cancel()

    asyncio.run(scenario())
    assert num_turns >= num_events // 20


def test_ready_events_wait_until_the_client_has_read_the_earlier_ones():
    """Runs on the real loop, which writes some of the buffer between two rounds of its tasks."""
    num_asked_for, num_events, gone = 0, 20_000, asyncio.Event()

    async def kept():
        nonlocal num_asked_for
        for _ in range(num_events):
            num_asked_for += 1
            yield event(b"a" * 1000)

    async def app(scope, receive, send):
        with pytest.raises(ClientGoneError):
            await Events(kept()).send(receive, send, 0.1)
        gone.set()

    async def scenario():
        listening = bind("127.0.0.1", 0)
        host, port = listening.getsockname()
        server = Listening(app, listening)
        await server.begun()
        _, writer = await asyncio.open_connection(host, port)
        writer.transport.pause_reading()
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            await gone.wait()
        writer.transport.abort()
        await server.end()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
    assert num_asked_for < num_events // 2  # as much as the system's buffers hold


def test_a_client_that_reads_all_but_the_end_is_disconnected():
    async def send(message):
        if not message.get("more_body", True):
            await never()

    async def one():
        yield event(b"{}")

    async def scenario():
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(ClientGoneError):
                await Events(one()).send(never, send, 0.02)

    asyncio.run(scenario())


def test_a_client_that_stalls_and_leaves_ends_its_stream_once():
    """While the stall is handled, which may take as long as ending a turn, the disconnect may come."""

    async def scenario():
        async def send(message):
            raise AssertionError

        async def leave():
            return {"type": "http.disconnect"}

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0) as open_:
                try:
                    await asyncio.Event().wait()
                finally:
                    writer = _Writer(send, Events(Source().events()), 1.0, open_)
                    writer._write_began_s = float("-inf")
                    writer._check_timer()
                    await _close_on_disconnect(leave, open_)
                    writer.stop()

    asyncio.run(scenario())


class FakeTimer:
    """The event loop as `_Writer` uses it: a time that the test sets, and the delay of the next check."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.delays_s: list[float] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s, callback):
        self.delays_s.append(delay_s)
        return asyncio.get_running_loop().call_later(3600.0, callback)


@pytest.mark.parametrize(("waited_s", "is_over"), [(1.75, False), (2.0, True)])
def test_a_write_may_wait_for_the_stall_timeout(waited_s, is_over):
    async def scenario():
        async with asyncio.timeout(None) as open_:
            writer = _Writer(None, Events(Source().events(), heartbeat_s=8.0), 2.0, open_)
            assert writer._period_s == 0.5, "four looks in the shorter of the two times"
            writer._loop = timer = FakeTimer()
            writer._write_began_s = timer.now_s - waited_s
            writer._check_timer()
            assert (open_.when() is not None) == is_over
            assert timer.delays_s == ([] if is_over else [0.5])
            writer.stop()
            open_.reschedule(None)

    asyncio.run(scenario())


@pytest.mark.parametrize(("silent_s", "is_broken"), [(3.75, False), (4.0, True)])
def test_a_comment_comes_after_the_heartbeat(silent_s, is_broken):
    written = []

    async def send(message):
        written.append(message["body"])

    async def scenario():
        async with asyncio.timeout(None) as open_:
            events = Events(Source().events(), heartbeat_s=4.0, heartbeat=b"event: ping\n\n")
            writer = _Writer(send, events, 8.0, open_)
            writer._loop = timer = FakeTimer()
            writer._last_write_s = timer.now_s - silent_s
            writer._check_timer()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert written == [b"event: ping\n\n"] * is_broken and timer.delays_s == [1.0]
            assert writer._last_write_s == timer.now_s - (0.0 if is_broken else silent_s)
            writer.stop()

    asyncio.run(scenario())


def test_a_broken_stream_does_not_look_complete():
    async def broken():
        yield event(b"{}")
        raise RuntimeError("inside")

    async def handler(call: HttpRequest) -> HttpResponse:
        return Events(broken())

    async def scenario():
        client = Harness([Route("GET", "/events", handler)]).open("GET", "/events")
        await client.task
        return [await client.next() for _ in range(2)], client._outgoing.empty()

    messages, is_all = asyncio.run(scenario())
    assert is_all and messages[-1]["more_body"]


def test_foreground_work_ends_when_its_client_leaves():
    cancelled = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def handler(call: HttpRequest) -> HttpResponse:
        await call.unless_gone(work())
        return json_reply({})

    async def scenario():
        client = Harness([Route("POST", "/work", handler)]).open("POST", "/work", {})
        client.leave()
        await client.task
        assert cancelled.is_set() and client._outgoing.empty()

    asyncio.run(scenario())


def test_foreground_work_returns_its_result_and_raises_its_errors():
    async def result():
        return 3

    async def error():
        raise KeyError("k")

    async def scenario():
        receive = asyncio.Event()

        async def never():
            await receive.wait()

        call = HttpRequest.__new__(HttpRequest)
        call.receive = never
        assert await call.unless_gone(result()) == 3
        with pytest.raises(KeyError):
            await call.unless_gone(error())

    asyncio.run(scenario())
    assert issubclass(ClientGoneError, Exception)
