"""The C library's allocator in a server, whose requests take many megabytes for a moment.

Owns: two settings of glibc. Does not know: who allocates. Called by `server.app`.
"""

from __future__ import annotations

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 2**20
_NUM_ARENAS: Final = 2


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
