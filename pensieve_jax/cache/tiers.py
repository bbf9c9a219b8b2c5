"""What the cache manager needs of a tier of memory; the device pool is the one tier that exists.

This is the seam for a host tier: it hands out slots like any other tier, and the engine's `Transfers`
moves bytes between the two.
"""

from __future__ import annotations

from typing import Protocol


class Tier(Protocol):
    """A fixed number of equal slots, each holding one chunk's KV over all layers."""

    @property
    def num_pages(self) -> int:
        """Slots in all."""
        ...

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        ...

    def allocate(self) -> int:
        """Take a free slot with one reference; the caller has checked `num_free`."""
        ...

    def free(self, page: int) -> None:
        """Give up one reference; the slot is free when the last one goes."""
        ...

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Assert that references agree with `owners` (page -> owning chunks) and none is lost."""
        ...
