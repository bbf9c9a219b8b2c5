"""The places of one tier of memory: which are free.

Owns: the numbers 1 .. num_pages of a tier (pages of device memory, slots of host memory), and that each is
given to one owner at a time. Number 0 means none; on the device it is a dummy page that padding points at.
Does not know: whose place it is, or when it is safe to write: pages freed while a step is in flight may be
given away at once, because a later step's writes come after it in program order.
"""

from __future__ import annotations

from collections.abc import Set


class PagePool:
    """A fixed number of places, each for one chunk's KV over all layers; last freed, first reused."""

    def __init__(self, num_pages: int) -> None:
        """All of 1 .. num_pages free."""
        self._num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._is_used = [False] * (num_pages + 1)

    @property
    def num_pages(self) -> int:
        """Pages in all, the dummy not counted."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free page; `IndexError` where there is none."""
        page = self._free.pop()
        self._is_used[page] = True
        return page

    def free(self, page: int) -> None:
        """Give a page back."""
        assert self._is_used[page], f"page {page} is freed twice"
        self._is_used[page] = False
        self._free.append(page)

    def check_integrity(self, owned: Set[int]) -> None:
        """Assert free + used = total, and that the pages in use are those that have an owner."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert 0 not in free and 0 not in owned, "the dummy page was given away"
        assert not free & owned, f"pages both free and owned: {sorted(free & owned)}"
        assert len(free) + len(owned) == self._num_pages, (
            f"{len(free)} free + {len(owned)} owned pages are not {self._num_pages}"
        )
        used = {page for page, is_used in enumerate(self._is_used) if is_used}
        assert used == owned, f"pages in use, or owned, but not both: {sorted(used ^ owned)}"
