"""The KV cache of one conversation: its chunks, their places, and its computed length.

Owns: the list of chunks with their states.
Does not know: tokens, policies, or other sequences except those that it shares chunks with.
Called by `ChunkStore`, `SharedChunks` and `CacheManager`; only these change it.

Invariants:
- `num_kv_tokens` tokens have ceil(num_kv_tokens / chunk_tokens) chunks. Further chunks exist only while they
  are reserved.
- The last chunk of an unpinned sequence is never dropped; losing it shortens `num_kv_tokens` instead. So
  every hole has computed tokens behind it.
- Only the last computed chunk can be partly valid.

A trunk is a sequence of full chunks that other sequences, its users, begin with. A user has the same chunk
objects at the front of its own list, but they are counted, evicted and moved as the trunk's only. A trunk may
begin with another trunk. Every chunk has one owner: the sequence that has it at an index >= `num_shared`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from pensieve_jax.cache.states import ChunkState, EvictionClass

NUM_EVICTION_CLASSES = len(EvictionClass)


class Role(Enum):
    """Which requests may evict a sequence's pages."""

    IDLE = "idle"  # every request, in the order of the policy
    QUEUED = "queued"  # requests that arrived earlier
    RUNNING = "running"  # none: it is pinned

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class Chunk:
    """One chunk: its state, and its page, slot and copy in flight (0 where it has none).

    `fits_host` is False while its values are known not to fit the packed format of host memory; such a chunk
    is dropped instead of swapped out. `slot_tokens` is the number of its tokens that the slot holds, or will
    hold once the copy is complete; it is undefined without a slot.
    """

    __slots__ = ("copy_id", "fits_host", "page", "slot", "slot_tokens", "state")

    def __init__(self) -> None:
        """Start in the state DROPPED, without a page or a slot."""
        self.state = ChunkState.DROPPED
        self.page = 0
        self.slot = 0
        self.slot_tokens = 0
        self.copy_id = 0
        self.fits_host = True

    @property
    def eviction_class(self) -> EvictionClass:
        """Eviction class of its state."""
        return self.state.eviction_class

    @property
    def readable(self) -> bool:
        """Whether a step that is dispatched now can read it."""
        return self.state.eviction_class in (EvictionClass.DIRTY, EvictionClass.CLEAN)


