"""A ring of hashes, on which a key belongs to the next replica clockwise.

Owns: the positions of replicas and keys. The same names give the same ring everywhere, in any order.
Does not know: loads.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

NUM_VIRTUAL_NODES = 100
"""Points of a replica on the ring, as in Ray Serve; a replica's share of the keys is even to about 10%."""


def hash_of(key: str) -> int:
    """Return a hash of 64 bits that is the same in every process."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest())


class HashRing:
    """Replicas by name, each at several points; `num_replicas` is their number."""

    def __init__(
        self,
        names: Iterable[str],
        num_virtual_nodes: int = NUM_VIRTUAL_NODES,
        hash_key: Callable[[str], int] = hash_of,
    ) -> None:
        """Place these replicas. With another router's `hash_key` and names, the ring equals that router's.

        Points are the hashes of "<name>:<number>", and keys are hashed as they are, as in Ray Serve.
        """
        self._hash_key = hash_key
        points = sorted(
            (hash_key(f"{name}:{number}"), name) for name in set(names) for number in range(num_virtual_nodes)
        )
        self._hashes = [point for point, _ in points]
        self._names = [name for _, name in points]
        self.num_replicas = len(set(self._names))

    def owner(self, key: str) -> str:
        """Return the replica that owns a key; raise LookupError on an empty ring."""
        if not self._names:
            raise LookupError("the ring has no replicas")
        return self._names[bisect.bisect_right(self._hashes, self._hash_key(key)) % len(self._names)]

    def clockwise(self, key: str) -> Iterator[str]:
        """Yield every replica once, in the order of their next points after a key; the first is its owner."""
        start, count = bisect.bisect_right(self._hashes, self._hash_key(key)), len(self._names)
        seen: set[str] = set()
        for offset in range(count):
            name = self._names[(start + offset) % count]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == self.num_replicas:
                    return
