"""Runs long work outside the event loop, so that one request does not delay the others.

Owns: the limit above which work is long, the threads for CPU work and for I/O, each key's share of them, and
the order in which keys get them.
Does not know: what the work is.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any, Final, NamedTuple, Self

from pensieve_jax.server.fair_queue import FairQueue

INLINE_CHARACTERS: Final = 20_000
"""Longest text handled on the event loop. A longer one blocks it for more than a few milliseconds."""
_MESSAGE_CHARACTERS: Final = 100  # cost of an empty message or item, in characters
_TOKEN_CHARACTERS: Final = 10  # cost of one earlier token, in characters; a short message has about ten
_UNKNOWN_CHARACTERS: Final = 2**17
NUM_THREADS: Final = 4
"""CPU threads that run at a time. They are few because Python threads compete with the event loop."""
SHARE: Final = 2
"""CPU threads per key at a time, while others may want them."""
MAX_THREADS: Final = 16
"""CPU threads that run at a time if each serves another key: a key's first job waits for no other key's."""
IO_THREADS: Final = 16
"""Concurrent I/O threads, which only wait for other machines. One key may use half of them."""
_NOMINAL_S: Final = 0.001  # what a job is charged until its time is known
_threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="cpu-work")
_cpu_threads = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, "_CpuThreads"]()
_io_shares = weakref.WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Semaphore]()
_io_slots = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


class WorkEstimate(NamedTuple):
    """Expected cost of work.

    Attributes:
      num_characters: characters of text that take as long, at most; see `of`.
      asks_history: whether it may read the history, which may be on another machine.
    """

    num_characters: int
    asks_history: bool = False

    @classmethod
    def of(
        cls,
        num_characters: int,
        num_messages: int = 0,
        num_tokens: int | None = 0,
        *,
        asks_history: bool = False,
    ) -> Self:
        """Estimate work on texts.

        Args:
          num_characters: characters of its text, or bytes of a body.
          num_messages: messages or items of the text.
          num_tokens: tokens of earlier turns that are formatted again; None if unknown.
          asks_history: see the class.
        """
        past = _UNKNOWN_CHARACTERS if num_tokens is None else _TOKEN_CHARACTERS * num_tokens
        return cls(num_characters + _MESSAGE_CHARACTERS * num_messages + past, asks_history)

    @property
    def is_long(self) -> bool:
        """Whether the work is too long for the event loop and needs a thread."""
        return self.num_characters > INLINE_CHARACTERS


SOME_WORK: Final = WorkEstimate(_UNKNOWN_CHARACTERS)
"""Work of unknown length, which needs a thread."""


type _Job = tuple[str, asyncio.Future[Any], Callable[[], Any]]
"""An owner, the result, and what computes it."""


class _CpuThreads:
    """What runs and waits for one event loop; owners take turns, by the seconds that their jobs take."""

    def __init__(self) -> None:
        self._queue = FairQueue[_Job]()
        self._running: Counter[str] = Counter()

    async def run(self, owner: str, job: Callable[[], Any]) -> Any:
        """Return the result of `job`; if this is cancelled, a job that has not begun is dropped."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = (owner, result, job)
        self._queue.add(owner, entry, _NOMINAL_S)
        self._begin_next()
        try:
            return await result
        finally:
            self._queue.remove(owner, entry)
            del result, entry, job  # a failure's traceback has this frame: no cycle may keep its texts

    def _may_begin(self, owner: str) -> bool:
        num_running = self._running.total()
        if not self._running[owner]:
            return num_running < MAX_THREADS
        return num_running < NUM_THREADS and (not owner or self._running[owner] < SHARE)

    def _begin_next(self) -> None:
        while self._queue.first(self._may_begin) is not None:
            job = self._queue.take(self._may_begin)
            self._running[job[0]] += 1
            _threads.submit(self._run, [job])

    def _run(self, work: list[_Job]) -> None:
        """Run the job in `work` in a thread, and report its end to the event loop.

        The job is taken out of `work`, since the pool's frames, which the traceback of a failure has, keep
        the arguments.
        """
        owner, result, job = work.pop()
        began_s = time.perf_counter()
        try:
            outcome = partial(result.set_result, job())
        except BaseException as error:  # raised again where the caller awaits it
            outcome = partial(result.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            seconds = time.perf_counter() - began_s
            result.get_loop().call_soon_threadsafe(self._end, owner, result, outcome, seconds)
        del result, outcome, job  # as in `run`

    def _end(
        self, owner: str, result: asyncio.Future[Any], outcome: Callable[[], None], seconds: float
    ) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._queue.charge(owner, seconds - _NOMINAL_S)
        if not result.done():
            outcome()
        self._begin_next()


async def run_cpu[**P, T](
    owner: str, in_thread: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `work` directly, or in a thread of its owner's share, and return its result or raise its error.

    The owner "" (no API keys) may use all threads. If the call is cancelled, it does not wait for the thread.
    The thread continues and still counts towards the share, so `work` must have no effect that needs undoing.
    """
    if not in_thread:
        return work(*args, **kwargs)
    threads = _cpu_threads.setdefault(asyncio.get_running_loop(), _CpuThreads())
    found: T = await threads.run(owner, partial(work, *args, **kwargs))
    return found


async def run_io[**P, T](owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work`, which waits for another machine, in a thread and return its result or raise its error.

    Work that never ends blocks neither other work nor the exit of the process. Cancellation is as in
    `run_cpu`.
    """
    loop = asyncio.get_running_loop()
    slots = _io_slots.setdefault(loop, asyncio.Semaphore(IO_THREADS))
    num_threads = IO_THREADS // 2 if owner else IO_THREADS
    share = _io_shares.setdefault((loop, owner), asyncio.Semaphore(num_threads))
    await share.acquire()
    try:
        await slots.acquire()
    except asyncio.CancelledError:
        share.release()
        raise
    # A `ThreadPoolExecutor` would wait for its threads when the process exits, so each work gets a daemon
    # thread of its own, and the semaphores limit their number. A thread counts until it ends, even if its
    # caller was cancelled before.
    # Only this list has the result's future, and only until the end: a failure's traceback has these frames,
    # and no cycle may keep what the work was about.
    waiting: list[asyncio.Future[T]] = [loop.create_future()]

    def finish(outcome: Callable[[asyncio.Future[T]], None]) -> None:
        slots.release()
        share.release()
        result = waiting.pop()
        if not result.done():
            outcome(result)

    def run() -> None:
        try:
            outcome = methodcaller("set_result", work(*args, **kwargs))
        except BaseException as error:  # raised again where the caller awaits it
            outcome = methodcaller("set_exception", error)
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(finish, outcome)
        del outcome

    threading.Thread(target=run, name="io-work", daemon=True).start()
    return await waiting[0]
