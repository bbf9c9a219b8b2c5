"""Two long things at once, as one: what a thread does, and what the caller does meanwhile.

Owns: the thread, and what becomes of both when one of them fails or nobody asks any longer.
Does not know: what is done. Called by: `device.model_runner`, at the start of an engine.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor


def beside[T](other: Iterable[T], here: Generator[T]) -> Generator[T]:
    """Items of both as they come; `other` is iterated in a thread, `here` in the caller's.

    What either raises is raised here, at the latest at the next item of `here`. Then, and when this generator
    is closed, `here` is closed, `other` goes on to its next item at most, and that is waited for.
    """
    came: queue.SimpleQueue[tuple[T, ...]] = queue.SimpleQueue()  # an empty one ends it
    is_over = threading.Event()

    def iterate() -> None:
        try:
            for item in other:
                came.put((item,))
                if is_over.is_set():
                    return
        finally:
            came.put(())

    with ThreadPoolExecutor(1, thread_name_prefix="beside") as pool, contextlib.ExitStack() as undo:
        undo.callback(here.close)
        undo.callback(is_over.set)
        running = pool.submit(iterate)
        try:
            for item in here:
                if running.done():
                    running.result()
                yield from _arrived(came)
                yield item
            while last := came.get():
                yield from last
            running.result()
        finally:
            del running  # it keeps what was raised, and that this frame: what frames hold would outlive both


def _arrived[T](came: queue.SimpleQueue[tuple[T, ...]]) -> Iterator[T]:
    """What is there by now; the end stays for who waits for it."""
    for _ in range(came.qsize()):
        if item := came.get():
            yield from item
        else:
            came.put(item)
