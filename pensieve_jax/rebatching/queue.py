"""Queue of waiting queries, in the order of service.

Owns: the order, which is by priority, then suspended queries first, then by arrival.
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
    """Return a sort key; the smallest is served first."""
    return -query.priority, not query.suspended, query.serial


class QueryQueue:
    """Queries that are neither in the ring nor done."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Query]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Query]:
        """Iterate in the order of service. The queue must not change meanwhile."""
        return map(itemgetter(1), self._entries)

    @property
    def head(self) -> Query:
        """Query that is served next. The queue must not be empty."""
        return self._entries[0][1]

    def window(self, size: int) -> list[Query]:
        """Return the first `size` queries."""
        return list(islice(self, size))

    def add(self, query: Query) -> None:
        """Add a query. Its rank must not change until it is removed."""
        insort(self._entries, (rank(query), query), key=_RANK)

    def remove(self, query: Query) -> None:
        """Remove a query of the queue whose rank has not changed."""
        index = bisect_left(self._entries, rank(query), key=_RANK)
        assert index < len(self._entries) and self._entries[index][1] is query
        del self._entries[index]
