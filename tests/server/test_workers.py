"""The threads for long work: one owner's work does not delay everyone else's."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import threading
import weakref
from collections import Counter
from functools import partial

import pytest

from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.tree_view import ROUTES
from pensieve_jax.server.workers import NUM_THREADS, SHARE, run_cpu, run_io
from tests.deadlines import TIMEOUT_S
from tests.server.fakes import Harness


class SlowLists:
    """A history whose lists block until `goes_on` is set, except for one owner."""

    def __init__(self, quick: str) -> None:
        self.quick = quick
        self.goes_on = threading.Event()
        self.begun: list[str] = []

    def trees(self, owner: str, limit: int) -> list:
        self.begun.append(owner)
        if owner != self.quick:
            assert self.goes_on.wait(TIMEOUT_S)
        return []


def harness_of(history: SlowLists, tmp_path, *owners: str) -> Harness:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(f"{owner}:{hashlib.sha256(owner.encode()).hexdigest()}" for owner in owners))
    return Harness(ROUTES, keys=ApiKeys(keys), history=history)


def lists_of(harness: Harness, owner: str, count: int = 1) -> list:
    headers = {"authorization": f"Bearer {owner}"}
    return [harness.open("GET", "/v1/pensieve/trees", None, headers) for _ in range(count)]


async def begun(history: SlowLists, count: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while len(history.begun) < count:
            await asyncio.sleep(0.001)


def test_long_requests_of_one_key_leave_threads_to_others(tmp_path):
    history = SlowLists(quick="bob")

    async def scene() -> None:
        harness = harness_of(history, tmp_path, "ann", "bob")
        slow = lists_of(harness, "ann", NUM_THREADS + 1)
        try:
            await begun(history, SHARE)
            (quick,) = lists_of(harness, "bob")
            async with asyncio.timeout(TIMEOUT_S):
                assert (await quick.whole())[0] == 200
            assert history.begun == ["ann"] * SHARE + ["bob"]
        finally:
            history.goes_on.set()
        assert [(await one.whole())[0] for one in slow] == [200] * len(slow)

    asyncio.run(scene())


def test_abandoned_work_still_counts(tmp_path):
    """A disconnect does not end a thread; uncounted, a key with reconnecting clients would take them all."""
    goes_on, begun = threading.Event(), []

    def work() -> None:
        begun.append(None)
        assert goes_on.wait(TIMEOUT_S)

    async def scene() -> None:
        left = [asyncio.ensure_future(run_cpu("ann", True, work)) for _ in range(SHARE)]
        while len(begun) < SHARE:
            await asyncio.sleep(0.001)
        for one in left:
            one.cancel()
        await asyncio.wait(left)
        assert all(one.cancelled() for one in left)
        late = asyncio.ensure_future(run_cpu("ann", True, work))
        try:
            assert await run_cpu("bob", True, len, begun) == SHARE
            assert await run_cpu("ann", False, len, begun) == SHARE, "short work had to wait"
        finally:
            goes_on.set()
        await late

    asyncio.run(scene())


def test_the_first_job_of_a_key_waits_for_no_other_key():
    """Two keys with long jobs took all threads, and a third one waited for them."""
    goes_on, begun = threading.Event(), []

    def work(owner: str) -> None:
        begun.append(owner)
        assert goes_on.wait(TIMEOUT_S)

    async def scene() -> None:
        slow = [
            asyncio.ensure_future(run_cpu(owner, True, work, owner)) for owner in "abcd" for _ in range(3)
        ]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while len(begun) < NUM_THREADS + 2:
                    await asyncio.sleep(0.001)
                assert await run_cpu("e", True, len, begun) == NUM_THREADS + 2
            assert Counter(begun) == {"a": 2, "b": 2, "c": 1, "d": 1}
        finally:
            goes_on.set()
        await asyncio.gather(*slow)
        assert Counter(begun) == dict.fromkeys("abcd", 3)

    asyncio.run(scene())


def test_a_job_that_waits_is_dropped_when_its_caller_leaves():
    goes_on, begun = threading.Event(), []

    def work(number: int) -> None:
        begun.append(number)
        assert goes_on.wait(TIMEOUT_S)

    async def scene() -> None:
        jobs = [asyncio.ensure_future(run_cpu("a", True, work, number)) for number in range(SHARE + 2)]
        while len(begun) < SHARE:
            await asyncio.sleep(0.001)
        jobs[SHARE].cancel()
        await asyncio.wait([jobs[SHARE]])
        goes_on.set()
        await asyncio.gather(*jobs[:SHARE], jobs[-1])
        assert sorted(begun) == [0, 1, SHARE + 1]

    asyncio.run(scene())


def test_without_keys_all_threads_are_shared():
    """Without owners to share with, four requests at a time take the time of one."""
    at_once = threading.Barrier(NUM_THREADS, timeout=TIMEOUT_S)

    async def scene() -> None:
        await asyncio.gather(*(run_cpu("", True, at_once.wait) for _ in range(NUM_THREADS)))

    asyncio.run(scene())


@pytest.mark.parametrize("owner", ["", "ann"])
def test_an_error_in_a_thread_is_raised_and_the_thread_is_returned(owner):
    def fail() -> None:
        raise KeyError("expected")

    async def scene() -> None:
        for _ in range(SHARE + 1):
            with pytest.raises(KeyError):
                await run_cpu(owner, True, fail)

    asyncio.run(scene())


class Text:
    """A long text, which a test can see go."""


@pytest.mark.parametrize("run", [partial(run_cpu, "ann", True), partial(run_io, "ann")])
def test_a_failed_job_keeps_nothing_alive(run):
    """Its traceback held the frames that held it, until the garbage collector ran, which may be never."""

    def fail(text: Text) -> None:
        raise KeyError("expected")

    async def attempt(text: Text) -> None:
        await run(fail, text)

    async def scene() -> None:
        text = Text()
        gone = weakref.ref(text)
        with pytest.raises(KeyError):
            await attempt(text)
        del text
        async with asyncio.timeout(TIMEOUT_S):
            while gone() is not None:  # the thread may still be on its way out of the job
                await asyncio.sleep(0.001)

    gc.disable()
    try:
        asyncio.run(scene())
    finally:
        gc.enable()
