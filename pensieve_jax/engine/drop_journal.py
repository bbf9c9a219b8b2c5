"""What was dropped, when and why: the record behind `Engine.explain`.

Owns: which drops are still of interest. Does not know: what is in memory now, or who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from pensieve_jax.cache import Drop, DropReason
from pensieve_jax.core.clock import Clock

_MAX_NUM_RECORDS = 200_000  # some 30 MB; conversations that lost something longest ago are forgotten first


class DropRecord(NamedTuple):
    """A drop, and when it was decided, in seconds of the engine's clock."""

    at_s: float
    reason: DropReason
    worth: float | None


class DropJournal:
    """The latest drop of every chunk, of the conversations that lost something most recently.

    What is said of a conversation goes for what several share as well, by the id of its sequence.
    """

    def __init__(self, clock: Clock) -> None:
        """Nothing was dropped."""
        self.clock = clock
        self._drops: OrderedDict[str, dict[int, DropRecord]] = OrderedDict()
        self._num_records = 0

    def note(self, drop: Drop) -> None:
        """It was dropped just now."""
        of_conversation = self._drops.setdefault(drop.conversation_id, {})
        self._num_records += drop.index not in of_conversation
        of_conversation[drop.index] = DropRecord(self.clock.now(), drop.reason, drop.worth)
        self._drops.move_to_end(drop.conversation_id)
        while self._num_records > _MAX_NUM_RECORDS and len(self._drops) > 1:
            self._num_records -= len(self._drops.popitem(last=False)[1])

    def of(self, conversation_id: str) -> dict[int, DropRecord]:
        """By chunk, of what is still known."""
        return self._drops.get(conversation_id, {})

    def forget(self, conversation_id: str) -> None:
        """Its owner changed it, or it is gone: what was dropped before explains nothing any more."""
        self._num_records -= len(self._drops.pop(conversation_id, {}))

    def move(self, before: str, after: str | None, indices: range) -> None:
        """These chunks of one are another's from here on; None: the one is no more."""
        if after is None:
            self.forget(before)
            return
        of_before = self._drops.get(before, {})
        moved = {index: of_before.pop(index) for index in list(of_before) if index in indices}
        if moved:
            of_after = self._drops.setdefault(after, {})
            self._num_records -= len(moved.keys() & of_after.keys())
            of_after.update(moved)

    def lose(self, held: Iterable[tuple[str, int]], reason: DropReason) -> None:
        """All of these, (conversation, chunk), were given up just now."""
        for conversation_id, index in held:
            self.note(Drop(conversation_id, index, reason, None))
