"""Free-list allocation of the places of one memory tier.

A place is a page of device memory or a slot of host memory.

Owns: the place numbers 1 .. num_places of a tier. It gives each one to one owner at a time. Number 0 means
"no place"; on the device it is a dummy page that padding points at.
Does not know: the owner of a place, or when it is safe to write there. A page freed while a step is in flight
may be allocated again at once, because the writes of a later step follow that step in program order.
Called by `ChunkStore`.
"""

from __future__ import annotations

from collections.abc import Set


class TierPool:
    """A fixed number of places, each for one chunk's KV over all layers; reuse is last in, first out."""

    def __init__(self, num_places: int) -> None:
        """Start with all places 1 .. num_places free."""
        self._num_places = num_places
        self._free = list(range(num_places, 0, -1))
        self._is_used = [False] * (num_places + 1)

    @property
    def num_places(self) -> int:
        """All places, free or in use, without number 0."""
        return self._num_places

    @property
    def num_free(self) -> int:
        """Places without an owner."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free place; raises IndexError if all places are in use."""
        place = self._free.pop()
        self._is_used[place] = True
        return place

    def free(self, place: int) -> None:
        """Return a place to the free list."""
        assert self._is_used[place], f"place {place} is freed twice"
        self._is_used[place] = False
        self._free.append(place)

    def check_integrity(self, owned: Set[int]) -> None:
        """Assert that free + used = total, and that the places in use are exactly `owned`."""
        free = set(self._free)
        assert len(free) == len(self._free), "a place is in the free list twice"
        assert 0 not in free and 0 not in owned, "number 0 was allocated"
        assert not free & owned, f"places both free and owned: {sorted(free & owned)}"
        assert len(free) + len(owned) == self._num_places, (
            f"{len(free)} free + {len(owned)} owned places; the total must be {self._num_places}"
        )
        used = {place for place, is_used in enumerate(self._is_used) if is_used}
        assert used == owned, f"places that are in use or owned, but not both: {sorted(used ^ owned)}"
