"""The eviction order of idle sequences for one eviction class, maintained from step to step.

Owns: the order over thousands of sequences; a step evicts a few and changes a few.
Does not know: the meaning of a policy's retention values, or what happens to a victim.
Called by `Evictor` and `GhostCache`.

These values change with the clock, each at its own pace, so a sorted list would soon be wrong. But numpy
computes the values of 10,000 sequences, as columns, in tens of microseconds. So they are recomputed whenever
the policy says that they changed (for some policies, at every time). The few lowest values go into a heap,
the front, and victims are taken from it until it is empty.

Callers report changes in `noted`: sequences that became idle, and idle sequences whose activity or bucket
changed or that got a chunk of the class. Lost chunks and sequences that are no longer idle are not reported;
they are detected when a sequence reaches the front. A stale entry never overestimates the value, so
rechecking the front suffices.
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
_FEW, _MANY = 64, 256  # target and maximum number of sequences at the front
_NO_CHUNK = -1  # for a sequence without a chunk of the class, or not idle any more


class Victim[C: Candidate](NamedTuple):
    """The next chunks to evict, of one idle sequence, and the retention value of the first."""

    sequence: C
    indices: Sequence[int]
    worth: float


class VictimOrder[C: Candidate]:
    """The idle sequences with chunks of one eviction class, lowest value first.

    Of equal values, the sequence that became idle first comes first.
    """

    def __init__(self, policy: EvictionPolicy, eviction_class: EvictionClass, noted: dict[C, None]) -> None:
        """Start empty; callers add changed sequences to `noted`, and this order removes them."""
        self._policy, self._eviction_class, self._noted = policy, eviction_class, noted
        self._order = policy.current
        self._epoch: object = None
        self._now_s = -math.inf
        self._rows: dict[C, int] = {}  # the valid row of each sequence
        self._sequences: list[C] = []  # by row, like the columns below
        self._role_numbers: list[int] = []
        self._candidates = EvictionCandidates(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._worths = self._until_s = np.zeros(0)
        self._next_until_s = math.inf  # the minimum of `_until_s`
        # Heap of (worth, role number, row) for all rows of worth <= `_bound`, and some stale entries.
        self._front: list[tuple[float, int, int]] = []
        self._bound = self._bound_before = -math.inf
        self._last_victim_row = -1  # the row of the last victim, or -1

    def begin(self, now_s: float) -> None:
        """Begin a pass: set the time and take the policy's order in use for the following `peek` calls."""
        self._now_s, order = now_s, self._policy.current
        if order is not self._order or order.epoch(now_s) != self._epoch:
            self._order, self._epoch = order, order.epoch(now_s)
            self._apply_changes()
            self._front.clear()
            self._bound = -math.inf
            self._revalue(slice(len(self._sequences)))
        elif now_s >= self._next_until_s:
            self._revalue(np.flatnonzero(self._until_s <= now_s))

    def peek(self) -> Victim[C] | None:
        """Return the next victim at the time of the latest `begin`, or None without a candidate."""
        if self._noted and (rows := self._apply_changes()):
            self._revalue(np.array(rows))
        if self._last_victim_row >= 0:
            self._refresh_row(self._last_victim_row)
        front, worths = self._front, self._worths
        while front or self._gather():
            worth, _, row = front[0]
            if worth != worths.item(row):
                heappop(front)
            elif self._refresh_row(row):
                self._last_victim_row, sequence, chunk = (
                    row,
                    self._sequences[row],
                    self._candidates.chunks.item(row),
                )
                return Victim(sequence, self._order.frontier(sequence, self._eviction_class, chunk), worth)
        self._last_victim_row = -1
        return None

    def _gather(self) -> bool:
        """Move the rows of lowest worth to the front; returns whether there are any."""
        worths, bound = self._worths, self._bound_before  # the last bound usually selects a fitting number
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

    def _revalue(self, rows: Integers | slice) -> None:
        """Recompute the worths of these rows, and how long they hold."""
        last_active_s, buckets, chunks = self._candidates
        candidates = EvictionCandidates(last_active_s[rows], buckets[rows], chunks[rows])
        worths = self._order.worths(candidates, self._now_s)
        self._worths[rows] = np.where(candidates.chunks == _NO_CHUNK, math.inf, worths)
        until_s = self._order.until_s(candidates, self._now_s)
        if until_s is None:
            self._next_until_s = math.inf
        else:
            self._until_s[rows] = until_s
            self._next_until_s = self._until_s.min(initial=math.inf)
        if not isinstance(rows, slice):
            for row in rows.tolist():
                if (worth := self._worths.item(row)) <= self._bound:
                    heappush(self._front, (worth, self._role_numbers[row], row))

    def _refresh_row(self, row: int) -> bool:
        """Return whether a row has its sequence's current next chunk; if not, correct the row."""
        sequence, eviction_class = self._sequences[row], self._eviction_class
        chunk, worth = _NO_CHUNK, math.inf
        if (
            sequence.num_by_class[eviction_class]
            and sequence.role is Role.IDLE
            and sequence.role_number == self._role_numbers[row]
        ):
            chunk = self._order.chunk(sequence, eviction_class)
        chunks = self._candidates.chunks
        if chunk == chunks.item(row):
            return True
        if chunk != _NO_CHUNK:
            worth = self._order.worth(sequence, chunk, self._now_s)
            if worth <= self._bound:
                heappush(self._front, (worth, sequence.role_number, row))
        chunks[row], self._worths[row] = chunk, worth
        return False

    def _apply_changes(self) -> list[int]:
        """Update the rows of noted sequences; returns the rows whose worths must be recomputed."""
        noted = self._noted
        if len(self._sequences) + len(noted) > len(self._worths):
            self._make_room(len(noted))
        last_active_s, buckets, _ = self._candidates
        changed = []
        for sequence in noted:
            row = self._rows.get(sequence, -1)
            if row >= 0 and self._role_numbers[row] != sequence.role_number:
                self._refresh_row(row)  # this marks the old row as unused
                row = -1
            if row >= 0 and last_active_s[row] == sequence.last_active_s and buckets[row] == sequence.bucket:
                self._refresh_row(row)
            elif self._belongs(sequence):
                if row < 0:
                    row = self._rows[sequence] = len(self._sequences)
                    self._sequences.append(sequence)
                    self._role_numbers.append(sequence.role_number)
                last_active_s[row], buckets[row] = sequence.last_active_s, sequence.bucket
                self._candidates.chunks[row] = self._order.chunk(sequence, self._eviction_class)
                changed.append(row)
        noted.clear()
        return changed

    def _belongs(self, sequence: C) -> bool:
        return sequence.num_by_class[self._eviction_class] > 0 and sequence.role is Role.IDLE

    def _make_room(self, num_rows: int) -> None:
        """Remove unused rows, and make room for at least `num_rows` more."""
        kept_rows = [
            row
            for row, sequence in enumerate(self._sequences)
            if self._belongs(sequence) and sequence.role_number == self._role_numbers[row]
        ]
        self._sequences = [self._sequences[row] for row in kept_rows]
        self._role_numbers = [self._role_numbers[row] for row in kept_rows]
        self._rows = {sequence: row for row, sequence in enumerate(self._sequences)}
        size = max((len(kept_rows) + num_rows) * 5 // 4, _FEWEST_ROWS)
        last_active_s, buckets, chunks = self._candidates
        self._candidates = EvictionCandidates(
            _moved(last_active_s, kept_rows, size, 0.0),
            _moved(buckets, kept_rows, size, 0),
            _moved(chunks, kept_rows, size, _NO_CHUNK),
        )
        self._worths = _moved(self._worths, kept_rows, size, math.inf)
        self._until_s = _moved(self._until_s, kept_rows, size, math.inf)
        self._front.clear()
        self._bound, self._last_victim_row = -math.inf, -1


def _moved[T: np.generic](column: NDArray[T], rows: Sequence[int], size: int, padding: float) -> NDArray[T]:
    """Copy these rows of a column to the front of a new, padded column of `size`."""
    moved = np.full(size, padding, column.dtype)
    moved[: len(rows)] = column[rows]
    return moved
