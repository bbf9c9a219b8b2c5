"""What takes long is done beside the event loop, so that one request does not keep the others waiting.

Owns: which work is long, the threads that do it, and a key's share of them.
Does not know: what the work is.
Called by: `http` for bodies, `context` for contexts, handlers for whatever else grows with a request.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

INLINE_CHARACTERS: Final = 20_000
"""More than this takes longer than the few milliseconds that clients may wait for the loop."""
_MESSAGE_CHARACTERS: Final = 100  # what takes as long as a message or an item without any
_TOKEN_CHARACTERS: Final = 10  # the same of a token of the past, of which a short message has about ten
NUM_THREADS: Final = 4
"""Few: while they run Python, the loop takes turns with all of them. They start when they are needed."""
SHARE: Final = 2
"""Threads of one key at a time; what it has beyond that waits for its own, and for nobody else's."""
_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="aside")
_shares = weakref.WeakValueDictionary[str, asyncio.Semaphore]()  # of owners who have threads or wait


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


async def aside[**P, T](
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
