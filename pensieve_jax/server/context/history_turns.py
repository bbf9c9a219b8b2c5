"""The turns of a history, as contexts look for them.

Owns: the translation from what the history's reader gives.
Does not know: how turns are matched, SQL.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax.history.reader import HistoryReader, TurnView
from pensieve_jax.server.context.chains import canonical_text
from pensieve_jax.server.context.turn_index import PastTurn


class HistoryTurns:
    """A `TurnSource` of the durable turns. Safe to share by threads, as the reader is."""

    def __init__(self, reader: HistoryReader) -> None:
        """Of an open history."""
        self._reader = reader

    def find_chain(self, owner: str, before: bytes, reply: str) -> PastTurn | None:
        """The newest turn with this chain before its reply and this reply, among the newest of the chain."""
        for view in self._reader.find_chain(owner, before):
            if canonical_text(view.output_text or "") == reply:
                return _past(owner, view)
        return None

    def path(self, owner: str, turn_id: str) -> Sequence[PastTurn]:
        """The turns from the first of a tree to this one; raises UnknownTurnError."""
        return [_past(owner, view) for view in self._reader.turn_path(owner, turn_id)]


def _past(owner: str, view: TurnView) -> PastTurn:
    return PastTurn(
        turn_id=view.turn_id,
        parent_id=view.parent_id,
        owner=owner,
        before=view.chain,
        num_tokens=view.num_tokens,
        messages=view.messages,
        output_token_ids=view.output_token_ids,
        output_text=view.output_text,
        finish_reason=view.finish_reason,
        durable=True,
    )
