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

_TRIES = 32  # for each replica: that none of so many names falls on one is a chance of e^-32


class RootPlacement(ConsistentHash):
    """The plain hash; but who begins a conversation is named after the replica that answers it at least cost.

    Names are tried until one falls on that replica. The name travels with the conversation, in its ids, so
    no front remembers anything, and any of them, or a plain hash, finds the replica again. What a turn costs
    is `Speeds.cost_s`; only some replicas are looked at, so that many fronts with the same old loads do not
    all find the same one.
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
        """`num_candidates` replicas are looked at: the next ones on the ring from the first name on.

        `speeds` may be set anew. `other_names`: what else a root may be called, without end; if nobody says,
        the same with a number behind it.
        """
        super().__init__(num_virtual_nodes, hash_key)
        self.speeds = speeds
        self._num_candidates = num_candidates
        self._other_names = other_names or _numbered

    def name(self, asked: IncomingTurn, loads: Mapping[str, Load]) -> str:
        """See `Policy`. Replicas of which no load is given take no conversation that begins."""
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
