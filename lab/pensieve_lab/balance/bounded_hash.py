"""Consistent hashing with bounded loads.

Owns: the rule. Does not know: where state is, beyond that a root's is where it was last sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pensieve_jax.balance.hashing import ConsistentHash
from pensieve_jax.balance.load import IncomingTurn, Load
from pensieve_jax.balance.ring import NUM_VIRTUAL_NODES


class BoundedHash(ConsistentHash):
    """The next replica clockwise that has no more than its share of the turns, times a constant.

    After Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018. A root that
    was sent to another replica returns as soon as there is room, to what is left of its state there.
    """

    def __init__(self, bound: float = 1.25, num_virtual_nodes: int = NUM_VIRTUAL_NODES) -> None:
        """`bound`: turns of a replica over the mean, above 1."""
        super().__init__(num_virtual_nodes)
        self._bound = bound

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        """See `Policy`."""
        num_turns = sum(load.num_turns for load in loads.values()) + 1
        limit = math.ceil(self._bound * num_turns / len(loads))
        for name in self._ring.clockwise(asked.root):
            if loads[name].num_turns < limit:
                return name
        raise AssertionError("no replica is below the mean")
