"""An empty source of durable turns."""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.server.context.turn_index import PastTurn
from pensieve_jax.text import Message


class NoTurns:
    def find_chain(self, owner: str, before: bytes, reply: Message) -> PastTurn | None:
        return None

    def path(self, owner: str, turn_id: str) -> Sequence[PastTurn]:
        raise UnknownTurnError(turn_id)
