"""What was dropped, when and why: the record behind `Engine.explain`.

Owns: which drops are still of interest. Does not know: what is in memory now, or who asks.
Called by: `Engine`, which notes every step's drops, and `ConversationTable`, whose owners make them void.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from pensieve_jax.cache import Drop, DropReason
from pensieve_jax.core.clock import Clock

_MAX_NUM_SEQUENCES = 4096  # whose drops are remembered, the latest


class DropRecord(NamedTuple):
    """A drop, and when it was decided, in seconds of the engine's clock."""

    at_s: float
    reason: DropReason
    worth: float | None


class DropJournal:
    """The latest drop of every chunk, of the conversations that lost something most recently."""

    def __init__(self, clock: Clock) -> None:
        """Nothing was dropped."""
        self.clock = clock
        self.interrupted_s: float | None = None
        self._drops: OrderedDict[str, dict[int, DropRecord]] = OrderedDict()

    def note(self, drops: Sequence[Drop]) -> None:
        """These were dropped just now."""
        if not drops:
            return
        now_s = self.clock.now()
        for drop in drops:
            of_conversation = self._drops.setdefault(drop.conversation_id, {})
            of_conversation[drop.index] = DropRecord(now_s, drop.reason, drop.worth)
            self._drops.move_to_end(drop.conversation_id)
        while len(self._drops) > _MAX_NUM_SEQUENCES:
            self._drops.popitem(last=False)

    def of(self, sequence_id: str) -> dict[int, DropRecord]:
        """By chunk, of what is still known."""
        return self._drops.get(sequence_id, {})

    def forget(self, conversation_id: str) -> None:
        """A conversation was changed by its owner: what was dropped before explains nothing any more."""
        self._drops.pop(conversation_id, None)

    def lose_all(self) -> None:
        """Everything in memory was given up just now, after an interrupt."""
        self._drops.clear()
        self.interrupted_s = self.clock.now()
