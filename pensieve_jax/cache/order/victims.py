"""Who gives way next among idle sequences, kept from step to step.

Owns: one shelf's order over thousands of sequences, of which a step takes a few and changes a few.
Does not know: what a policy's numbers mean, or what happens to a victim.

Worths change with the clock, each at its own pace, so no sorted list of them lasts. But numpy computes those
of ten thousand sequences, as columns, in some tens of microseconds: so they are made anew whenever the policy
says that they have changed, which for some is at every time. The few that are worth least are gathered from
them in a heap, the front, and victims come from there until it is empty.

What must be told here (`noted`): who becomes idle; and of the idle, whose activity or bucket has changed, or
who has got a chunk on the shelf. That a sequence has lost chunks, or is not idle any more, is found out when
it gets to the front: what is out of date is worth no more than what is true, so nobody is taken wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve_jax.cache.order.policies import Candidate, EvictionCandidates, EvictionPolicy
from pensieve_jax.cache.order.returns import Integers
from pensieve_jax.cache.sequence import Role
from pensieve_jax.cache.states import EvictionClass

_FEWEST_ROWS = 64
_FEW, _MANY = 64, 256  # sequences at the front
_NO_CHUNK = -1  # of a sequence that has nothing on the shelf, or is not idle any more


class Victim[C: Candidate](NamedTuple):
    """What gives way next: chunks of an idle sequence, and what keeping the first of them is worth."""

    sequence: C
    indices: Sequence[int]
    worth: float


class VictimOrder[C: Candidate]:
    """The idle sequences with chunks on one shelf, the lowest worth first.

    Ties fall to the sequence that became idle first.
    """

    def __init__(self, policy: EvictionPolicy, shelf: EvictionClass, noted: dict[C, None]) -> None:
        """Nobody yet; `noted` is what others add to, as said above, and this takes from."""
        self._policy, self._shelf, self._noted = policy, shelf, noted
        self._order = policy.in_force
        self._epoch: object = None
        self._now_s = -math.inf
        self._rows: dict[C, int] = {}  # the one of each that counts
        self._sequences: list[C] = []  # by row, as all that follows
        self._role_numbers: list[int] = []
        self._offers = EvictionCandidates(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._worths = self._until_s = np.zeros(0)
        self._next_until_s = math.inf  # the first of them
        # Worth, role number and row of everybody that is worth no more than the bound, and some that are not
        # true any more.
        self._front: list[tuple[float, int, int]] = []
        self._bound = self._bound_before = -math.inf
        self._taken = -1  # the row that gave way last, if any did

    def begin(self, now_s: float) -> None:
        """What follows is asked at this time, of the order that is in force now."""
        self._now_s, order = now_s, self._policy.in_force
        if order is not self._order or order.epoch(now_s) != self._epoch:
            self._order, self._epoch = order, order.epoch(now_s)
            self._take_notes()
            self._front.clear()
            self._bound = -math.inf
            self._value(slice(len(self._sequences)))
        elif now_s >= self._next_until_s:
            self._value(np.flatnonzero(self._until_s <= now_s))

    def peek(self) -> Victim[C] | None:
        """Who gives way next, at the time of the latest `begin`; None: nobody has anything on the shelf."""
        if self._noted and (rows := self._take_notes()):
            self._value(np.array(rows))
        if self._taken >= 0:
            self._look_at(self._taken)
        front, worths = self._front, self._worths
        while front or self._gather():
            worth, _, row = front[0]
            if worth != worths.item(row):
                heappop(front)
            elif self._look_at(row):
                self._taken, sequence, chunk = row, self._sequences[row], self._offers.chunks.item(row)
                return Victim(sequence, self._order.frontier(sequence, self._shelf, chunk), worth)
        self._taken = -1
        return None

    def _gather(self) -> bool:
        """Put those who are worth least to the front; whether there is anybody."""
        worths, bound = self._worths, self._bound_before  # which is mostly as good as another
        rows = np.flatnonzero(worths <= bound)
        if not 0 < len(rows) <= _MANY:
            bound = np.partition(worths, _FEW).item(_FEW) if len(worths) > _FEW else math.inf
            rows = np.flatnonzero(worths <= bound if bound < math.inf else worths < math.inf)
            if not len(rows):
                return False
        least = worths[rows]
        self._bound = self._bound_before = least.max().item()
        numbers = self._role_numbers
        self._front += [
            (worth, numbers[row], row) for worth, row in zip(least.tolist(), rows.tolist(), strict=True)
        ]
        heapify(self._front)
        return True

    def _value(self, rows: Integers | slice) -> None:
        """Ask what these rows are worth now, and until when."""
        last_active_s, buckets, chunks = self._offers
        offers = EvictionCandidates(last_active_s[rows], buckets[rows], chunks[rows])
        worths = self._order.worths(offers, self._now_s)
        self._worths[rows] = np.where(offers.chunks == _NO_CHUNK, math.inf, worths)
        until_s = self._order.until_s(offers, self._now_s)
        if until_s is None:
            self._next_until_s = math.inf
        else:
            self._until_s[rows] = until_s
            self._next_until_s = self._until_s.min(initial=math.inf)
        if not isinstance(rows, slice):
            for row in rows.tolist():
                if (worth := self._worths.item(row)) <= self._bound:
                    heappush(self._front, (worth, self._role_numbers[row], row))

    def _look_at(self, row: int) -> bool:
        """Whether a row says what its sequence gives up next; else it does from here on."""
        sequence, shelf = self._sequences[row], self._shelf
        chunk, worth = _NO_CHUNK, math.inf
        if (
            sequence.num_on[shelf]
            and sequence.role is Role.IDLE
            and sequence.role_number == self._role_numbers[row]
        ):
            chunk = self._order.chunk(sequence, shelf)
        chunks = self._offers.chunks
        if chunk == chunks.item(row):
            return True
        if chunk != _NO_CHUNK:
            worth = self._order.worth(sequence, chunk, self._now_s)
            if worth <= self._bound:
                heappush(self._front, (worth, sequence.role_number, row))
        chunks[row], self._worths[row] = chunk, worth
        return False

    def _take_notes(self) -> list[int]:
        """Bring the rows of those noted up to date; returns the rows whose worths must be asked for."""
        noted = self._noted
        if len(self._sequences) + len(noted) > len(self._worths):
            self._make_room(len(noted))
        last_active_s, buckets, _ = self._offers
        changed = []
        for sequence in noted:
            row = self._rows.get(sequence, -1)
            if row >= 0 and self._role_numbers[row] != sequence.role_number:
                self._look_at(row)  # from here on nobody's
                row = -1
            if row >= 0 and last_active_s[row] == sequence.last_active_s and buckets[row] == sequence.bucket:
                self._look_at(row)
            elif self._belongs(sequence):
                if row < 0:
                    row = self._rows[sequence] = len(self._sequences)
                    self._sequences.append(sequence)
                    self._role_numbers.append(sequence.role_number)
                last_active_s[row], buckets[row] = sequence.last_active_s, sequence.bucket
                self._offers.chunks[row] = self._order.chunk(sequence, self._shelf)
                changed.append(row)
        noted.clear()
        return changed

    def _belongs(self, sequence: C) -> bool:
        return sequence.num_on[self._shelf] > 0 and sequence.role is Role.IDLE

    def _make_room(self, num_rows: int) -> None:
        """Forget the rows that say nothing, and have room for at least so many more."""
        kept = [
            row
            for row, sequence in enumerate(self._sequences)
            if self._belongs(sequence) and sequence.role_number == self._role_numbers[row]
        ]
        self._sequences = [self._sequences[row] for row in kept]
        self._role_numbers = [self._role_numbers[row] for row in kept]
        self._rows = {sequence: row for row, sequence in enumerate(self._sequences)}
        size = max((len(kept) + num_rows) * 5 // 4, _FEWEST_ROWS)
        last_active_s, buckets, chunks = self._offers
        self._offers = EvictionCandidates(
            _moved(last_active_s, kept, size, 0.0),
            _moved(buckets, kept, size, 0),
            _moved(chunks, kept, size, _NO_CHUNK),
        )
        self._worths = _moved(self._worths, kept, size, math.inf)
        self._until_s = _moved(self._until_s, kept, size, math.inf)
        self._front.clear()
        self._bound, self._taken = -math.inf, -1


def _moved[T: np.generic](column: NDArray[T], rows: Sequence[int], size: int, padding: float) -> NDArray[T]:
    """These rows of a column come first in a new one."""
    moved = np.full(size, padding, column.dtype)
    moved[: len(rows)] = column[rows]
    return moved
