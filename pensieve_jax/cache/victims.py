"""Who gives way next among idle sequences, kept from step to step.

Owns: one shelf's order over thousands of sequences, of which a step takes a few and changes a few.
Does not know: what a policy's numbers mean, or what happens to a victim.
Called by: `Evictor`, with an order for each shelf that it needs room on, and `shadows`.

Worths change with the clock, each at its own pace, so no sorted list of them lasts. But the policy puts
sequences into groups in which their order lasts: a heap for each group, and the victim is the first of one of
them. A calendar tells who leaves a group as time passes. The groups' firsts are compared anew only when the
policy says that worths have changed (its epoch). Of all else that changes only that is told here which may
bring a sequence to the front; the rest is found out when an entry gets there: an entry keeps what it was made
of, so one that is out of date is worth no more than those behind it, and is looked at before any of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from typing import NamedTuple

from pensieve_jax.cache.policies import Candidate, EvictionPolicy
from pensieve_jax.cache.sequence import Role
from pensieve_jax.cache.states import Shelf

_MAX_STALE = 64  # entries, and as many as there are idle sequences
_UNKNOWN = -1  # the role number of a front that may be out of date: that of one behind it may be any


class _Entry[C: Candidate](NamedTuple):
    """A sequence in the heap of a group; sorts by rank, then by who was idle first."""

    rank: float
    role_number: int
    number: int  # of all entries, so that no two are compared further
    sequence: C
    last_active_s: float
    bucket: int
    chunk: int
    group: int
    until_s: float


class Victim[C: Candidate](NamedTuple):
    """What gives way next: chunks of an idle sequence, and what keeping the first of them is worth."""

    sequence: C
    indices: tuple[int, ...]
    worth: float


type _Front[C: Candidate] = tuple[float, int, _Entry[C]]  # worth, role number or `_UNKNOWN`


class VictimOrder[C: Candidate]:
    """The idle sequences with chunks on one shelf, the lowest worth first.

    Ties fall to the sequence that became idle first, in a group to the lower rank before that.
    """

    def __init__(self, policy: EvictionPolicy, shelf: Shelf, idle: Collection[C]) -> None:
        """Of `idle`, which changes; every sequence that joins it is to be noted."""
        self._policy, self._shelf, self._idle = policy, shelf, idle
        self._groups: dict[int, list[_Entry[C]]] = {}
        self._entries: dict[C, _Entry[C]] = {}  # the one of each that counts
        self._calendar: list[tuple[float, int, C]] = []  # by the end of their standing
        self._noted: dict[C, None] = dict.fromkeys(idle)
        self._num_entries, self._num_in_heaps = 0, 0
        self._now_s: float = -math.inf
        self._epoch: float | None = None
        self._generation, self._order = policy.generation, policy.in_force
        self._fronts: list[_Front[C]] = []  # of every heap's first, and some that are out of date

    def note(self, sequence: C) -> None:
        """Look at a sequence again: it became idle, a chunk came to the shelf, or it was active."""
        self._noted[sequence] = None
        if len(self._noted) > 2 * len(self._idle) + _MAX_STALE:  # nobody has asked for long
            self._noted = {one: None for one in self._noted if self._belongs(one)}

    def peek(self, now_s: float) -> Victim[C] | None:
        """Who gives way next at `now_s`; None: nobody has anything on the shelf."""
        if now_s != self._now_s or self._generation != self._policy.generation:
            self._begin(now_s)
        if self._noted:
            self._take_notes()
        if (epoch := self._order.epoch(now_s)) != self._epoch:
            self._epoch = epoch
            self._compare()
        fronts = self._fronts
        while fronts:
            worth, role_number, entry = fronts[0]
            heap = self._groups.get(entry.group)
            if not heap or heap[0] is not entry:
                heapq.heappop(fronts)
            elif not self._is_true(entry):
                self._replace_first(heap)
            elif role_number == _UNKNOWN and worth in [other[0] for other in fronts[1:3]]:
                heapq.heapreplace(fronts, (worth, entry.role_number, entry))
            else:
                return Victim(entry.sequence, tuple(self._order.frontier(entry.sequence, self._shelf)), worth)
        return None

    def _begin(self, now_s: float) -> None:
        """Time has passed, or the policy follows another order: who stands elsewhere now."""
        self._now_s = now_s
        if self._generation != self._policy.generation:
            self._generation, self._order = self._policy.generation, self._policy.in_force
            self._begin_anew()
        elif self._num_in_heaps > 2 * len(self._idle) + _MAX_STALE:
            self._begin_anew()
        elif len(self._calendar) > 2 * len(self._entries) + _MAX_STALE:
            self._calendar = [(e.until_s, e.number, e.sequence) for e in self._entries.values()]
            heapq.heapify(self._calendar)
        while self._calendar and self._calendar[0][0] <= now_s:
            entry = self._entries.get(heapq.heappop(self._calendar)[2])
            if entry is not None and entry.until_s <= now_s:
                self._enter(entry.sequence)
        if len(self._fronts) > 2 * len(self._groups) + _MAX_STALE:
            self._epoch = None

    def _take_notes(self) -> None:
        noted, self._noted = self._noted, {}
        for sequence in noted:
            entry = self._entries.get(sequence)
            if entry is None or not self._is_true(entry):
                self._enter(sequence)

    def _enter(self, sequence: C) -> None:
        """Put a sequence where it belongs now, if anywhere."""
        if not self._belongs(sequence):
            self._entries.pop(sequence, None)
            return
        chunk = self._order.chunk(sequence, self._shelf)
        group, rank, until_s = self._order.standing(sequence, chunk, self._now_s)
        self._num_entries += 1
        role_number, active_s, bucket = sequence.role_number, sequence.last_active_s, sequence.bucket
        number = self._num_entries
        entry = _Entry(rank, role_number, number, sequence, active_s, bucket, chunk, group, until_s)
        if until_s < math.inf:
            before = self._entries.get(sequence)
            if before is None or before.until_s != until_s:
                heapq.heappush(self._calendar, (until_s, number, sequence))
        self._entries[sequence] = entry
        heap = self._groups.get(group)
        if heap is None:
            heap = self._groups[group] = []
        heapq.heappush(heap, entry)
        self._num_in_heaps += 1
        if heap[0] is entry and self._epoch is not None:
            heapq.heappush(self._fronts, self._front(entry))

    def _replace_first(self, heap: list[_Entry[C]]) -> None:
        """The first of all is not true: the next one of its group is at the front, and it goes elsewhere."""
        entry = heapq.heappop(heap)
        self._num_in_heaps -= 1
        following = self._first(entry.group)
        if following is None:
            heapq.heappop(self._fronts)
        else:
            heapq.heapreplace(self._fronts, self._front(following))
        if self._entries.get(entry.sequence) is entry:
            self._enter(entry.sequence)

    def _compare(self) -> None:
        """Compare the groups' firsts as of now."""
        firsts = [entry for group in tuple(self._groups) if (entry := self._first(group)) is not None]
        self._fronts = [self._front(entry) for entry in firsts]
        heapq.heapify(self._fronts)

    def _front(self, entry: _Entry[C]) -> _Front[C]:
        return self._order.worth(entry, entry.chunk, self._now_s), _UNKNOWN, entry

    def _belongs(self, sequence: C) -> bool:
        return sequence.role is Role.IDLE and sequence.num_on[self._shelf] > 0

    def _is_true(self, entry: _Entry[C]) -> bool:
        """Whether it stands for its sequence as that is now."""
        sequence = entry.sequence
        return (
            sequence.role is Role.IDLE
            and sequence.num_on[self._shelf] > 0
            and entry.role_number == sequence.role_number
            and entry.last_active_s == sequence.last_active_s
            and entry.bucket == sequence.bucket
            and entry.until_s > self._now_s
            and entry.chunk == self._order.chunk(sequence, self._shelf)
        )

    def _first(self, group: int) -> _Entry[C] | None:
        """The first entry of a group that counts; whether it is true is found out at the front.

        A group without one is forgotten: there are as many as the longest history has chunks.
        """
        heap, entries = self._groups[group], self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry.sequence) is entry:
                return entry
            heapq.heappop(heap)
            self._num_in_heaps -= 1
        del self._groups[group]
        return None

    def _begin_anew(self) -> None:
        """Forget entries that are not true; they would pile up behind a first that never goes."""
        self._groups.clear()
        self._entries.clear()
        self._calendar.clear()
        self._fronts.clear()
        self._num_in_heaps, self._epoch = 0, None
        self._noted = dict.fromkeys(self._idle)
