"""What is remembered for a while, and of many things only the latest.

Owns: how long and how much is remembered.
Does not know: of what, or what time it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class Recent[K: Hashable, V]:
    """Values by key, in the order in which they were put. Used by the event loop's thread only."""

    def __init__(self, lifetime_s: float, most: int) -> None:
        """Nothing yet; at most `most` values, each for `lifetime_s` seconds."""
        self._lifetime_s = lifetime_s
        self._most = most
        self._found: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._found)

    def put(self, key: K, value: V, now_s: float) -> None:
        """Remember a value from now on, in place of an earlier one of its key."""
        self._found[key] = (value, now_s)
        self._found.move_to_end(key)
        forgotten_s = now_s - self._lifetime_s
        while len(self._found) > self._most or next(iter(self._found.values()))[1] <= forgotten_s:
            self._found.popitem(last=False)

    def get(self, key: K, now_s: float) -> V | None:
        """The value of a key; None where there is none, or its time is over."""
        value, put_s = self._found.get(key, (None, 0.0))
        return value if put_s > now_s - self._lifetime_s else None

    def drop(self, key: K, value: V) -> None:
        """Forget a key, if it has this value."""
        if key in self._found and self._found[key][0] == value:
            del self._found[key]
