"""Who waits, in the order in which they are served.

Owns: the order: by priority, then those that were suspended, then by arrival.
Does not know: rows, budgets, or KV state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter

from pensieve_jax.rebatching.query import Query

type Rank = tuple[int, bool, int]
_RANK = itemgetter(0)


def rank(query: Query) -> Rank:
    """The smaller, the sooner it is served."""
    return -query.priority, not query.suspended, query.serial


class QueryQueue:
    """Queries that are neither in the ring nor done."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Query]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Query]:
        """From the first on; the line must not change meanwhile."""
        return map(itemgetter(1), self._entries)

    @property
    def head(self) -> Query:
        """Return the query that is served next; the line must not be empty."""
        return self._entries[0][1]

    def window(self, size: int) -> list[Query]:
        """The first so many."""
        return list(islice(self, size))

    def add(self, query: Query) -> None:
        """Wait; its rank must not change until it is removed."""
        insort(self._entries, (rank(query), query), key=_RANK)

    def remove(self, query: Query) -> None:
        """Remove a query that waits in the line and whose rank is unchanged."""
        index = bisect_left(self._entries, rank(query), key=_RANK)
        assert index < len(self._entries) and self._entries[index][1] is query
        del self._entries[index]
