"""Protocol of a balancing rule.

Owns: the protocol.
Does not know: any rule.
Called by simulated fleets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from pensieve_jax.balance.load import IncomingTurn, Load


class Policy(Protocol):
    """Rule that chooses a replica for each turn."""

    def set_members(self, names: Iterable[str]) -> None:
        """Replace the set of replicas that accept turns."""
        ...

    def choose(self, asked: IncomingTurn, loads: Mapping[str, Load], now_s: float) -> str:
        """Return the name of the replica that serves a turn.

        `loads` has every member: its last report plus what this front end has sent it since. `now_s` never
        decreases. The caller sends the turn to the returned replica, so a rule may record the choice.
        """
        ...

    def name(self, asked: IncomingTurn, loads: Mapping[str, Load]) -> str:
        """Return the root name for a new conversation.

        Rules that place conversations by name return a name of their choice; others return the name
        unchanged.
        """
        ...

    def home(self, asked: IncomingTurn) -> str:
        """Return the replica for a conversation without a recorded location, without recording it."""
        ...
