"""One chunk on its way between tiers: a value that the cache makes, and whoever moves bytes carries out.

An orphan is what the cache keeps of one whose chunk is gone.
"""

from __future__ import annotations

from typing import NamedTuple


class Copy(NamedTuple):
    """A chunk's copy between a device page and a host slot; the direction is that of the list it is in.

    `copy_id` is never used twice.
    """

    copy_id: int
    page: int
    slot: int


class Orphan(NamedTuple):
    """A copy in flight whose chunk has gone on without it.

    It keeps the page and the slot that nobody else may use yet, 0 where there is none.
    """

    is_in: bool
    page: int
    slot: int
