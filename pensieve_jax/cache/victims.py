"""Who gives way next among idle sequences, kept from step to step.

Owns: one shelf's order over thousands of sequences, of which a step takes a few and changes a few.
Does not know: what a policy's numbers mean, or what happens to a victim.
Called by: `Evictor`, with an order for each shelf that it needs room on, and `shadows`.

Worths change with the clock, each at its own pace, so no sorted list of them lasts. But an array of them is
made anew, and searched, faster than a sorted one is kept: for ten thousand sequences numpy takes some tens of
microseconds to compute what their next chunks are worth, once at each time, and two to find the least. So a
sequence has a row of such arrays, in the order in which they became idle: the first of equals is who became
so first.

Of what happens to a sequence only that is told here (`note`) which may make its next chunk worth less. The
rest is found out when its row is worth least: a row that is out of date is worth no more than a true one
would be, so it is looked at, and put right, before anybody is taken wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve_jax.cache.policies import Candidate, EvictionPolicy, Offers
from pensieve_jax.cache.sequence import Role
from pensieve_jax.cache.states import Shelf

_FEWEST = 64  # rows
_NO_CHUNK = -1  # of a sequence that has nothing on the shelf, or is not idle any more


class Victim[C: Candidate](NamedTuple):
    """What gives way next: chunks of an idle sequence, and what keeping the first of them is worth."""

    sequence: C
    indices: tuple[int, ...]
    worth: float


class VictimOrder[C: Candidate]:
    """The idle sequences that hold state, and what of it leaves one shelf next: the lowest worth first.

    Ties fall to the sequence that became idle first.
    """

    def __init__(self, policy: EvictionPolicy, shelf: Shelf, idle: Collection[C]) -> None:
        """Of `idle`, which changes; every sequence that joins it is to be noted."""
        self._policy, self._shelf, self._idle = policy, shelf, idle
        self._noted: dict[C, None] = dict.fromkeys(idle)
        self._rows: dict[C, int] = {}
        self._sequences: list[C] = []  # by row, as all that follows
        self._role_numbers: list[int] = []
        self._offers = Offers(
            np.zeros(_FEWEST), np.zeros(_FEWEST, np.int64), np.full(_FEWEST, _NO_CHUNK, np.int64)
        )
        self._worths = np.full(_FEWEST, math.inf)
        self._until_s = np.full(_FEWEST, math.inf)
        self._next_until_s = math.inf  # the first of them
        self._order = policy.in_force
        self._epoch: object = None
        self._now_s = -math.inf
        self._taken: int | None = None  # the row that gave way last

    def note(self, sequence: C) -> None:
        """Look at a sequence again: it became idle, a chunk came to the shelf, or it was active."""
        self._noted[sequence] = None
        if len(self._noted) > 2 * len(self._idle) + _FEWEST:  # nobody has asked for long
            self._noted = {one: None for one in self._noted if one.role is Role.IDLE and one.holds_state}

    def peek(self, now_s: float) -> Victim[C] | None:
        """Who gives way next at `now_s`; None: nobody has anything on the shelf."""
        self._bring_up_to(now_s)
        if self._taken is not None:
            self._look_at(self._taken)
        worths = self._worths
        while True:
            row = int(worths.argmin())
            worth = worths.item(row)
            if worth == math.inf:
                self._taken = None
                return None
            if self._look_at(row):
                self._taken, sequence = row, self._sequences[row]
                return Victim(sequence, tuple(self._order.frontier(sequence, self._shelf)), worth)

    def _bring_up_to(self, now_s: float) -> None:
        """Take notes, and make those worths anew that are others at this time."""
        is_later, self._now_s = now_s != self._now_s, now_s
        rows: Sequence[int] = self._take_notes() if self._noted else ()
        order = self._policy.in_force
        if order is not self._order or order.epoch(now_s) != self._epoch:
            self._order, self._epoch = order, order.epoch(now_s)
            self._value(slice(len(self._sequences)))
            return
        if is_later and now_s >= self._next_until_s:
            rows = [*rows, *np.flatnonzero(self._until_s <= now_s).tolist()]
        if rows:
            self._value(rows)

    def _value(self, rows: Sequence[int] | slice) -> None:
        """Ask what these rows are worth now, and until when."""
        offers = Offers(*(column[rows] for column in self._offers))
        worths = self._order.worths(offers, self._now_s)
        self._worths[rows] = np.where(offers.chunks == _NO_CHUNK, math.inf, worths)
        self._until_s[rows] = self._order.until_s(offers, self._now_s)
        self._next_until_s = self._until_s.min()

    def _look_at(self, row: int) -> bool:
        """Whether a row says what its sequence gives up next; else it does from here on."""
        sequence = self._sequences[row]
        chunk = _NO_CHUNK
        if (
            sequence.num_on[self._shelf]
            and sequence.role is Role.IDLE
            and sequence.role_number == self._role_numbers[row]
        ):
            chunk = self._order.chunk(sequence, self._shelf)
        if chunk == self._offers.chunks.item(row):
            return True
        self._offers.chunks[row] = chunk
        is_there = chunk != _NO_CHUNK
        self._worths[row] = self._order.worth(sequence, chunk, self._now_s) if is_there else math.inf
        return False

    def _take_notes(self) -> list[int]:
        """Bring the rows of those noted up to date; returns the rows whose worths must be asked for."""
        noted, self._noted = self._noted, {}
        if len(self._sequences) + len(noted) > len(self._worths):
            self._make_room(len(noted))
        last_active_s, buckets, _ = self._offers
        changed = []
        for sequence in sorted(noted, key=lambda one: one.role_number) if len(noted) > 1 else noted:
            row = self._rows.get(sequence)
            if row is not None and self._role_numbers[row] != sequence.role_number:
                self._look_at(row)  # from here on nobody's
                row = None
            if row is None:
                if sequence.role is not Role.IDLE or not sequence.holds_state:
                    continue
                row = self._add(sequence)
            elif last_active_s.item(row) == sequence.last_active_s and buckets.item(row) == sequence.bucket:
                self._look_at(row)
                continue
            last_active_s[row], buckets[row] = sequence.last_active_s, sequence.bucket
            self._look_at(row)
            changed.append(row)
        return changed

    def _add(self, sequence: C) -> int:
        """A row, of which nothing is known yet."""
        row = self._rows[sequence] = len(self._sequences)
        self._sequences.append(sequence)
        self._role_numbers.append(sequence.role_number)
        return row

    def _make_room(self, num_rows: int) -> None:
        """Forget the rows that are nobody's, and have room for at least so many more."""
        kept = [row for row, sequence in enumerate(self._sequences) if self._is_of(row, sequence)]
        self._sequences = [self._sequences[row] for row in kept]
        self._role_numbers = [self._role_numbers[row] for row in kept]
        self._rows = {sequence: row for row, sequence in enumerate(self._sequences)}
        self._taken = None
        size = max(2 * (len(kept) + num_rows), _FEWEST)
        last_active_s, buckets, chunks = self._offers
        self._offers = Offers(
            _moved(last_active_s, kept, size, 0),
            _moved(buckets, kept, size, 0),
            _moved(chunks, kept, size, _NO_CHUNK),
        )
        self._worths = _moved(self._worths, kept, size, math.inf)
        self._until_s = _moved(self._until_s, kept, size, math.inf)

    def _is_of(self, row: int, sequence: C) -> bool:
        return (
            sequence.role is Role.IDLE
            and sequence.holds_state
            and sequence.role_number == self._role_numbers[row]
        )


def _moved[T: np.generic](column: NDArray[T], rows: Sequence[int], size: int, padding: float) -> NDArray[T]:
    """These rows of a column come first in a new one."""
    moved = np.full(size, padding, column.dtype)
    moved[: len(rows)] = column[rows]
    return moved
