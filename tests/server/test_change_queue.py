"""Owners of changes are served in turn, and no place is lost whatever becomes of a change."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine

import pytest

from pensieve_jax.core.errors import EngineClosedError
from pensieve_jax.history.server_tables.changes import AppendItems, DeleteItem, Expire, HistoryChange
from pensieve_jax.server.change_queue import LARGE_BYTES, MAX_SENT, WAIT_S, ChangeQueue, cost_of
from tests.seeds import new_seed


def change(owner: str, items: str = "[]") -> AppendItems:
    return AppendItems(owner=owner, conversation_id="c", expected_version=0, items=items)


class Engine:
    """An engine that makes changes when the test says so, in the order of their arrival."""

    def __init__(self) -> None:
        self.sent: list[HistoryChange] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.most = 0

    async def apply(self, change: HistoryChange) -> None:
        self.sent.append(change)
        self.waiting.append(asyncio.get_running_loop().create_future())
        self.most = max(self.most, len(self.waiting))
        mine = self.waiting[-1]
        try:
            await mine
        finally:
            if mine in self.waiting:
                self.waiting.remove(mine)

    async def make(self, error: Exception | None = None) -> None:
        """Make the oldest change."""
        place = self.waiting.pop(0)
        if place.done():  # cancelled a moment ago
            pass
        elif error is None:
            place.set_result(None)
        else:
            place.set_exception(error)
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def run[T](work: Coroutine[None, None, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(20.0):
            return await work

    return asyncio.run(limited())


def test_one_owners_thousand_changes_delay_no_other_by_more_than_what_was_sent() -> None:
    async def work() -> None:
        engine = Engine()
        queue = ChangeQueue(engine)
        tasks = [asyncio.ensure_future(queue.apply(change("bob"))) for _ in range(1000)]
        await settled()
        late = asyncio.ensure_future(queue.apply(change("ann")))
        num_made = 0
        while not late.done():
            await settled()
            await engine.make()
            num_made += 1
        assert num_made <= MAX_SENT + 2 and engine.most == MAX_SENT
        while not all(task.done() for task in tasks):
            await engine.make()
        assert (queue.num_sent, queue.num_waiting) == (0, 0)

    run(work())


def test_owners_that_always_wait_write_the_same_number_of_bytes() -> None:
    async def work() -> None:
        engine = Engine()
        queue = ChangeQueue(engine)
        owners = [("ann", "[" + " " * 9000 + "]", 100), ("bob", "[]", 3000)]
        tasks = [
            asyncio.ensure_future(queue.apply(change(owner, items)))
            for owner, items, number in owners
            for _ in range(number)
        ]
        await settled()
        while queue.num_waiting > 1500:
            await engine.make()
        written = {"ann": 0, "bob": 0}
        for sent in engine.sent[MAX_SENT:]:
            assert isinstance(sent, AppendItems)
            written[sent.owner] += cost_of(sent)
        assert written["ann"] == pytest.approx(written["bob"], rel=0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (queue.num_sent, queue.num_waiting) == (0, 0)

    run(work())


def test_large_changes_are_made_one_at_a_time_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        loop, engine = asyncio.get_running_loop(), Engine()
        queue = ChangeQueue(engine)
        now_s, pauses_s = 10.0, []

        def call_later(delay_s: float, leave: Callable[[], None]) -> None:
            pauses_s.append((delay_s, leave))

        monkeypatch.setattr(loop, "time", lambda: now_s)
        monkeypatch.setattr(loop, "call_later", call_later)
        large = [asyncio.ensure_future(queue.apply(change(owner, " " * LARGE_BYTES))) for owner in "bba"]
        await settled()
        assert len(engine.sent) == 1
        small = asyncio.ensure_future(queue.apply(change("ann")))  # does not wait for large ones
        await settled()
        assert len(engine.sent) == 2
        now_s += 0.5
        await engine.make()
        await engine.make()
        assert large[0].done() and small.done() and len(engine.sent) == 2
        ((pause_s, leave),) = pauses_s
        assert pause_s == pytest.approx(1.5)
        for number in (2, 3):
            leave()
            await settled()
            assert len(engine.sent) == number + 1
            await engine.make()
            _, leave = pauses_s[-1]
        leave()
        assert all(task.done() for task in large)
        assert (queue.num_sent, queue.num_waiting) == (0, 0)

    run(work())


def test_a_change_that_waits_too_long_is_not_made() -> None:
    async def work() -> None:
        engine = Engine()
        queue = ChangeQueue(engine, wait_s=0.0)
        tasks = [asyncio.ensure_future(queue.apply(change("bob"))) for _ in range(MAX_SENT)]
        await settled()
        with pytest.raises(EngineClosedError, match="was not made"):
            await queue.apply(DeleteItem(owner="ann", conversation_id="c", item_id="i"))
        assert len(engine.sent) == MAX_SENT and queue.num_waiting == 0
        for _ in tasks:
            await engine.make()
        await queue_is_free(queue, engine)

    run(work())


async def queue_is_free(queue: ChangeQueue, engine: Engine) -> None:
    assert (queue.num_sent, queue.num_waiting) == (0, 0)
    last = asyncio.ensure_future(queue.apply(Expire(now_s=1.0)))
    await settled()
    await engine.make()
    await last


def test_no_place_is_lost_over_random_ends_of_changes() -> None:
    """Changes are made, refused, or cancelled while they wait or are under way."""
    seed = new_seed()
    draw = random.Random(seed)

    async def work() -> None:
        engine = Engine()
        queue = ChangeQueue(engine)
        tasks: list[asyncio.Future[None]] = []
        for _ in range(2000):
            kind = draw.random()
            if kind < 0.5 or not tasks:
                tasks.append(asyncio.ensure_future(queue.apply(change(draw.choice("abc")))))
            elif kind < 0.7:
                draw.choice(tasks).cancel()
            elif engine.waiting:
                await engine.make(EngineClosedError("refused") if kind < 0.8 else None)
            if draw.random() < 0.5:
                await asyncio.sleep(0)
            assert queue.num_sent <= MAX_SENT, seed
        while queue.num_sent:
            await settled()
            if engine.waiting:
                await engine.make()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {type(None), EngineClosedError, asyncio.CancelledError}, seed
        await queue_is_free(queue, engine)

    run(work())


def test_after_a_very_slow_change_the_next_large_one_is_still_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause as long as others wait would refuse them all."""

    async def work() -> None:
        loop, engine = asyncio.get_running_loop(), Engine()
        queue = ChangeQueue(engine)
        now_s, pauses_s = 10.0, []
        monkeypatch.setattr(loop, "time", lambda: now_s)
        monkeypatch.setattr(loop, "call_later", lambda delay_s, leave: pauses_s.append(delay_s))
        slow = asyncio.ensure_future(queue.apply(change("bob", " " * LARGE_BYTES)))
        await settled()
        now_s += 60.0  # a database that moved to another machine
        await engine.make()
        assert slow.done() and len(pauses_s) == 1
        assert pauses_s[0] <= WAIT_S / 4

    run(work())
