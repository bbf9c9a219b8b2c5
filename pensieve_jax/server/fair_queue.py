"""A queue that serves the owners of its entries in turn, by what their entries cost.

Owns: the order of entries, by virtual token counters (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024).
Does not know: what entries are, what cost is measured in, or when an entry may leave. Called by
`server.http.admission`, `server.change_queue` and `server.workers`.

Each owner has a counter of the cost that it was served. The next entry is the oldest of the owner with the
smallest counter. So owners that always have entries are served the same cost over time, however many entries
each has. An owner without entries saves no credit for later: when it comes back, its counter rises to the
smallest one of the owners that wait. What was served while the queue was empty does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class FairQueue[T]:
    """Entries of several owners, first come first served for each owner."""

    def __init__(self) -> None:
        self._entries: dict[str, deque[tuple[T, float]]] = {}  # only of owners that wait, by their arrival
        self._served: dict[str, float] = {}  # since the queue was empty

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self._entries.values()))

    def add(self, owner: str, entry: T, cost: float) -> None:
        """Add an entry behind the others of its owner; `cost` is at least 0, in any unit."""
        if owner not in self._entries:
            least = min((self._served[one] for one in self._entries), default=0.0)
            self._served[owner] = max(least, self._served.get(owner, 0.0))
            self._entries[owner] = deque()
        self._entries[owner].append((entry, cost))

    def first(self, may_leave: Callable[[str], bool] | None = None) -> T | None:
        """Return the entry that leaves next, or None. An owner that comes later may get in before it.

        `may_leave` says whether an owner's entry may leave now. None lets all owners' entries leave.
        """
        owner = self._next_owner(may_leave)
        return None if owner is None else self._entries[owner][0][0]

    def take(self, may_leave: Callable[[str], bool] | None = None) -> T:
        """Remove the first entry, charge its owner, and return it; raise IndexError without one."""
        owner = self._next_owner(may_leave)
        if owner is None:
            raise IndexError("take from an empty queue")
        entry, cost = self._entries[owner].popleft()
        self._served[owner] += cost
        self._forget_empty(owner)
        return entry

    def remove(self, owner: str, entry: T) -> bool:
        """Remove an entry without charging its owner; return whether it was there."""
        entries = self._entries.get(owner, deque())
        for index, (other, _) in enumerate(entries):
            if other is entry:
                del entries[index]
                self._forget_empty(owner)
                return True
        return False

    def charge(self, owner: str, cost: float) -> None:
        """Charge an owner for entries that cost more than they were said to, or less if `cost` is below 0."""
        if owner in self._served:
            self._served[owner] += cost

    # Private methods

    def _next_owner(self, may_leave: Callable[[str], bool] | None) -> str | None:
        owners = filter(may_leave, self._entries) if may_leave is not None else self._entries
        return min(owners, key=self._served.__getitem__, default=None)

    def _forget_empty(self, owner: str) -> None:
        if not self._entries[owner]:
            del self._entries[owner]
        if not self._entries:
            self._served.clear()
