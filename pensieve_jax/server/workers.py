"""What takes long is done beside the event loop, so that one request does not keep the others waiting.

Owns: which work is long or waits for another machine, the threads that do it, and a key's share of them.
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
"""More than this takes longer than the few milliseconds that clients may wait for the loop."""
_MESSAGE_CHARACTERS: Final = 100  # what takes as long as a message or an item without any
_TOKEN_CHARACTERS: Final = 10  # the same of a token of the past, of which a short message has about ten
NUM_THREADS: Final = 4
"""Few: while they run Python, the loop takes turns with all of them. They start when they are needed."""
SHARE: Final = 2
"""Threads of one key at a time; what it has beyond that waits for its own, and for nobody else's."""
FAR_THREADS: Final = 16
"""That wait for another machine at a time, which takes no processor; half of them for one key."""
_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="aside")
_shares = weakref.WeakValueDictionary[str, asyncio.Semaphore]()  # of owners who have threads or wait
_far_shares = weakref.WeakValueDictionary[str, asyncio.Semaphore]()
_far_places = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()


class CpuTicket(NamedTuple):
    """What is known of work before it is done.

    Attributes:
      is_long: it takes long, of a processor.
      asks_history: it may look something up.
    """

    is_long: bool
    asks_history: bool = False


def is_long(num_characters: int, num_messages: int = 0, num_tokens: int | None = 0) -> bool:
    """Whether work is for a thread.

    Args:
      num_characters: of its text, or the bytes of a body.
      num_messages: messages or items of the text.
      num_tokens: of what was said before, which is written once more; None where nobody knows.
    """
    if num_tokens is None:
        return True
    messages, past = _MESSAGE_CHARACTERS * num_messages, _TOKEN_CHARACTERS * num_tokens
    return num_characters + messages + past > INLINE_CHARACTERS


async def run_cpu[**P, T](
    owner: str, in_thread: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What `work` returns: at once, or from a thread of its owner's share; raises what it raises.

    Without keys, which is the owner "", nobody's share is another's loss. Cancelled, it does not wait for the
    thread, which goes on counting: work must leave nothing behind that somebody has to undo.
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
    """What `work` returns, which waits for another machine; raises what it raises.

    It may never end: others go on meanwhile, and so does the end of the process. A cancelled call is as that
    of `run_cpu`.
    """
    loop = asyncio.get_running_loop()
    places = _far_places.setdefault(loop, asyncio.Semaphore(FAR_THREADS))
    share = _far_shares.setdefault(owner, asyncio.Semaphore(FAR_THREADS // 2 if owner else FAR_THREADS))
    await share.acquire()
    try:
        await places.acquire()
    except asyncio.CancelledError:
        share.release()
        raise
    result = loop.create_future()

    def tell(outcome: Callable[[], None]) -> None:
        places.release()
        share.release()
        if not result.done():
            outcome()

    def run() -> None:
        try:
            outcome = partial(result.set_result, work(*args, **kwargs))
        except BaseException as error:  # whoever waits raises it
            outcome = partial(result.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(tell, outcome)

    threading.Thread(target=run, name="far", daemon=True).start()
    found: T = await result
    return found
