"""Chunks that several sequences begin with: when they become a trunk's, and when they are one's own again.

Owns: trunks, from the first fork, or the prefix that somebody shares, to the last user: who begins with
which, who is pinned through whom, splitting and merging.
Does not know: what room is made for, or why somebody forks.

Sequences form a tree: leaves are conversations, and every inner node is a trunk that owns at least one full
chunk. A trunk that nobody holds has two users, or one that runs or waits: a single idle one takes its chunks
over, so that the tree is never deeper than there are forks alive. Nothing is ever copied: a chunk keeps its
page, its slot and its index, and changes its owner only.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.sequence import CachedSequence, Role

type OnMove = Callable[[str, str | None, range], None]
"""Told of chunks that go from the sequence of one id to that of another; None: the first one is no more."""


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
        """None; `on_resized` is told of sequences that own more chunks, or fewer, than they did."""
        self._store = store
        self._chunk_tokens = chunk_tokens
        self._on_move = on_move
        self._on_resized = on_resized
        self._num_made = 0

    def hold(self, sequence_id: str, num_chunks: int) -> CachedSequence:
        """A new trunk of dropped chunks, to be kept until it is released."""
        trunk = CachedSequence(sequence_id, is_trunk=True)
        trunk.is_held = True
        self._store.add(trunk)
        self._store.extend(trunk, num_chunks)
        trunk.num_kv_tokens = num_chunks * self._chunk_tokens
        return trunk

    def release(self, trunk: CachedSequence) -> None:
        """Nobody wants it kept any more but those who begin with it."""
        trunk.is_held = False
        self._tidy_below(trunk)

    def at(self, sequence: CachedSequence, num_chunks: int) -> CachedSequence | None:
        """The trunk of the first `num_chunks` chunks that a sequence has, made if need be; None for none."""
        if not num_chunks:
            return None
        owner = sequence.owner_of(num_chunks - 1)
        if owner.is_trunk and len(owner.chunks) == num_chunks:
            return owner
        return self._split(owner, num_chunks)

    def join(self, sequence: CachedSequence, trunk: CachedSequence | None) -> None:
        """A sequence without chunks of its own begins with a trunk, or with none."""
        sequence.begin_with(trunk)
        if trunk is not None:
            trunk.users[sequence] = None
            if sequence.role is Role.RUNNING:
                self.pin(sequence)

    def cut(self, sequence: CachedSequence, num_chunks: int) -> None:
        """A sequence without chunks of its own keeps the first `num_chunks` of its trunks'."""
        before, after = sequence.trunk, self.at(sequence, num_chunks)
        assert before is not None and len(sequence.chunks) == sequence.num_shared > num_chunks
        if sequence.row >= 0:
            for index in range(num_chunks, sequence.num_shared):
                self._store.page_table.set(sequence.row, index, 0)
        self.join(sequence, after)  # first, or what both have in common would be unpinned in between
        del before.users[sequence]
        if sequence.role is Role.RUNNING:
            self._unpin_from(before)
        self._tidy_below(before)

    def pin(self, sequence: CachedSequence) -> None:
        """A sequence began to run: so do its trunks."""
        trunk = sequence.trunk
        while trunk is not None:
            trunk.num_running_users += 1
            if trunk.role is Role.RUNNING:
                return
            self._store.set_role(trunk, Role.RUNNING)
            trunk = trunk.trunk

    def unpin(self, sequence: CachedSequence) -> None:
        """A sequence that runs is about to stop: so do those of its trunks that nobody else runs with."""
        self._unpin_from(sequence.trunk)

    def tidy(self, sequence: CachedSequence) -> None:
        """Along a lineage, give to idle sequences what nobody else begins with."""
        while (trunk := sequence.trunk) is not None:
            if sequence.role is Role.IDLE and len(trunk.users) == 1 and not trunk.is_held:
                self._merge(trunk, sequence)
            else:
                sequence = trunk

    # Inside

    def _unpin_from(self, trunk: CachedSequence | None) -> None:
        while trunk is not None:
            trunk.num_running_users -= 1
            if trunk.num_running_users:
                return
            self._store.cancel_reserved(trunk)
            self._store.set_role(trunk, Role.IDLE)
            trunk = trunk.trunk

    def _split(self, owner: CachedSequence, num_chunks: int) -> CachedSequence:
        """Own chunks up to `num_chunks` in all become a new trunk's; pinned as its one user is."""
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
        self.tidy(trunk)  # what an owner that waits begins with alone may be this idle one's
        return trunk

    def _merge(self, trunk: CachedSequence, sequence: CachedSequence) -> None:
        """A trunk's chunks are those of its one user, which is idle as it is; it is no more."""
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

    def _tidy_below(self, trunk: CachedSequence | None) -> None:
        """A trunk may have lost a user: it goes with the last one, and into a single idle one."""
        while trunk is not None and not trunk.users and not trunk.is_held:
            before = trunk.trunk
            self._store.shorten(trunk, trunk.num_shared)
            self._store.remove(trunk)
            self._on_move(trunk.sequence_id, None, range(0))
            if before is not None:
                del before.users[trunk]
            trunk = before
        if trunk is not None:
            self.tidy(next(iter(trunk.users), trunk))  # one that is held may be all that its own trunk has

    def _moved(self, giver: CachedSequence, taker: CachedSequence, indices: range) -> None:
        self._on_move(giver.sequence_id, taker.sequence_id, indices)
        for sequence in (giver, taker):
            if not sequence.is_trunk:
                self._on_resized(sequence)
