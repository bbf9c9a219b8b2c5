"""What ends while somebody reads what the history said before.

Owns: telling each reader what has ended since it began.
Does not know: what ends, or what is read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class Ends[K: Hashable]:
    """Of one server. Used by the event loop's thread only."""

    def __init__(self) -> None:
        self._readers: dict[int, set[K]] = {}

    @contextmanager
    def seen(self) -> Iterator[set[K]]:
        """What ends from now on, as long as the block lasts."""
        ended = set[K]()
        self._readers[id(ended)] = ended
        try:
            yield ended
        finally:
            del self._readers[id(ended)]

    def end(self, key: K) -> None:
        """Something ended."""
        for ended in self._readers.values():
            ended.add(key)
