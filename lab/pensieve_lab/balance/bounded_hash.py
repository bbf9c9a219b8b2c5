"""Consistent hashing with bounded loads.

Owns: the rule.
Does not know: where KV caches are, except the replica that last served each root.
Called by the balance study.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pensieve_jax.balance.hashing import ConsistentHash
from pensieve_jax.balance.load import IncomingTurn, Load
from pensieve_jax.balance.ring import NUM_VIRTUAL_NODES


class BoundedHash(ConsistentHash):
    """Rule that chooses the next replica clockwise whose turns are below a constant times the mean.

    Follows Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018. A root
    that was sent to another replica returns as soon as there is room, and reuses what is left of its KV cache
    there.
    """

    def __init__(self, bound: float = 1.25, num_virtual_nodes: int = NUM_VIRTUAL_NODES) -> None:
        """Set `bound`, the largest number of turns of a replica relative to the mean; it must be above 1."""
        super().__init__(num_virtual_nodes)
        self._bound = bound

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        num_turns = sum(load.num_turns for load in loads.values()) + 1
        limit = math.ceil(self._bound * num_turns / len(loads))
        for name in self._ring.clockwise(asked.root):
            if loads[name].num_turns < limit:
                return name
        raise AssertionError("no replica is below the mean")
