"""The pages of the requests that arrived before another one, and whether it has room beside them.

Owns: the sum of these pages, and the limit that the reserve sets.
Does not know: which requests are running or queued; its caller adds them in order of arrival.
"""

from __future__ import annotations

from pensieve_jax.cache.sequence import CachedSequence
from pensieve_jax.cache.states import EvictionClass

_WITH_PAGE = (EvictionClass.DIRTY, EvictionClass.CLEAN, EvictionClass.ARRIVING)


class EarlierPages:
    """Pages that a request cannot get: those of the requests that arrived before it.

    All other pages are available to it sooner or later: they are free or idle, later arrivals give them up,
    or a copy in flight ends.
    """

    def __init__(self, num_pages: int, num_reserved: int, chunk_tokens: int) -> None:
        """Start without requests; `num_reserved` pages must stay available if any of them runs."""
        self._num_pages = num_pages
        self._num_reserved = num_reserved
        self._chunk_tokens = chunk_tokens
        self._num_held = 0
        self._trunks: set[CachedSequence] = set()
        self._has_running = False

    def add_running(self, *sequences: CachedSequence) -> None:
        """Add running sequences, which have a page for every chunk, as their trunks have."""
        self._has_running = self._has_running or bool(sequences)
        self._num_held += sum([len(own.chunks) - own.num_shared for own in sequences])
        for trunk in {own.trunk for own in sequences}:
            while trunk is not None and trunk not in self._trunks:
                self._num_held += len(trunk.chunks) - trunk.num_shared
                self._trunks.add(trunk)
                trunk = trunk.trunk

    def add_queued(self, sequence: CachedSequence) -> None:
        """Add a queued sequence: it keeps the pages that it has, except those of its trunks."""
        num_by_class = sequence.num_by_class
        for eviction_class in _WITH_PAGE:
            self._num_held += num_by_class[eviction_class]

    def leave_room(self, sequence: CachedSequence, num_tokens: int) -> bool:
        """Return whether a queued sequence of `num_tokens` tokens has room beside them, and the reserve."""
        num_chunks = max(-(-num_tokens // self._chunk_tokens), len(sequence.chunks))
        trunk = sequence.trunk
        while trunk is not None:
            if trunk in self._trunks:
                num_chunks -= len(trunk.chunks)
                break
            trunk = trunk.trunk
        num_reserved = self._num_reserved if self._has_running else 0
        return self._num_held + num_chunks <= self._num_pages - num_reserved
