"""Messages of many streams over one connection between front ends and replicas; Ray does not run."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager

import pytest

from pensieve_jax.core.errors import EngineDiedError
from pensieve_jax.server.engine_process.wire import FrameWriter
from pensieve_jax.server.replicas import report_stream
from pensieve_jax.server.replicas.report_stream import (
    FrontLostError,
    Hello,
    ReplyTo,
    ReportFrame,
    ReportLinks,
    ReportListener,
)
from tests.deadlines import TIMEOUT_S

HOST = "127.0.0.1"


def run(work):
    async def in_time():
        async with asyncio.timeout(TIMEOUT_S):
            await work

    asyncio.run(in_time())


@asynccontextmanager
async def front():
    listener, links = ReportListener(), ReportLinks()
    try:
        yield listener, links, await listener.listen(HOST)
    finally:
        links.close()
        listener.close()


@asynccontextmanager
async def one_stream():
    """Open a stream over which one message has come."""
    async with front() as (listener, links, address):
        link, inbox = await links.to(address), listener.open()
        with link.stream(inbox.number) as stream:
            await stream.send(b"begun")
            assert await inbox.take() == b"begun"
            yield listener, link, inbox, stream


async def all_of(inbox):
    found = []
    while (message := await inbox.take()) is not None:
        found.append(message)
    return found


async def lost(link):
    """Wait until a link knows that its connection is lost."""
    if not link.is_lost:
        link.pause_writing()
        await link._may_write.wait()
    assert link.is_lost


def test_streams_share_a_connection_and_each_keeps_its_order():
    async def work():
        async with front() as (listener, links, address):
            link = await links.to(address)
            assert link is await links.to(address)
            inboxes = [listener.open() for _ in range(3)]
            with ExitStack() as stack:
                streams = [stack.enter_context(link.stream(inbox.number)) for inbox in inboxes]
                for piece in range(50):
                    for inbox, stream in zip(inboxes, streams, strict=True):
                        await stream.send(b"%d of %d" % (piece, inbox.number))
                for stream in streams:
                    await stream.send(b"")
            for inbox in inboxes:
                assert await all_of(inbox) == [b"%d of %d" % (piece, inbox.number) for piece in range(50)]
                assert inbox.has_ended
            (connection,) = listener._connections
            assert not connection.streams and not listener._inboxes and not link._open_runs

    run(work())


def test_simultaneous_messages_are_one_frame(monkeypatch):
    class Counting(FrameWriter):
        def frame(self, message):
            frames.append(message)
            return super().frame(message)

    frames = []

    async def work():
        async with front() as (listener, links, address):
            link, inbox = await links.to(address), listener.open()
            monkeypatch.setattr(link, "_writer", Counting())
            with link.stream(inbox.number) as stream:
                for number in range(100):
                    await stream.send(b"%d" % number)
                await stream.send(b"")
                assert len(await all_of(inbox)) == 100
            assert len(frames) == 1

    run(work())


def test_a_lost_connection_fails_its_streams_after_the_received_messages():
    async def work():
        async with front() as (listener, links, address):
            others = ReportLinks()
            link, other = await links.to(address), await others.to(address)
            broken, ended, kept = (listener.open() for _ in range(3))
            with (
                link.stream(broken.number) as first,
                link.stream(ended.number) as second,
                other.stream(kept.number) as third,
            ):
                await first.send(b"begun")
                await second.send(b"all")
                await second.send(b"")
                await third.send(b"here")
                assert await broken.take() == b"begun"
                assert await kept.take() == b"here"
                await first.send(b"more")
                links.close()  # wait for what was sent before
                assert await broken.take() == b"more"
                with pytest.raises(EngineDiedError):
                    await broken.take()
                assert await all_of(ended) == [b"all"]
                await third.send(b"")
                assert await all_of(kept) == []
            others.close()

    run(work())


def test_the_second_run_of_a_stream_is_closed_and_only_the_first_is_read():
    """Serve may repeat a call whose first answer was lost, although the first replica runs it."""

    async def work():
        async with front() as (listener, links, address):
            inbox = listener.open()
            with ExitStack() as stack:
                # On another replica, and on the same one again.
                here, there = await links.to(address), await ReportLinks().to(address)
                first, second, third = (
                    stack.enter_context(link.stream(inbox.number)) for link in (here, there, here)
                )
                await first.send(b"one")
                assert await inbox.take() == b"one"
                for late in (second, third):
                    with pytest.raises(FrontLostError, match="closed the result stream"):
                        while True:  # until the notification arrives
                            await late.send(b"another")
                            await asyncio.sleep(0)
                await first.send(b"two")
                await first.send(b"")
                assert await all_of(inbox) == [b"two"]
                there.close()

    run(work())


def test_the_sender_of_an_abandoned_stream_is_notified():
    async def work():
        async with front() as (listener, links, address):
            link, inbox = await links.to(address), listener.open()
            with link.stream(inbox.number) as stream:
                await stream.send(b"read")
                await stream.send(b"not read")
                assert await inbox.take() == b"read"
                inbox.close()
                assert await all_of(inbox) == []
                with pytest.raises(FrontLostError, match="closed the result stream"):
                    while True:
                        await stream.send(b"too late")
                        await asyncio.sleep(0)
            (connection,) = listener._connections
            assert not connection.streams and not listener._inboxes

    run(work())


def test_senders_are_notified_of_a_lost_front_end():
    async def work():
        links = ReportLinks()
        async with front() as (listener, _, address):
            link, inbox = await links.to(address), listener.open()
            with link.stream(inbox.number) as stream:
                await stream.send(b"here")
                assert await inbox.take() == b"here"
                listener.close()
                with pytest.raises(EngineDiedError):
                    await inbox.take()
                await lost(link)  # also a sender that waits for the front end to read
                with pytest.raises(FrontLostError, match="is gone"):
                    await stream.send(b"anybody?")
        for _ in range(2):  # a failed connection is not mistaken for an open one
            with pytest.raises(FrontLostError, match="cannot be reached"):
                await links.to(address)
        with pytest.raises(FrontLostError):
            await links.to(ReplyTo(HOST, address.port, "the next front's"))
        assert len(links._links) == 1
        links.close()

    run(work())


def test_waiting_for_an_unresponsive_front_end_is_limited(monkeypatch):
    async def never(*_):
        await asyncio.Event().wait()

    async def work():
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never, raising=False)
        with pytest.raises(FrontLostError, match="TimeoutError"):
            await ReportLinks().to(ReplyTo(HOST, 1, "token"))

    monkeypatch.setattr(report_stream, "_CONNECT_S", 0.01)
    run(work())


def test_a_sender_that_is_cancelled_while_connecting_leaves_the_connection_to_others():
    async def work():
        async with front() as (_, links, address):
            first, second = (asyncio.ensure_future(links.to(address)) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            assert not (await second).is_lost

    run(work())


def test_senders_wait_for_a_front_end_that_does_not_read():
    async def work():
        async with one_stream() as (_, link, inbox, stream):
            link.pause_writing()
            sending = asyncio.ensure_future(stream.send(b"later"))
            await asyncio.sleep(0)
            assert not sending.done()
            link.resume_writing()
            await sending
            assert await inbox.take() == b"later"

    run(work())


def test_both_ends_detect_a_silent_peer():
    async def work():
        async with one_stream() as (listener, link, *_):
            (connection,) = listener._connections
            for transport in (link._transport, connection._transport):
                found = transport.get_extra_info("socket")
                assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000

    run(work())


def test_a_connection_without_a_greeting_is_dropped():
    async def work():
        async with front() as (listener, links, address):
            link, inbox, other = await links.to(address), listener.open(), listener.open()
            with link.stream(inbox.number) as stream, link.stream(other.number) as beside:
                await stream.send(b"begun")
                await beside.send(b"begun")
                assert await other.take() == await inbox.take() == b"begun"
                inbox.drop_connection()
                with pytest.raises(EngineDiedError):
                    await other.take()
                await lost(link)
                assert await links.to(address) is not link

    run(work())


def test_a_connection_with_the_token_need_not_send_it_in_time_again():
    async def work():
        async with one_stream() as (listener, *_):
            (connection,) = listener._connections
            assert connection.is_known and connection._deadline.cancelled()

    run(work())


def test_a_frame_that_is_too_long_ends_the_connection(monkeypatch):
    monkeypatch.setattr("pensieve_jax.server.engine_process.wire.MAX_FRAME_BYTES", 1000)

    async def work():
        async with one_stream() as (_, _, inbox, stream):
            await stream.send(bytes(2000))
            with pytest.raises(EngineDiedError):
                await inbox.take()

    run(work())


@pytest.mark.parametrize(
    "sent",
    [
        [ReportFrame([(1, 1, b"no token")])],
        [Hello("not the token"), ReportFrame([(1, 1, b"a wrong one")])],
        b"GET / HTTP/1.1\r\n\r\n",
        b"PJX1" + (100_000).to_bytes(4, "big") + bytes(50_000),
        b"",
    ],
    ids=["none", "wrong", "noise", "much", "nothing"],
)
def test_a_peer_without_the_token_is_not_read(sent, monkeypatch):
    if sent == b"":
        monkeypatch.setattr(report_stream, "_HELLO_S", 0.01)

    async def work():
        async with front() as (listener, _, address):
            inbox = listener.open()
            assert inbox.number == 1
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(sent if isinstance(sent, bytes) else b"".join(map(FrameWriter().frame, sent)))
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()
            assert not inbox.has_ended and not listener.num_unknown
            inbox.fail(EngineDiedError("nothing came"))
            with pytest.raises(EngineDiedError, match="nothing came"):
                await inbox.take()

    run(work())


def test_the_number_of_silent_new_connections_is_limited(monkeypatch):
    monkeypatch.setattr(report_stream, "_MAX_UNKNOWN", 2)

    async def work():
        async with front() as (listener, links, address):
            link = await links.to(address)  # an authenticated one
            with link.stream(0) as stream:
                await stream.send(b"")
                both = [await asyncio.open_connection(address.host, address.port) for _ in range(2)]
                reader, writer = await asyncio.open_connection(address.host, address.port)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
                assert listener.num_unknown == 2 and not link.is_lost
                for one in (writer, *(writer for _, writer in both)):
                    one.close()

    run(work())
