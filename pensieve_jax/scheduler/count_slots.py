"""Which turn's ids each slot of the device's counts holds, and what a step must add to them.

Owns: slots, as a cache of the turns that counted last. A turn that is new, or that lost its slot, gets one
with all of its ids. A turn whose slot lacks ids that the host knows gets these alone.
Does not know: the device, or how counts change logits.
Called by the planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.decoding import adjustments
from pensieve_jax.scheduler.request import Request


@dataclass
class _Slot:
    """A slot of one turn; its counts have the first `num_counted` tokens, one in flight included."""

    index: int
    num_counted: int


class CountSlots:
    """The slots of a runner's counts, which change with every plan."""

    def __init__(self, num_slots: int) -> None:
        """Start with empty slots; no step may have more rows with penalties than `num_slots`."""
        self._num_slots = num_slots
        self._held: dict[int, _Slot] = {}  # by request id; the one used last is the last

    def forget(self) -> None:
        """Give up every slot, as the counts on the device are lost."""
        self._held.clear()

    def count(
        self, requests: Sequence[Request], ends: Sequence[int], counted: np.ndarray
    ) -> list[np.ndarray]:
        """Fill a step's rows of `Adjustment.counted`; returns the inputs of the programs that seed slots.

        Each request's `sample_row` must be that of the previous step.

        Args:
          requests: requests that sample, by row of the step; those without penalties keep the padding.
          ends: position of the token that each row samples. The token before it may be in flight.
          counted: see `Adjustment`.
        """
        rows = [(row, request) for row, request in enumerate(requests) if request.penalties is not None]
        for _, request in rows:  # a slot in use in this step must not be taken
            slot = self._held.pop(request.request_id, None)
            if slot is not None:
                self._held[request.request_id] = slot
        found: list[np.ndarray] = []
        for row, request in rows:
            end = ends[row]
            is_pending = request.token_ids[end - 1] == PENDING_TOKEN
            num_known = end - is_pending
            slot, is_new = self._held.get(request.request_id), False
            if slot is None:
                slot, is_new = _Slot(self._take(), 0), True
                self._held[request.request_id] = slot
            found += self._missing(request, slot, num_known, is_new)
            slot.num_counted = end
            counted[:2, row] = slot.index, request.sample_row if is_pending else -1
            counted[2:, row] = request.penalties
        return found

    def _take(self) -> int:
        """Return a free slot, or that of the turn that was not counted for longest."""
        if len(self._held) < self._num_slots:
            return len(self._held)
        return self._held.pop(next(iter(self._held))).index

    @staticmethod
    def _missing(request: Request, slot: _Slot, num_known: int, is_new: bool) -> list[np.ndarray]:
        start = request.num_prompt_end
        # Frequency and presence count the reply alone.
        context = request.token_ids[:start] if is_new and request.params.repetition_penalty != 1 else ()
        reply = request.token_ids[max(slot.num_counted, start) : num_known]
        return adjustments.seeds(slot.index, context, reply, clears=is_new)
