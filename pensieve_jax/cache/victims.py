"""Who gives way next among idle sequences, kept from step to step.

Owns: one shelf's order over thousands of sequences, of which a step takes a few and changes a few.
Does not know: what a policy's numbers mean, or what happens to a victim.
Called by: `Evictor`, with an order for each shelf that it needs room on.

Worths change with the clock, each at its own pace, so no sorted list of them lasts. But the policy puts
sequences into groups in which whoever was active earlier is worth less, now and later: a heap for each group
lasts, and the victim is the first of one of them. Of what changes only that is told here which may bring a
sequence to the front; all else is found out when an entry gets there.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import NamedTuple

from pensieve_jax.cache.policies import EvictionPolicy
from pensieve_jax.cache.sequence import CachedSequence, Role
from pensieve_jax.cache.states import Shelf

_MAX_STALE = 64  # entries, and as many as there are idle sequences


class _Entry(NamedTuple):
    """A sequence in the heap of a group; sorts by activity, then by who was idle first."""

    last_active_s: float
    role_number: int
    sequence: CachedSequence
    group: int


class Victim(NamedTuple):
    """What gives way next: chunks of an idle sequence, and what keeping the first of them is worth."""

    sequence: CachedSequence
    indices: tuple[int, ...]
    worth: float


class VictimOrder:
    """The idle sequences with chunks on one shelf, the lowest worth first.

    Ties fall to the sequence that became idle first.
    """

    def __init__(self, policy: EvictionPolicy, shelf: Shelf, idle: Collection[CachedSequence]) -> None:
        """Of `idle`, which changes; every sequence that joins it is to be noted."""
        self._policy, self._shelf, self._idle = policy, shelf, idle
        self._groups: dict[int, list[_Entry]] = {}
        self._entries: dict[CachedSequence, _Entry] = {}  # the one of each that counts
        self._num_in_heaps = 0
        self._now_s: float | None = None
        self._fronts: list[tuple[float, int, int]] = []  # (worth, role number, group) of every heap's first
        self._begin_anew()

    def note(self, sequence: CachedSequence) -> None:
        """Look at a sequence again: it became idle, a chunk came to the shelf, or it was active."""
        if sequence.role is not Role.IDLE or not sequence.num_on[self._shelf]:
            return
        entry = self._entries.get(sequence)
        if entry is not None and self._is_true(entry):
            return
        group = self._policy.group(sequence, self._shelf)
        entry = _Entry(sequence.last_active_s, sequence.role_number, sequence, group)
        self._entries[sequence] = entry
        heap = self._groups.setdefault(group, [])
        heapq.heappush(heap, entry)
        self._num_in_heaps += 1
        if heap[0] is entry and self._now_s is not None:
            heapq.heappush(self._fronts, self._front(entry, self._now_s))

    def peek(self, now_s: float) -> Victim | None:
        """Who gives way next at `now_s`; None: nobody has anything on the shelf."""
        if now_s != self._now_s:
            self._begin(now_s)
        while self._fronts:
            front = self._fronts[0]
            entry = self._first(front[2])
            if entry is None:
                heapq.heappop(self._fronts)
                continue
            front_now = self._front(entry, now_s)
            if front_now == front:
                indices = self._policy.frontier(entry.sequence, self._shelf)
                return Victim(entry.sequence, tuple(indices), front[0])
            heapq.heapreplace(self._fronts, front_now)
        return None

    def _begin(self, now_s: float) -> None:
        """Compare the groups' firsts as of `now_s`."""
        if self._num_in_heaps > 2 * len(self._idle) + _MAX_STALE:
            self._begin_anew()
        self._now_s = now_s
        self._fronts.clear()
        for group in tuple(self._groups):
            entry = self._first(group)  # what it moves to other groups adds to the fronts
            if entry is not None:
                self._fronts.append(self._front(entry, now_s))
        heapq.heapify(self._fronts)

    def _front(self, entry: _Entry, now_s: float) -> tuple[float, int, int]:
        worth = self._policy.worth(entry.sequence, entry.group, now_s)
        return worth, entry.role_number, entry.group

    def _is_true(self, entry: _Entry) -> bool:
        """Whether it stands for its sequence as that is now."""
        sequence = entry.sequence
        return (
            entry.role_number == sequence.role_number
            and entry.last_active_s == sequence.last_active_s
            and sequence.num_on[self._shelf] > 0
            and entry.group == self._policy.group(sequence, self._shelf)
        )

    def _first(self, group: int) -> _Entry | None:
        """The first entry of a group that is true; those before it go where they belong now.

        A group without one is forgotten: there are as many as the longest history has chunks.
        """
        heap = self._groups.get(group)
        while heap:
            entry = heap[0]
            counts = self._entries.get(entry.sequence) is entry
            if counts and self._is_true(entry):
                return entry
            heapq.heappop(heap)
            self._num_in_heaps -= 1
            if counts:
                del self._entries[entry.sequence]
                self.note(entry.sequence)
        self._groups.pop(group, None)
        return None

    def _begin_anew(self) -> None:
        """Forget entries that are not true; they would pile up behind a first that never goes."""
        self._groups.clear()
        self._entries.clear()
        self._num_in_heaps, self._now_s = 0, None
        for sequence in self._idle:
            self.note(sequence)
