"""Chunks that several sequences begin with, and the trunks that own them.

Owns: trunks from the first fork, or from a shared prefix, to the last user: the tree, pinning, splitting and
merging.
Does not know: why room is needed or why a caller forks.
Called by `CacheManager`.

Sequences form a tree. Leaves are conversations; every inner node is a trunk that owns at least one full
chunk. A trunk that is not held has at least two users, or one that is running or queued. A single idle user
takes over its chunks, so the tree is never deeper than the number of live forks. No KV is ever copied: a
chunk keeps its page, its slot and its index, and only changes its owner.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.sequence import CachedSequence, Role

type OnMove = Callable[[str, str | None, range], None]
"""Called with (giver id, taker id, indices) when chunks change owner; taker None: the giver was removed."""


class SharedChunks:
    """The trunks of one cache."""

    def __init__(
        self,
        store: ChunkStore,
        chunk_tokens: int,
        *,
        on_move: OnMove,
        on_resized: Callable[[CachedSequence], None],
    ) -> None:
        """Start without trunks; `on_resized` is called for sequences whose number of own chunks changed."""
        self._store = store
        self._chunk_tokens = chunk_tokens
        self._on_move = on_move
        self._on_resized = on_resized
        self._num_made = 0

    def create_held(self, sequence_id: str, num_chunks: int) -> CachedSequence:
        """Create a trunk of dropped chunks that is kept until `release`."""
        trunk = CachedSequence(sequence_id, is_trunk=True)
        trunk.is_held = True
        self._store.add(trunk)
        self._store.extend(trunk, num_chunks)
        trunk.num_kv_tokens = num_chunks * self._chunk_tokens
        return trunk

    def release(self, trunk: CachedSequence) -> None:
        """Keep a held trunk only as long as it has users."""
        trunk.is_held = False
        self._clean_up_from(trunk)

    def trunk_at(self, sequence: CachedSequence, num_chunks: int) -> CachedSequence | None:
        """Return the trunk of a sequence's first `num_chunks` chunks, made if needed; None for 0 chunks."""
        if not num_chunks:
            return None
        owner = sequence.owner_of(num_chunks - 1)
        if owner.is_trunk and len(owner.chunks) == num_chunks:
            return owner
        return self._split(owner, num_chunks)

    def join(self, sequence: CachedSequence, trunk: CachedSequence | None) -> None:
        """Make a sequence without own chunks begin with `trunk`, or with none."""
        sequence.begin_with(trunk)
        if trunk is not None:
            trunk.users[sequence] = None
            if sequence.role is Role.RUNNING:
                self.pin(sequence)

    def cut(self, sequence: CachedSequence, num_chunks: int) -> None:
        """Truncate a sequence without own chunks to the first `num_chunks` shared ones."""
        before, after = sequence.trunk, self.trunk_at(sequence, num_chunks)
        assert before is not None and len(sequence.chunks) == sequence.num_shared > num_chunks
        if sequence.row >= 0:
            for index in range(num_chunks, sequence.num_shared):
                self._store.page_table.set(sequence.row, index, 0)
        self.join(sequence, after)  # first, or common ancestors would be unpinned in between
        del before.users[sequence]
        if sequence.role is Role.RUNNING:
            self._unpin_from(before)
        self._clean_up_from(before)

    def pin(self, sequence: CachedSequence) -> None:
        """Pin the trunks of a sequence that began to run."""
        trunk = sequence.trunk
        while trunk is not None:
            trunk.num_running_users += 1
            if trunk.role is Role.RUNNING:
                return
            self._store.set_role(trunk, Role.RUNNING)
            trunk = trunk.trunk

    def unpin(self, sequence: CachedSequence) -> None:
        """Unpin the trunks of a sequence that stops running, except those with other running users."""
        self._unpin_from(sequence.trunk)

    def merge_idle(self, sequence: CachedSequence) -> None:
        """Merge every trunk of a lineage into its user if that is its only one and idle."""
        while (trunk := sequence.trunk) is not None:
            if sequence.role is Role.IDLE and len(trunk.users) == 1 and not trunk.is_held:
                self._merge(trunk, sequence)
            else:
                sequence = trunk

    # Private methods

    def _unpin_from(self, trunk: CachedSequence | None) -> None:
        while trunk is not None:
            trunk.num_running_users -= 1
            if trunk.num_running_users:
                return
            self._store.cancel_reserved(trunk)
            self._store.set_role(trunk, Role.IDLE)
            trunk = trunk.trunk

    def _split(self, owner: CachedSequence, num_chunks: int) -> CachedSequence:
        """Move own chunks with indices below `num_chunks` to a new trunk, pinned if its one user is."""
        self._num_made += 1
        name = f"\0trunk-{self._num_made}"  # never a caller's id: those have no NUL
        trunk = CachedSequence(name, is_trunk=True)
        trunk.last_active_s, trunk.bucket = owner.last_active_s, owner.bucket
        self._store.add(trunk)
        if owner.role is Role.RUNNING:
            self._store.set_role(trunk, Role.RUNNING)
            trunk.num_running_users = 1
        owner.give_to(trunk, num_chunks)
        trunk.num_kv_tokens = num_chunks * self._chunk_tokens
        trunk.users[owner] = None
        if trunk.trunk is not None:
            del trunk.trunk.users[owner]
            trunk.trunk.users[trunk] = None
        self._store.hand_over(owner, trunk, trunk.num_shared, num_chunks)
        self._moved(owner, trunk, range(trunk.num_shared, num_chunks))
        self.merge_idle(
            trunk
        )  # the new trunk is idle, so it may absorb a parent that a queued owner kept alive
        return trunk

    def _merge(self, trunk: CachedSequence, sequence: CachedSequence) -> None:
        """Give a trunk's chunks to its only user and remove it; both are idle."""
        first, end = trunk.num_shared, sequence.num_shared
        sequence.take_from(trunk)
        if trunk.trunk is not None:
            del trunk.trunk.users[trunk]
            trunk.trunk.users[sequence] = None
        self._store.hand_over(trunk, sequence, first, end)
        self._store.remove(trunk)
        self._moved(trunk, sequence, range(first, end))
        self._on_move(trunk.sequence_id, None, range(0))
        self._store.trim(sequence)

    def _clean_up_from(self, trunk: CachedSequence | None) -> None:
        """Remove a trunk that lost its last user, or merge it into a single idle user."""
        while trunk is not None and not trunk.users and not trunk.is_held:
            before = trunk.trunk
            self._store.shorten(trunk, trunk.num_shared)
            self._store.remove(trunk)
            self._on_move(trunk.sequence_id, None, range(0))
            if before is not None:
                del before.users[trunk]
            trunk = before
        if trunk is not None:
            self.merge_idle(next(iter(trunk.users), trunk))  # a held trunk may be the only user of its parent

    def _moved(self, giver: CachedSequence, taker: CachedSequence, indices: range) -> None:
        self._on_move(giver.sequence_id, taker.sequence_id, indices)
        for sequence in (giver, taker):
            if not sequence.is_trunk:
                self._on_resized(sequence)
