"""The places of one tier of memory: which are free.

Owns: the numbers 1 .. num_places of a tier (pages of device memory, slots of host memory), and that each is
given to one owner at a time. Number 0 means none; on the device it is a dummy page that padding points at.
Does not know: whose place it is, or when it is safe to write: pages freed while a step is in flight may be
given away at once, because a later step's writes come after it in program order.
"""

from __future__ import annotations

from collections.abc import Set


class TierPool:
    """A fixed number of places, each for one chunk's KV over all layers; last freed, first reused."""

    def __init__(self, num_places: int) -> None:
        """All of 1 .. num_places free."""
        self._num_places = num_places
        self._free = list(range(num_places, 0, -1))
        self._is_used = [False] * (num_places + 1)

    @property
    def num_places(self) -> int:
        """Places in all, number 0 not counted."""
        return self._num_places

    @property
    def num_free(self) -> int:
        """Places that nobody owns."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free place; `IndexError` where there is none."""
        place = self._free.pop()
        self._is_used[place] = True
        return place

    def free(self, place: int) -> None:
        """Give a place back."""
        assert self._is_used[place], f"place {place} is freed twice"
        self._is_used[place] = False
        self._free.append(place)

    def check_integrity(self, owned: Set[int]) -> None:
        """Assert free + used = total, and that the places in use are those that have an owner."""
        free = set(self._free)
        assert len(free) == len(self._free), "a place is in the free list twice"
        assert 0 not in free and 0 not in owned, "number 0 was given away"
        assert not free & owned, f"places both free and owned: {sorted(free & owned)}"
        assert len(free) + len(owned) == self._num_places, (
            f"{len(free)} free + {len(owned)} owned places are not {self._num_places}"
        )
        used = {place for place, is_used in enumerate(self._is_used) if is_used}
        assert used == owned, f"places in use, or owned, but not both: {sorted(used ^ owned)}"
