"""Consistent hashing by root, without any state per root.

Owns: the rule. Does not know: where KV state is; it assumes that a root's is where the root was last sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pensieve_jax.balance.load import IncomingTurn, Load
from pensieve_jax.balance.ring import NUM_VIRTUAL_NODES, HashRing, hash_of


class ConsistentHash:
    """A rule that gives each root one replica, which depends only on the names of the replicas."""

    def __init__(
        self, num_virtual_nodes: int = NUM_VIRTUAL_NODES, hash_key: Callable[[str], int] = hash_of
    ) -> None:
        """Start without members; see `HashRing`."""
        self._num_virtual_nodes, self._hash_key = num_virtual_nodes, hash_key
        self._ring = HashRing(())

    def set_members(self, names: Iterable[str]) -> None:
        """Replace the replicas that take turns."""
        self._ring = HashRing(names, self._num_virtual_nodes, self._hash_key)

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        """Return the replica that owns the root; raise LookupError without replicas."""
        return self._ring.owner(asked.root)

    def name(self, asked: IncomingTurn, loads: Mapping[str, Load]) -> str:
        """Return the root's own name: this rule renames no root."""
        return asked.root

    def home(self, asked: IncomingTurn) -> str:
        """Return the replica for a conversation without known state: the owner of its root."""
        return self._ring.owner(asked.root)
