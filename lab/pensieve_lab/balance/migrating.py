"""Consistent hashing that moves the hottest roots away from a replica that stays overloaded.

Owns: the rule, including what counts as overloaded and for how long. A root moves as a whole, with all its
conversations.
Does not know: how large their KV caches are.
Called by the balance study.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pensieve_jax.balance.hashing import ConsistentHash
from pensieve_jax.balance.load import IncomingTurn, Load
from pensieve_jax.balance.ring import NUM_VIRTUAL_NODES

_FORGOTTEN = 10.0  # in units of `fade_s`: a root that is unused for this long returns to its hash owner


@dataclass(slots=True)
class _Root:
    """Recent activity and location of one root. `heat` is its context tokens with exponential decay."""

    replica: str
    heat: float = 0.0
    seen_s: float = -math.inf
    moved_s: float = -math.inf


class MigratingHash(ConsistentHash):
    """Consistent hashing with exceptions for moved roots.

    Loads are checked every `every_s` seconds. A replica is overloaded if its smoothed context tokens exceed
    `high` times the mean in two checks in a row. It gives its hottest roots to the least loaded replicas
    until its load would fall to the mean. A moved root stays for at least `rest_s` seconds, and returns home
    once it is forgotten.
    """

    def __init__(
        self,
        high: float = 1.3,
        *,
        every_s: float = 1.0,
        rest_s: float = 30.0,
        fade_s: float = 30.0,
        smooth_s: float = 10.0,
        max_moves: int = 4,
        num_virtual_nodes: int = NUM_VIRTUAL_NODES,
    ) -> None:
        """Set the parameters; heat decays with time constant `fade_s`, loads with `smooth_s`."""
        super().__init__(num_virtual_nodes)
        self._high, self._every_s, self._rest_s, self._fade_s = high, every_s, rest_s, fade_s
        self._max_moves, self._smooth_s = max_moves, smooth_s
        self._roots: dict[str, _Root] = {}
        self._members: frozenset[str] = frozenset()
        self._over: frozenset[str] = frozenset()
        self._looked_s = -math.inf
        self._faded: dict[str, float] = {}

    def set_members(self, names: Iterable[str]) -> None:
        """Update the members. A root whose replica is gone returns to its hash owner."""
        self._members = frozenset(names)
        super().set_members(self._members)
        for name, root in self._roots.items():
            if root.moved_s == -math.inf or root.replica not in self._members:
                root.replica, root.moved_s = self._ring.owner(name), -math.inf

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        if now_s >= self._looked_s + self._every_s:
            self._look(loads, now_s)
        root = self._roots.get(asked.root)
        if root is None:
            root = self._roots[asked.root] = _Root(self._ring.owner(asked.root))
        root.heat = self._heat(root, now_s) + asked.prompt_tokens + asked.history_tokens
        root.seen_s = now_s
        return root.replica

    def home(self, asked: IncomingTurn) -> str:
        root = self._roots.get(asked.root)
        return self._ring.owner(asked.root) if root is None else root.replica

    def _heat(self, root: _Root, now_s: float) -> float:
        return root.heat * math.exp((root.seen_s - now_s) / self._fade_s) if root.heat else 0.0

    def _look(self, loads: Mapping[str, Load], now_s: float) -> None:
        left = math.exp((self._looked_s - now_s) / self._smooth_s) if self._smooth_s else 0.0
        self._looked_s = now_s
        self._faded = {
            name: load.context_tokens + left * (self._faded.get(name, 0.0) - load.context_tokens)
            for name, load in loads.items()
        }
        mean = sum(self._faded.values()) / len(loads)
        over = frozenset(name for name, tokens in self._faded.items() if tokens > self._high * mean)
        if still := over & self._over:
            self._relieve(still, dict(self._faded), mean, now_s)
        self._over = over

    def _relieve(self, still: frozenset[str], tokens: dict[str, float], mean: float, now_s: float) -> None:
        """Move roots away from the replicas in `still`, assuming that load is proportional to heat."""
        heats: dict[str, list[tuple[float, str]]] = {name: [] for name in still}
        totals = dict.fromkeys(still, 0.0)
        for name, root in list(self._roots.items()):
            heat = self._heat(root, now_s)
            if now_s - root.seen_s > self._fade_s * _FORGOTTEN:
                del self._roots[name]
            elif root.replica in still:
                totals[root.replica] += heat
                if now_s >= root.moved_s + self._rest_s:
                    heats[root.replica].append((heat, name))
        for replica in sorted(still):
            load, num_moves = tokens[replica], 0
            for heat, name in sorted(heats[replica], reverse=True):
                if num_moves == self._max_moves or tokens[replica] <= mean:
                    break
                moved = load * heat / max(totals[replica], 1.0)
                target = min(tokens, key=tokens.__getitem__)
                if tokens[target] + moved >= tokens[replica]:
                    continue  # moving it would only overload the other replica
                root = self._roots[name]
                root.replica, root.moved_s = target, now_s
                tokens[target] += moved
                tokens[replica] -= moved
                num_moves += 1