class CachedSequence:
    """One conversation in the cache, or a trunk that several share.

    Attributes:
      chunks: all chunks by position; the first `num_shared` belong to the trunk or its ancestors.
      num_kv_tokens: tokens [0, num_kv_tokens) were computed; dropped and reserved chunks lack their KV.
      num_by_class: number of own chunks per eviction class.
      fetched: indices of chunks copied in for its queued request before admission.
      last_active_s: when its last turn began or ended.
      arrival: arrival number of its queued or running request.
      bucket: bucket of similar turns of its last turn (`order.returns.bucket_of`); for a trunk, that of its
        latest user.
      role: which requests may evict its pages.
      role_number: position in the order in which sequences took their roles.
      row: its row in the page table while it runs, else -1. Trunks have no row: steps read only their users.
      trunk: the trunk that it begins with, or None.
      is_trunk: whether others share its chunks. A trunk has full chunks only and keeps its length when chunks
        are dropped.
      users: for a trunk, the sequences (or trunks) that begin directly with it.
      num_running_users: number of running users; a trunk counts as running while it has one.
      is_held: for a trunk, whether it is a prefix to keep, with any number of users.
    """

    __slots__ = (
        "_first_of",
        "arrival",
        "bucket",
        "chunks",
        "fetched",
        "is_held",
        "is_trunk",
        "last_active_s",
        "num_by_class",
        "num_kv_tokens",
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
        self.num_by_class = [0] * NUM_EVICTION_CLASSES
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
        self._first_of = [0] * NUM_EVICTION_CLASSES  # lower bound of the first own chunk of each class

    @property
    def num_resident(self) -> int:
        """Number of own chunks that steps can read."""
        return self.num_by_class[EvictionClass.DIRTY] + self.num_by_class[EvictionClass.CLEAN]

    @property
    def holds_state(self) -> bool:
        """Whether any own chunk is in a tier or in flight."""
        return len(self.chunks) - self.num_shared > self.num_by_class[EvictionClass.ABSENT]

    def will_write(self, index: int, chunk_tokens: int) -> bool:
        """Return whether the sequence runs and still has to compute tokens of this chunk."""
        return self.role is Role.RUNNING and index >= self.num_kv_tokens // chunk_tokens

    def lineage(self) -> Iterator[CachedSequence]:
        """Yield this sequence, its trunk, the trunk of that trunk, and so on."""
        sequence: CachedSequence | None = self
        while sequence is not None:
            yield sequence
            sequence = sequence.trunk

    def owner_of(self, index: int) -> CachedSequence:
        """Return the sequence of the lineage that owns chunk `index`."""
        owner = self
        while index < owner.num_shared:
            assert owner.trunk is not None
            owner = owner.trunk
        return owner

    def begin_with(self, trunk: CachedSequence | None) -> None:
        """Replace all chunks by those of `trunk`, or by none."""
        self.trunk = trunk
        self.chunks = [] if trunk is None else list(trunk.chunks)
        self.num_shared = len(self.chunks)
        self.num_kv_tokens = 0 if trunk is None else trunk.num_kv_tokens
        self._first_of = [self.num_shared] * NUM_EVICTION_CLASSES

    def take_from(self, trunk: CachedSequence) -> None:
        """Take over its trunk's own chunks, and begin with the trunk's parent instead."""
        self.trunk, self.num_shared = trunk.trunk, trunk.num_shared
        self._first_of = [min(pair) for pair in zip(self._first_of, trunk._first_of, strict=True)]

    def give_to(self, trunk: CachedSequence, num_chunks: int) -> None:
        """Give its own chunks with indices below `num_chunks` to a new trunk, and begin with that trunk."""
        trunk.trunk, trunk.num_shared = self.trunk, self.num_shared
        trunk.chunks = self.chunks[:num_chunks]
        trunk._first_of = [min(index, num_chunks) for index in self._first_of]
        self.trunk, self.num_shared = trunk, num_chunks
        self._first_of = [max(index, num_chunks) for index in self._first_of]

    def indices_of(self, eviction_class: EvictionClass) -> list[int]:
        """Return the indices of own chunks of one eviction class, ascending."""
        chunks = self.chunks
        return [
            i for i in range(self.num_shared, len(chunks)) if chunks[i].state.eviction_class is eviction_class
        ]

    def first_of(self, eviction_class: EvictionClass) -> int:
        """Return the first own chunk of a class, or `len(chunks)`. The search resumes where it last ended."""
        chunks, i = self.chunks, self._first_of[eviction_class]
        num_chunks = len(chunks)
        if i < num_chunks and chunks[i].state.eviction_class is eviction_class:
            return i
        while i < num_chunks and chunks[i].state.eviction_class is not eviction_class:
            i += 1
        self._first_of[eviction_class] = i
        return i

    def last_of(self, eviction_class: EvictionClass) -> int:
        """Return the last own chunk of a class, or -1."""
        for i in range(len(self.chunks) - 1, self.num_shared - 1, -1):
            if self.chunks[i].eviction_class is eviction_class:
                return i
        return -1

    def move(self, index: int, before: EvictionClass, after: EvictionClass) -> None:
        """Update the counts after own chunk `index` changed its eviction class."""
        num_by_class, first_of = self.num_by_class, self._first_of
        num_by_class[before] -= 1
        num_by_class[after] += 1
        if index < first_of[after]:
            first_of[after] = index

    def count(self, index: int, eviction_class: EvictionClass, change: int) -> None:
        """Count `change` more own chunks of a class, from `index` on; -1 removes the one at `index`."""
        self.num_by_class[eviction_class] += change
        if change > 0 and index < self._first_of[eviction_class]:
            self._first_of[eviction_class] = index

    @property
    def first_arriving(self) -> int | None:
        """The first chunk that is being copied in, including chunks of its trunks."""
        leading = self.first_of(EvictionClass.ARRIVING) if self.num_by_class[EvictionClass.ARRIVING] else None
        trunk = self.trunk
        while trunk is not None:
            if trunk.num_by_class[EvictionClass.ARRIVING]:
                leading = trunk.first_of(EvictionClass.ARRIVING)
            trunk = trunk.trunk
        return leading

    def num_tokens_of(self, index: int, chunk_tokens: int) -> int:
        """Return the number of computed tokens of chunk `index`, even if their KV was dropped."""
        return max(min(chunk_tokens, self.num_kv_tokens - index * chunk_tokens), 0)

    def holes(self, chunk_tokens: int) -> list[tuple[int, int]]:
        """Return the token intervals below `num_kv_tokens` to recompute, ascending and merged."""
        intervals: list[tuple[int, int]] = []
        for i, chunk in enumerate(self.chunks):
            start, end = i * chunk_tokens, min((i + 1) * chunk_tokens, self.num_kv_tokens)
            if chunk.eviction_class is not EvictionClass.ABSENT or start >= end:
                continue
            if intervals and intervals[-1][1] == start:
                intervals[-1] = (intervals[-1][0], end)
            else:
                intervals.append((start, end))
        return intervals
