"""Runs long work outside the event loop, so that one request does not delay the others.

Owns: the limit above which work is long, the threads for CPU work and for I/O, and each key's share of them.
Does not know: what the work is.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

INLINE_CHARACTERS: Final = 20_000
"""Longest text handled on the event loop. A longer one blocks it for more than a few milliseconds."""
_MESSAGE_CHARACTERS: Final = 100  # cost of an empty message or item, in characters
_TOKEN_CHARACTERS: Final = 10  # cost of one earlier token, in characters; a short message has about ten
NUM_THREADS: Final = 4
"""Size of the CPU pool, started on demand. It is small because Python threads compete with the event loop."""
SHARE: Final = 2
"""CPU threads per key at a time. More work of a key waits only for that key's own threads."""
IO_THREADS: Final = 16
"""Concurrent I/O threads, which only wait for other machines. One key may use half of them."""
_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="cpu-work")
_shares = weakref.WeakValueDictionary[str, asyncio.Semaphore]()  # only of owners with running or waiting work
_io_shares = weakref.WeakValueDictionary[str, asyncio.Semaphore]()
_io_slots = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


class WorkEstimate(NamedTuple):
    """Expected cost of work.

    Attributes:
      is_long: whether it needs much CPU time.
      asks_history: whether it may read the history, which may be on another machine.
    """

    is_long: bool
    asks_history: bool = False


def is_long(num_characters: int, num_messages: int = 0, num_tokens: int | None = 0) -> bool:
    """Return whether work is too long for the event loop and needs a thread.

    Args:
      num_characters: characters of its text, or bytes of a body.
      num_messages: messages or items of the text.
      num_tokens: tokens of earlier turns that are formatted again; None if unknown.
    """
    if num_tokens is None:
        return True
    messages, past = _MESSAGE_CHARACTERS * num_messages, _TOKEN_CHARACTERS * num_tokens
    return num_characters + messages + past > INLINE_CHARACTERS


async def run_cpu[**P, T](
    owner: str, in_thread: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `work` directly, or in a thread of its owner's share, and return its result or raise its error.

    The owner "" (no API keys) has no share limit. If the call is cancelled, it does not wait for the thread.
    The thread continues and still counts towards the share, so `work` must have no effect that needs undoing.
    """
    if not in_thread:
        return work(*args, **kwargs)
    loop, job = asyncio.get_running_loop(), partial(work, *args, **kwargs)
    if not owner:
        return await loop.run_in_executor(_threads, job)
    share = _shares.setdefault(owner, asyncio.Semaphore(SHARE))
    await share.acquire()
    running = loop.run_in_executor(_threads, job)
    running.add_done_callback(lambda _: share.release())
    return await asyncio.shield(running)


async def run_io[**P, T](owner: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work`, which waits for another machine, in a thread and return its result or raise its error.

    Work that never ends blocks neither other work nor the exit of the process. Cancellation is as in
    `run_cpu`.
    """
    loop = asyncio.get_running_loop()
    slots = _io_slots.setdefault(loop, asyncio.Semaphore(IO_THREADS))
    share = _io_shares.setdefault(owner, asyncio.Semaphore(IO_THREADS // 2 if owner else IO_THREADS))
    await share.acquire()
    try:
        await slots.acquire()
    except asyncio.CancelledError:
        share.release()
        raise
    # A `ThreadPoolExecutor` would wait for its threads when the process exits, so each work gets a daemon
    # thread of its own, and the semaphores limit their number. A thread counts until it ends, even if its
    # caller was cancelled before.
    result = loop.create_future()

    def finish(outcome: Callable[[], None]) -> None:
        slots.release()
        share.release()
        if not result.done():
            outcome()

    def run() -> None:
        try:
            outcome = partial(result.set_result, work(*args, **kwargs))
        except BaseException as error:  # raised again where the caller awaits it
            outcome = partial(result.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(finish, outcome)

    threading.Thread(target=run, name="io-work", daemon=True).start()
    found: T = await result
    return found
