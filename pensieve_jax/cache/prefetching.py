"""Copying in what queued requests will need, while others run.

Owns: for whom, in which order, and whose pages are not taken for it.
Does not know: what a request is, or when it is admitted.
Called by: `CacheManager` at the end of a scheduling pass.

What a queued sequence begins with, its trunks, is idle by role: whoever runs may take its pages. Only
prefetching does not, or what was copied in for one request would be taken for the next one's, and be copied
in again, step after step.
"""

from __future__ import annotations

from collections.abc import Iterator

from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.evictor import Evictor
from pensieve_jax.cache.sequence import CachedSequence, Role
from pensieve_jax.cache.states import Shelf


class Prefetcher:
    """For the queued sequences of one store.

    Attributes:
      num_chunks: that were copied in.
    """

    def __init__(self, store: ChunkStore, evictor: Evictor, *, max_num_copies: int) -> None:
        """At most `max_num_copies` are on their way in."""
        self._store = store
        self._evictor = evictor
        self._max_num_copies = max_num_copies
        self.num_chunks = 0

    def begin_copies(self, num_pages: int) -> None:
        """Copy in by arrival, leading chunks first, into `num_pages` pages at most, at nobody's cost."""
        store = self._store
        num_copies = min(num_pages, self._max_num_copies - store.num_copies_in)
        on_host = store.num_on[Role.QUEUED][Shelf.HOST] or store.num_on[Role.IDLE][Shelf.HOST]
        if num_copies <= 0 or not store.members[Role.QUEUED] or not on_host:
            return
        queued = store.members[Role.QUEUED]
        missing = sorted(filter(_is_on_host, queued), key=lambda sequence: sequence.arrival)
        if not missing:
            return
        trunks = {trunk for sequence in queued for trunk in sequence.lineage() if trunk is not sequence}
        for sequence, owner in _owners(missing):
            while owner.num_on[Shelf.HOST]:
                page = self._evictor.allocate_spare_page(trunks) if num_copies else None
                if page is None:
                    return
                index = owner.first_on(Shelf.HOST)
                store.swap_in(owner, index, page)
                sequence.fetched.add(index)
                self.num_chunks += 1
                num_copies -= 1


def _is_on_host(sequence: CachedSequence) -> bool:
    """Some of what it has, or begins with, is in host memory only."""
    if sequence.trunk is None:
        return sequence.num_on[Shelf.HOST] > 0
    return any(own.num_on[Shelf.HOST] for own in sequence.lineage())


def _owners(sequences: list[CachedSequence]) -> Iterator[tuple[CachedSequence, CachedSequence]]:
    """Each with those of its lineage, from the first chunk on."""
    for sequence in sequences:
        for owner in reversed(tuple(sequence.lineage())):
            yield sequence, owner
