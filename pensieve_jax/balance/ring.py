"""A ring of hashes, on which a key belongs to the next replica clockwise.

Owns: where replicas and keys lie. The same names give the same ring everywhere, whatever their order.
Does not know: loads.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

NUM_VIRTUAL_NODES = 100
"""Points of a replica on the ring, as in Ray Serve: its share of the keys is even to a tenth or so."""


def hash_of(key: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())


class HashRing:
    """Replicas by name, each at several points; `num_replicas` of them."""

    def __init__(
        self,
        names: Iterable[str],
        num_virtual_nodes: int = NUM_VIRTUAL_NODES,
        hash_key: Callable[[str], int] = hash_of,
    ) -> None:
        """Of these replicas. With another router's `hash_key` and names it is the ring of that router.

        Points are of "<name>:<number>" and keys of themselves, as Ray Serve has them.
        """
        self._hash_key = hash_key
        points = sorted(
            (hash_key(f"{name}:{number}"), name) for name in set(names) for number in range(num_virtual_nodes)
        )
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]
        self.num_replicas = len(set(self._names))

    def owner(self, key: str) -> str:
        """Whose key it is; LookupError on an empty ring."""
        if not self._names:
            raise LookupError("no replica is left")
        return self._names[bisect.bisect_right(self._hashes, self._hash_key(key)) % len(self._names)]

    def clockwise(self, key: str) -> Iterator[str]:
        """Every replica once, in the order of their next points from a key on; the first is its owner."""
        start, count = bisect.bisect_right(self._hashes, self._hash_key(key)), len(self._names)
        seen: set[str] = set()
        for offset in range(count):
            name = self._names[(start + offset) % count]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == self.num_replicas:
                    return
