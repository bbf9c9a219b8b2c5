"""Rules by loads: the least of them, or where the state is unless waiting costs more than recomputing.

Owns: both rules, and the latter's memory of where conversations are.
Does not know: how loads are reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import islice

from pensieve_jax.balance.hashing import ConsistentHash
from pensieve_jax.balance.load import IncomingTurn, Load, Speeds
from pensieve_jax.balance.ring import NUM_VIRTUAL_NODES

_MAX_HOMES = 1_000_000


class LeastTokens(ConsistentHash):
    """The replica with the fewest tokens queued and running, wherever the state is."""

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        """See `Policy`."""
        return min(loads, key=lambda name: loads[name].context_tokens)

    def home(self, asked: IncomingTurn) -> str:
        """See `Policy`: anywhere."""
        return self._ring.owner(asked.conversation)


class StateAware(ConsistentHash):
    """Where the state is, unless an answer from there would take longer than one without the state elsewhere.

    A conversation is at home where it was last served; one that is not known, where its root's hash says. A
    first turn has no state to lose, so it goes to whoever answers soonest. Only a few replicas are looked at
    besides the home, those that follow the conversation's hash on the ring: many fronts with the same old
    loads then do not all find the same one.
    """

    def __init__(
        self,
        speeds: Speeds,
        *,
        others: float = 1.0,
        least_gain_s: float = 0.0,
        num_candidates: int = 8,
        num_virtual_nodes: int = NUM_VIRTUAL_NODES,
    ) -> None:
        """Knowing no conversation.

        Args:
          speeds: of the replicas.
          others: what a second of other turns counts, beside one of the turn that is sent; 0 is a rule
            that cares for nobody else, and moves conversations all the time.
          least_gain_s: a conversation with state leaves its home only for so much; loads are old, and who
            leaves for little comes back for little.
          num_candidates: replicas that are looked at besides the home.
          num_virtual_nodes: see `HashRing`.
        """
        super().__init__(num_virtual_nodes)
        self._speeds = speeds
        self._others = others
        self._least_gain_s = least_gain_s
        self._num_candidates = num_candidates
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._members: frozenset[str] = frozenset()

    def set_members(self, names: Iterable[str]) -> None:
        """See `Policy`. Conversations stay where they are: a replica that joins is given those that begin."""
        self._members = frozenset(names)
        super().set_members(self._members)

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        """See `Policy`."""
        chosen = home = self.home(asked)
        least_s = self._speeds.cost_s(loads[home], asked, asked.prompt_tokens, self._others)
        least_s -= self._least_gain_s if asked.history_tokens else 0.0
        num_tokens = asked.prompt_tokens + asked.history_tokens
        for name in islice(self._ring.clockwise(asked.conversation), self._num_candidates):
            if (
                name != home
                and (seconds := self._speeds.cost_s(loads[name], asked, num_tokens, self._others)) < least_s
            ):
                chosen, least_s = name, seconds
        self._homes[asked.conversation] = chosen
        self._homes.move_to_end(asked.conversation)
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)
        return chosen

    def home(self, asked: IncomingTurn) -> str:
        """See `Policy`."""
        known = self._homes.get(asked.conversation)
        return known if known in self._members and known is not None else self._ring.owner(asked.root)
