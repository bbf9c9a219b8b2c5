"""Consistent hashing of roots whose names are chosen so that they fall on a replica with room.

Owns: the rule, and the choice of a name.
Does not know: how a name is written into ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, islice

from pensieve_jax.balance.hashing import ConsistentHash
from pensieve_jax.balance.load import IncomingTurn, Load, Speeds
from pensieve_jax.balance.ring import NUM_VIRTUAL_NODES, hash_of

_TRIES = 32  # per replica: the chance that no tried name falls on a given replica is e^-32


class RootPlacement(ConsistentHash):
    """Consistent hashing that names a new conversation after the replica that answers it at the lowest cost.

    Names are tried until one falls on that replica. The name travels in the conversation's ids, so front ends
    store nothing, and each of them, or plain hashing, finds the replica again. The cost of a turn is
    `Speeds.cost_s`. Only some replicas are considered, so that many front ends with the same outdated loads
    do not all choose the same one.
    """

    def __init__(
        self,
        speeds: Speeds,
        *,
        num_candidates: int = 8,
        num_virtual_nodes: int = NUM_VIRTUAL_NODES,
        hash_key: Callable[[str], int] = hash_of,
        other_names: Callable[[str], Iterable[str]] | None = None,
    ) -> None:
        """Start without members.

        Args:
          speeds: speed of the replicas; it may be replaced later.
          num_candidates: number of replicas to consider: the next ones on the ring, from the first name on.
          num_virtual_nodes, hash_key: see `HashRing`.
          other_names: returns an endless series of other names of a root; None appends numbers to it.
        """
        super().__init__(num_virtual_nodes, hash_key)
        self.speeds = speeds
        self._num_candidates = num_candidates
        self._other_names = other_names or _numbered

    def name(self, asked: IncomingTurn, loads: Mapping[str, Load]) -> str:
        """Return a name of the root that falls on the cheapest replica, or its own name as a last resort.

        Replicas without a known load get no new conversations.
        """
        known = (name for name in self._ring.clockwise(asked.root) if name in loads)
        candidates = list(islice(known, self._num_candidates))
        if not candidates:
            return asked.root
        chosen = min(candidates, key=lambda name: self.speeds.cost_s(loads[name], asked, asked.prompt_tokens))
        names = chain((asked.root,), self._other_names(asked.root))
        tried = islice(names, _TRIES * self._ring.num_replicas)
        return next((name for name in tried if self._ring.owner(name) == chosen), asked.root)


def _numbered(root: str) -> Iterator[str]:
    return (f"{root}-{number}" for number in count(1))
