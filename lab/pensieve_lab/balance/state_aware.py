"""Rules that go by loads: fewest tokens, or the replica with the KV cache unless waiting costs more.

Owns: both rules, and the second one's memory of where conversations are.
Does not know: how loads are reported.
Called by the balance study.
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
    """Rule that chooses the replica with the fewest queued and running tokens and ignores KV caches."""

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        return min(loads, key=lambda name: loads[name].context_tokens)

    def home(self, asked: IncomingTurn) -> str:
        """Return an arbitrary replica by the conversation's hash, since this rule has no homes."""
        return self._ring.owner(asked.conversation)


class StateAware(ConsistentHash):
    """Rule that serves a turn where its KV cache is, unless another replica answers sooner without it.

    The home of a conversation is the replica that last served it; the home of an unknown one is its root's
    hash owner. A first turn has no KV cache to lose, so the fastest replica gets it. Besides the home, only a
    few replicas are considered: those that follow the conversation's hash on the ring. This keeps many front
    ends with equally old loads from all choosing the same replica.
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
        """Start without any known conversation.

        Args:
          speeds: of the replicas.
          others: weight of a second of delay to other turns, relative to one of the turn that is sent. With 0
            the rule ignores other turns and moves conversations all the time.
          least_gain_s: smallest gain for which a conversation with a KV cache leaves its home. Loads are
            stale, so a conversation that leaves for a small gain soon returns for a small gain.
          num_candidates: replicas that are considered besides the home.
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
        """Update the members. Conversations keep their homes; a joining replica only gets new ones."""
        self._members = frozenset(names)
        super().set_members(self._members)

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
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
        known = self._homes.get(asked.conversation)
        return known if known in self._members and known is not None else self._ring.owner(asked.root)
