"""The cached state of one conversation: its chunks, where they are, and how far it was computed.

Owns: the chunk list with its states.
Does not know: tokens, policies, or other sequences but those that it shares chunks with. Only `ChunkStore`,
`SharedChunks` and `CacheManager` change it.

Invariants: there is a chunk for every started `chunk_tokens` of `num_kv_tokens`, and further ones only
while they are reserved; the last chunk of an unpinned sequence is never dropped (losing it shortens
`num_kv_tokens` instead), so holes have computed tokens behind them; only the last computed chunk can be
partly valid.

A trunk is a sequence of full chunks that others begin with, its users: they have its chunks, the same
objects, at the front of their own list; those are counted, evicted and moved as the trunk's only. A trunk may
begin with another one. Every chunk has one owner: whoever has it behind the first `num_shared`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from pensieve_jax.cache.states import ChunkState, EvictionClass

NUM_SHELVES = len(EvictionClass)


class Role(Enum):
    """Who may take a sequence's pages."""

    IDLE = "idle"  # anybody, as the policy orders
    QUEUED = "queued"  # requests that arrived earlier
    RUNNING = "running"  # nobody: pinned

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class Chunk:
    """One chunk: its state, and its page, slot and copy in flight (0 where it has none).

    `fits_host` is False while what it holds is known to have no form in which host memory keeps chunks: it is
    dropped where others are copied. `slot_tokens` is the number of its tokens that the slot holds, or will
    hold once the copy is complete. It means nothing without a slot.
    """

    __slots__ = ("copy_id", "fits_host", "page", "slot", "slot_tokens", "state")

    def __init__(self) -> None:
        """Dropped, without a page or a slot."""
        self.state = ChunkState.DROPPED
        self.page = 0
        self.slot = 0
        self.slot_tokens = 0
        self.copy_id = 0
        self.fits_host = True

    @property
    def shelf(self) -> EvictionClass:
        """What its state means to whoever needs room."""
        return self.state.shelf

    @property
    def readable(self) -> bool:
        """Steps that are dispatched now can read it."""
        return self.state.shelf in (EvictionClass.DIRTY, EvictionClass.CLEAN)


