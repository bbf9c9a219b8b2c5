"""The cached state of one conversation: its chunks, where they are, and how far it was computed.

Owns: the chunk list with its states.
Does not know: tokens, policies, or other sequences but the prefix it shares. Only `ChunkStore`
and `CacheManager` change it.

Invariants: there is a chunk for every started `chunk_tokens` of `num_kv_tokens`, and further ones only
while they are reserved; the last chunk of an unpinned sequence is never dropped (losing it shortens
`num_kv_tokens` instead), so holes have computed tokens behind them; only the last computed chunk can be
partly valid.

A shared prefix is a sequence of full chunks. Sequences that begin with it have its chunks, the same objects,
at the front of their own list; they are counted, evicted and moved as the prefix's only.
"""

from __future__ import annotations

from enum import Enum

from pensieve_jax.cache.states import ChunkState, Shelf

NUM_SHELVES = len(Shelf)


class Role(Enum):
    """Who may take a sequence's pages."""

    IDLE = "idle"  # anybody, as the policy orders
    QUEUED = "queued"  # requests that arrived earlier
    RUNNING = "running"  # nobody: pinned

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class Chunk:
    """One chunk: its state, and its page, slot and copy in flight (0 where it has none)."""

    __slots__ = ("copy_id", "page", "slot", "state")

    def __init__(self) -> None:
        """Dropped, without a page or a slot."""
        self.state = ChunkState.DROPPED
        self.page = 0
        self.slot = 0
        self.copy_id = 0

    @property
    def shelf(self) -> Shelf:
        """What its state means to whoever needs room."""
        return self.state.shelf

    @property
    def readable(self) -> bool:
        """Steps that are dispatched now can read it."""
        return self.state.shelf in (Shelf.DIRTY, Shelf.CLEAN)


class CachedSequence:
    """One conversation in the cache, or a prefix that several share.

    Attributes:
      chunks: by position; the first `num_shared` are the prefix's.
      num_kv_tokens: tokens [0, num_kv_tokens) were computed; those of dropped and reserved chunks are
        lost again.
      num_on: own chunks by shelf.
      fetched: chunks copied in for its queued request, before that was admitted.
      last_active_s: when its last turn ended, or began.
      arrival: arrival number of its queued or running request.
      bucket: which turns its last one was like (`returns.bucket_of`); of a prefix, that of its latest user.
      role: who may take its pages.
      role_number: counts up with every sequence that takes a role.
      row: of the table of pages that steps read, while it runs; else -1.
      prefix: the sequence of the prefix, if it has one.
      is_prefix: others share its chunks: they are full, and it keeps its length whatever is dropped.
      num_users, num_running_users: of a prefix, the sequences that begin with it, and those that run.
      released: of a prefix, that it is to be forgotten with the last of its users.
    """

    __slots__ = (
        "_first_on",
        "arrival",
        "bucket",
        "chunks",
        "fetched",
        "is_prefix",
        "last_active_s",
        "num_kv_tokens",
        "num_on",
        "num_running_users",
        "num_shared",
        "num_users",
        "prefix",
        "released",
        "role",
        "role_number",
        "row",
        "sequence_id",
    )

    def __init__(self, sequence_id: str, *, is_prefix: bool = False) -> None:
        """Empty."""
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
        self.prefix: CachedSequence | None = None
        self.num_shared = 0
        self.is_prefix = is_prefix
        self.num_users = 0
        self.num_running_users = 0
        self.released = False
        self._first_on = [0] * NUM_SHELVES  # no own chunk before it is on that shelf

    @property
    def num_resident(self) -> int:
        """Own chunks that steps can read."""
        return self.num_on[Shelf.DIRTY] + self.num_on[Shelf.CLEAN]

    @property
    def holds_state(self) -> bool:
        """Some own chunk is in some tier, or on its way."""
        return len(self.chunks) - self.num_shared > self.num_on[Shelf.ABSENT]

    def begin_with(self, prefix: CachedSequence | None) -> None:
        """Have the chunks of `prefix` and no others, or none at all."""
        self.prefix = prefix
        self.chunks = [] if prefix is None else list(prefix.chunks)
        self.num_shared = len(self.chunks)
        self.num_kv_tokens = 0 if prefix is None else prefix.num_kv_tokens
        self._first_on = [self.num_shared] * NUM_SHELVES

    def indices_on(self, shelf: Shelf) -> list[int]:
        """Own chunks on a shelf, leading first."""
        chunks = self.chunks
        return [i for i in range(self.num_shared, len(chunks)) if chunks[i].state.shelf is shelf]

    def first_on(self, shelf: Shelf) -> int:
        """The leading own chunk on a shelf; `len(chunks)` where none is. Cheap: it mostly moves on."""
        chunks, i = self.chunks, self._first_on[shelf]
        num_chunks = len(chunks)
        if i < num_chunks and chunks[i].state.shelf is shelf:
            return i
        while i < num_chunks and chunks[i].state.shelf is not shelf:
            i += 1
        self._first_on[shelf] = i
        return i

    def last_on(self, shelf: Shelf) -> int:
        """The last own chunk on a shelf; -1 where none is."""
        for i in range(len(self.chunks) - 1, self.num_shared - 1, -1):
            if self.chunks[i].shelf is shelf:
                return i
        return -1

    def move(self, index: int, before: Shelf, after: Shelf) -> None:
        """Own chunk `index` went from a shelf to another one."""
        num_on, first_on = self.num_on, self._first_on
        num_on[before] -= 1
        num_on[after] += 1
        if index < first_on[after]:
            first_on[after] = index

    def count(self, index: int, shelf: Shelf, change: int) -> None:
        """As many own chunks as `change` came to a shelf, from `index` on; or the one there left it."""
        self.num_on[shelf] += change
        if change > 0 and index < self._first_on[shelf]:
            self._first_on[shelf] = index

    @property
    def first_arriving(self) -> int | None:
        """The leading chunk that is being copied in, the prefix's included."""
        prefix = self.prefix
        if prefix is not None and prefix.num_on[Shelf.ARRIVING]:
            index = prefix.first_on(Shelf.ARRIVING)
            if index < self.num_shared:
                return index
        return self.first_on(Shelf.ARRIVING) if self.num_on[Shelf.ARRIVING] else None

    def num_tokens_of(self, index: int, chunk_tokens: int) -> int:
        """Computed tokens of chunk `index`, whether they are lost or not."""
        return max(min(chunk_tokens, self.num_kv_tokens - index * chunk_tokens), 0)

    def holes(self, chunk_tokens: int) -> list[tuple[int, int]]:
        """Token intervals below `num_kv_tokens` that must be computed again, ascending and merged."""
        intervals: list[tuple[int, int]] = []
        for i, chunk in enumerate(self.chunks):
            start, end = i * chunk_tokens, min((i + 1) * chunk_tokens, self.num_kv_tokens)
            if chunk.shelf is not Shelf.ABSENT or start >= end:
                continue
            if intervals and intervals[-1][1] == start:
                intervals[-1] = (intervals[-1][0], end)
            else:
                intervals.append((start, end))
        return intervals
