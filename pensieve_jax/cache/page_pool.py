"""The places of one tier of memory: which are free, and how many chunks refer to the others.

Owns: the numbers 1 .. num_pages of a tier (pages of device memory, slots of host memory) and their reference
counts. Number 0 means none; on the device it is a dummy page that padding points at.
Does not know: whose place it is, or when it is safe to write: pages freed while a step is in flight may be
given away at once, because a later step's writes come after it in program order.
"""

from __future__ import annotations


class PagePool:
    """A fixed number of places, each for one chunk's KV over all layers; last freed, first reused."""

    def __init__(self, num_pages: int) -> None:
        """All of 1 .. num_pages free."""
        self._num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))
        self._num_references = [0] * (num_pages + 1)

    @property
    def num_pages(self) -> int:
        """Pages in all, the dummy not counted."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def allocate(self) -> int:
        """Take a free page, with one reference; `IndexError` where there is none."""
        page = self._free.pop()
        self._num_references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reference to a page in use."""
        assert self._num_references[page] > 0, f"page {page} is free and cannot be shared"
        self._num_references[page] += 1

    def free(self, page: int) -> None:
        """Give up one reference; the last one frees the page."""
        assert self._num_references[page] > 0, f"page {page} is freed twice"
        self._num_references[page] -= 1
        if self._num_references[page] == 0:
            self._free.append(page)

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Assert free + used = total and that each page has as many references as owners."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert 0 not in free and 0 not in owners, "the dummy page was given away"
        assert not free & owners.keys(), f"pages both free and owned: {sorted(free & owners.keys())}"
        assert len(free) + len(owners) == self._num_pages, (
            f"{len(free)} free + {len(owners)} owned pages are not {self._num_pages}"
        )
        for page, num_owners in owners.items():
            assert self._num_references[page] == num_owners, (
                f"page {page} has {self._num_references[page]} references and {num_owners} owners"
            )
