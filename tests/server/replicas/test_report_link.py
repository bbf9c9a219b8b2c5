"""Messages of many streams over one connection, as fronts and replicas have it; Ray does not run."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from pensieve_jax.core.errors import EngineDiedError
from pensieve_jax.server.engine_process.wire import FrameWriter
from pensieve_jax.server.replicas.report_link import (
    FrontLostError,
    Hello,
    ReplyTo,
    ReportLinks,
    ReportListener,
    Said,
)

HOST = "127.0.0.1"


def run(work):
    async def in_time():
        async with asyncio.timeout(30):
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


async def all_of(inbox):
    found = []
    while (message := await inbox.take()) is not None:
        found.append(message)
    return found


def test_streams_share_a_connection_and_each_has_its_own_in_order():
    async def work():
        async with front() as (listener, links, address):
            first, second = await links.to(address), await links.to(address)
            assert first is second
            inboxes = [listener.open() for _ in range(3)]
            for piece in range(50):
                for inbox in inboxes:
                    await first.send(inbox.number, b"%d of %d" % (piece, inbox.number))
            for inbox in inboxes:
                await first.send(inbox.number, b"")
            for inbox in inboxes:
                assert await all_of(inbox) == [b"%d of %d" % (piece, inbox.number) for piece in range(50)]
                assert inbox.has_ended

    run(work())


def test_what_comes_at_a_time_is_one_frame(monkeypatch):
    async def work():
        async with front() as (listener, links, address):
            link, inbox = await links.to(address), listener.open()
            frames = []
            monkeypatch.setattr(link, "_writer", Counting(frames))
            for number in range(100):
                await link.send(inbox.number, b"%d" % number)
            await link.send(inbox.number, b"")
            assert len(await all_of(inbox)) == 100
            assert len(frames) == 1

    class Counting(FrameWriter):
        def __init__(self, frames) -> None:
            super().__init__()
            self._frames = frames

        def frame(self, message):
            self._frames.append(message)
            return super().frame(message)

    run(work())


def test_a_lost_connection_fails_the_streams_that_came_over_it_behind_what_has_come():
    async def work():
        async with front() as (listener, links, address):
            others = ReportLinks()
            link, other = await links.to(address), await others.to(address)
            lost, ended, kept = (listener.open() for _ in range(3))
            await link.send(lost.number, b"begun")
            await link.send(ended.number, b"all")
            await link.send(ended.number, b"")
            await other.send(kept.number, b"here")
            assert await lost.take() == b"begun"
            assert await kept.take() == b"here"
            links.close()
            with pytest.raises(EngineDiedError):
                await lost.take()
            assert await all_of(ended) == [b"all"]
            await other.send(kept.number, b"")
            assert await all_of(kept) == []
            others.close()

    run(work())


def test_nothing_more_is_taken_of_a_stream_that_nobody_reads():
    async def work():
        async with front() as (listener, links, address):
            link = await links.to(address)
            left, read = listener.open(), listener.open()
            left.add(b"")
            await link.send(left.number, b"too late")
            await link.send(read.number, b"")
            assert await all_of(read) == []
            assert await all_of(left) == []

    run(work())


def test_a_front_that_is_gone_is_told_to_whoever_sends():
    async def work():
        links = ReportLinks()
        async with front() as (listener, _, address):
            link, inbox = await links.to(address), listener.open()
            await link.send(inbox.number, b"here")
            assert await inbox.take() == b"here"
        while not link.is_lost:
            await asyncio.sleep(0)
        with pytest.raises(FrontLostError):
            await link.send(inbox.number, b"anybody?")
        with pytest.raises(FrontLostError, match="cannot be reached"):
            await links.to(address)
        with pytest.raises(FrontLostError):  # one that failed is not remembered as one that stands
            await links.to(address)
        links.close()

    run(work())


def test_a_front_that_takes_nothing_is_waited_for():
    async def work():
        async with front() as (listener, links, address):
            link, inbox = await links.to(address), listener.open()
            link.pause_writing()
            sending = asyncio.ensure_future(link.send(inbox.number, b"later"))
            await asyncio.sleep(0)
            assert not sending.done()
            link.resume_writing()
            await sending
            assert await inbox.take() == b"later"

    run(work())


@pytest.mark.parametrize(
    "sent",
    [
        [Said([(1, b"no token")])],
        [Hello("not the token"), Said([(1, b"a wrong one")])],
        b"GET / HTTP/1.1\r\n\r\n",
        b"PJX1" + (100_000).to_bytes(4, "big") + bytes(50_000),
    ],
    ids=["none", "wrong", "noise", "much"],
)
def test_whoever_does_not_know_the_token_is_not_heard(sent):
    async def work():
        async with front() as (listener, _, address):
            inbox = listener.open()
            assert inbox.number == 1
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(sent if isinstance(sent, bytes) else b"".join(map(FrameWriter().frame, sent)))
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()
            assert not inbox.has_ended
            inbox.fail(EngineDiedError("nothing came"))
            with pytest.raises(EngineDiedError, match="nothing came"):
                await inbox.take()

    run(work())


def test_nobody_is_where_nobody_listens():
    async def work():
        links = ReportLinks()
        async with front() as (_, _, address):
            nowhere = ReplyTo(HOST, address.port, "another front's")
        with pytest.raises(FrontLostError):
            await links.to(nowhere)
        links.close()

    run(work())
