"""The C library's allocator in a server, whose requests take many megabytes for a moment.

Owns: two settings of glibc, and when free memory is returned. Does not know: who allocates. Called by
`server.app`.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
from pathlib import Path
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 2**20
_NUM_ARENAS: Final = 2
_GROWTH_BYTES: Final = 32 * 2**20
_PERIOD_S: Final = 5.0


def return_large_blocks() -> bool:
    """Let blocks of a megabyte or more go back to the system when they are freed; return whether they will.

    By default glibc raises that size to 32 MiB as such blocks are freed, and gives each thread an arena. Then
    bodies and encodings of long requests stay resident: over a gigabyte after an hour of them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_M_ARENA_MAX, _NUM_ARENAS))


async def return_free_memory(period_s: float = _PERIOD_S) -> None:
    """Return what is free between blocks that are not, again and again while the process is larger than now.

    Texts of a few kilobytes each, such as thousands of messages, come from the heap. It shrinks from its end
    only, so one text that stays would keep all before it. Does nothing with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    at_first = _num_resident_bytes()
    while True:
        await asyncio.sleep(period_s)
        if _num_resident_bytes() > at_first + _GROWTH_BYTES:
            await asyncio.to_thread(trim, 0)


def _num_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
