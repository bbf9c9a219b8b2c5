"""One chunk on its way between tiers: a value that the cache makes, and whoever moves bytes carries out."""

from __future__ import annotations

from typing import NamedTuple


class Copy(NamedTuple):
    """A chunk's copy between a device page and a host slot; the direction is that of the list it is in.

    `copy_id` is never used twice.
    """

    copy_id: int
    page: int
    slot: int
