"""What a front asks of a rule.

Owns: the protocol. Does not know: any rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from pensieve_jax.balance.load import IncomingTurn, Load


class Policy(Protocol):
    """Chooses a replica for a turn."""

    def set_members(self, names: Iterable[str]) -> None:
        """From now on these replicas take turns, and no others."""
        ...

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        """Who serves a turn.

        `loads` has every member: what it last reported, and what this front has sent it since. `now_s` never
        decreases. The turn is taken to be sent: a rule may remember where.
        """
        ...

    def name(self, asked: IncomingTurn, loads: Mapping[str, Load]) -> str:
        """What the root of a conversation that begins is called from now on; its own name, but for rules that
        place conversations by their names."""
        ...

    def home(self, asked: IncomingTurn) -> str:
        """Where a conversation of which nothing is known would go on; remembers nothing."""
        ...