class CachedSequence:
    """One conversation in the cache, or a trunk that several share.

    Attributes:
      chunks: by position; the first `num_shared` are the trunk's, or those before it.
      num_kv_tokens: tokens [0, num_kv_tokens) were computed; those of dropped and reserved chunks are
        lost again.
      num_on: own chunks by shelf.
      fetched: chunks copied in for its queued request, before that was admitted.
      last_active_s: when its last turn ended, or began.
      arrival: arrival number of its queued or running request.
      bucket: which turns its last one was like (`order.returns.bucket_of`); of a trunk, its latest user's.
      role: who may take its pages.
      role_number: counts up with every sequence that takes a role.
      row: of the table of pages that steps read, while it runs; else -1. Steps read no trunk as such.
      trunk: whose chunks it begins with, if anybody's.
      is_trunk: others share its chunks: they are full, and it keeps its length whatever is dropped.
      users: of a trunk, the sequences that begin with all of it, other trunks among them.
      num_running_users: how many of these run; while any does, the trunk counts as running too.
      is_held: of a trunk, that somebody wants it kept as it is, with any number of users or none.
    """

    __slots__ = (
        "_first_on",
        "arrival",
        "bucket",
        "chunks",
        "fetched",
        "is_held",
        "is_trunk",
        "last_active_s",
        "num_kv_tokens",
        "num_on",
        "num_running_users",
        "num_shared",
        "role",
        "role_number",
        "row",
        "sequence_id",
        "trunk",
        "users",
    )

    def __init__(self, sequence_id: str, *, is_trunk: bool = False) -> None:
        self.sequence_id = sequence_id
        self.chunks: list[Chunk] = []
        self.num_kv_tokens = 0
        self.num_on = [0] * NUM_SHELVES
        self.fetched: set[int] = set()
        self.last_active_s = 0.0
        self.bucket = 0
        self.arrival = -1
        self.role = Role.IDLE
        self.role_number = 0
        self.row = -1
        self.trunk: CachedSequence | None = None
        self.num_shared = 0
        self.is_trunk = is_trunk
        self.users: dict[CachedSequence, None] = {}
        self.num_running_users = 0
        self.is_held = False
        self._first_on = [0] * NUM_SHELVES  # no own chunk before it is on that shelf

    @property
    def num_resident(self) -> int:
        """Own chunks that steps can read."""
        return self.num_on[EvictionClass.DIRTY] + self.num_on[EvictionClass.CLEAN]

    @property
    def holds_state(self) -> bool:
        """Some own chunk is in some tier, or on its way."""
        return len(self.chunks) - self.num_shared > self.num_on[EvictionClass.ABSENT]

    def will_write(self, index: int, chunk_tokens: int) -> bool:
        """It runs, and computes tokens of that chunk next, or later."""
        return self.role is Role.RUNNING and index >= self.num_kv_tokens // chunk_tokens

    def lineage(self) -> Iterator[CachedSequence]:
        """Itself, the trunk that it begins with, the one that that begins with, and so on."""
        sequence: CachedSequence | None = self
        while sequence is not None:
            yield sequence
            sequence = sequence.trunk

    def owner_of(self, index: int) -> CachedSequence:
        """Who of its lineage a chunk belongs to."""
        owner = self
        while index < owner.num_shared:
            assert owner.trunk is not None
            owner = owner.trunk
        return owner

    def begin_with(self, trunk: CachedSequence | None) -> None:
        """Have the chunks of `trunk` and no others, or none at all."""
        self.trunk = trunk
        self.chunks = [] if trunk is None else list(trunk.chunks)
        self.num_shared = len(self.chunks)
        self.num_kv_tokens = 0 if trunk is None else trunk.num_kv_tokens
        self._first_on = [self.num_shared] * NUM_SHELVES

    def take_from(self, trunk: CachedSequence) -> None:
        """The chunks of its trunk are its own from here on; it begins with what that began with."""
        self.trunk, self.num_shared = trunk.trunk, trunk.num_shared
        self._first_on = [min(pair) for pair in zip(self._first_on, trunk._first_on, strict=True)]

    def give_to(self, trunk: CachedSequence, num_chunks: int) -> None:
        """Its own chunks up to `num_chunks` in all are a new trunk's from here on, which it begins with."""
        trunk.trunk, trunk.num_shared = self.trunk, self.num_shared
        trunk.chunks = self.chunks[:num_chunks]
        trunk._first_on = [min(index, num_chunks) for index in self._first_on]
        self.trunk, self.num_shared = trunk, num_chunks
        self._first_on = [max(index, num_chunks) for index in self._first_on]

    def indices_on(self, shelf: EvictionClass) -> list[int]:
        """Own chunks on a shelf, leading first."""
        chunks = self.chunks
        return [i for i in range(self.num_shared, len(chunks)) if chunks[i].state.shelf is shelf]

    def first_on(self, shelf: EvictionClass) -> int:
        """The leading own chunk on a shelf; `len(chunks)` where none is. Cheap: it mostly moves on."""
        chunks, i = self.chunks, self._first_on[shelf]
        num_chunks = len(chunks)
        if i < num_chunks and chunks[i].state.shelf is shelf:
            return i
        while i < num_chunks and chunks[i].state.shelf is not shelf:
            i += 1
        self._first_on[shelf] = i
        return i

    def last_on(self, shelf: EvictionClass) -> int:
        """The last own chunk on a shelf; -1 where none is."""
        for i in range(len(self.chunks) - 1, self.num_shared - 1, -1):
            if self.chunks[i].shelf is shelf:
                return i
        return -1

    def move(self, index: int, before: EvictionClass, after: EvictionClass) -> None:
        """Own chunk `index` went from a shelf to another one."""
        num_on, first_on = self.num_on, self._first_on
        num_on[before] -= 1
        num_on[after] += 1
        if index < first_on[after]:
            first_on[after] = index

    def count(self, index: int, shelf: EvictionClass, change: int) -> None:
        """As many own chunks as `change` came to a shelf, from `index` on; or the one there left it."""
        self.num_on[shelf] += change
        if change > 0 and index < self._first_on[shelf]:
            self._first_on[shelf] = index

    @property
    def first_arriving(self) -> int | None:
        """The leading chunk that is being copied in, those of its trunks included."""
        leading = self.first_on(EvictionClass.ARRIVING) if self.num_on[EvictionClass.ARRIVING] else None
        trunk = self.trunk
        while trunk is not None:
            if trunk.num_on[EvictionClass.ARRIVING]:
                leading = trunk.first_on(EvictionClass.ARRIVING)
            trunk = trunk.trunk
        return leading

    def num_tokens_of(self, index: int, chunk_tokens: int) -> int:
        """Computed tokens of chunk `index`, whether they are lost or not."""
        return max(min(chunk_tokens, self.num_kv_tokens - index * chunk_tokens), 0)

    def holes(self, chunk_tokens: int) -> list[tuple[int, int]]:
        """Token intervals below `num_kv_tokens` that must be computed again, ascending and merged."""
        intervals: list[tuple[int, int]] = []
        for i, chunk in enumerate(self.chunks):
            start, end = i * chunk_tokens, min((i + 1) * chunk_tokens, self.num_kv_tokens)
            if chunk.shelf is not EvictionClass.ABSENT or start >= end:
                continue
            if intervals and intervals[-1][1] == start:
                intervals[-1] = (intervals[-1][0], end)
            else:
                intervals.append((start, end))
        return intervals
