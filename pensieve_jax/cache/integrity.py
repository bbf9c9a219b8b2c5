"""Invariants of the cache that hold between any two calls.

Owns: the checks.
Does not know: how a state came about.
Called by `CacheManager.check_integrity`, which tests call after every step.

A host copy must hold exactly the tokens that its chunk has now. `Chunk.slot_tokens` is set when the copy
begins. A truncation lowers it and nothing raises it, so it is the length of the common beginning of copy and
chunk. The length of the chunk follows from `num_kv_tokens`, which every step that appends tokens raises. So a
write that leaves the old slot in place makes the two differ in the same step. This holds while the copy is in
flight, and where a truncated chunk grows to its old length with other tokens.
"""

from __future__ import annotations

from collections import Counter

from pensieve_jax.cache.chunk_store import ChunkStore
from pensieve_jax.cache.sequence import NUM_EVICTION_CLASSES, CachedSequence, Role
from pensieve_jax.cache.states import IN_FLIGHT, WITH_PAGE, WITH_SLOT, ChunkState, EvictionClass


def check_store(store: ChunkStore, chunk_tokens: int) -> None:
    """Assert that states, places, copies, counts and roles agree in the store and in both of its pools."""
    pages: list[int] = []
    slots: list[int] = []
    num_by_class = {role: [0] * NUM_EVICTION_CLASSES for role in Role}
    flying: set[int] = set()
    owned: set[int] = set()
    assert all(s.role is role for role, members in store.members.items() for s in members)
    for sequence in store:
        _check_sequence(sequence, chunk_tokens)
        _check_row(store, sequence)
        for chunk in sequence.chunks[sequence.num_shared :]:
            assert id(chunk) not in owned, f"a chunk of {sequence.sequence_id} has two owners"
            owned.add(id(chunk))
            num_by_class[sequence.role][chunk.eviction_class] += 1
            pages.append(chunk.page)
            slots.append(chunk.slot)
            flying.add(chunk.copy_id)
    rows = [sequence.row for sequence in store.members[Role.RUNNING] if not sequence.is_trunk]
    assert len(set(rows)) == len(rows), "a row of pages has two owners"
    flying.discard(0)
    assert flying == store.flights.keys(), "the chunks with a copy id and the copies in flight differ"
    num_in = 0
    for copy_id, (sequence, index) in store.flights.items():
        chunk = sequence.chunks[index]
        assert chunk.copy_id == copy_id, f"copy {copy_id} lost its chunk"
        assert index >= sequence.num_shared, f"copy {copy_id} is of a chunk of another sequence"
        num_in += chunk.state is ChunkState.COPYING_IN
    for detached in store.detached_copies.values():
        pages.append(detached.page)
        slots.append(detached.slot)
        num_in += detached.is_in
    assert not store.flights.keys() & store.detached_copies.keys(), "a copy is both in flight and detached"
    assert store.num_copies_in == num_in
    assert store.num_copies_in + store.num_copies_out == len(store.flights) + len(store.detached_copies)
    assert num_by_class == store.num_by_class, (
        f"{num_by_class} chunks by eviction class, counted {store.num_by_class}"
    )
    for places, pool in ((pages, store.pages), (slots, store.slots)):
        owners = Counter(place for place in places if place)
        assert all(count == 1 for count in owners.values()), "a place has two owners"
        pool.check_integrity(owners.keys())
    _check_trunks(store, chunk_tokens)


def _check_sequence(sequence: CachedSequence, chunk_tokens: int) -> None:
    name = sequence.sequence_id
    own_counts = [0] * NUM_EVICTION_CLASSES
    for index, chunk in enumerate(sequence.chunks):
        state = chunk.state
        assert (chunk.page != 0) == (state in WITH_PAGE), f"{name}[{index}] {state.value}, page {chunk.page}"
        assert (chunk.slot != 0) == (state in WITH_SLOT), f"{name}[{index}] {state.value}, slot {chunk.slot}"
        assert (chunk.copy_id != 0) == (state in IN_FLIGHT), (
            f"{name}[{index}] {state.value}, copy {chunk.copy_id}"
        )
        assert chunk.fits_host or not chunk.slot, f"{name}[{index}] has a slot but does not fit it"
        if index < sequence.num_shared:
            assert sequence.trunk is not None and chunk is sequence.trunk.chunks[index]
            continue
        own_counts[chunk.eviction_class] += 1
        num_tokens = sequence.num_tokens_of(index, chunk_tokens)
        assert not chunk.slot or chunk.slot_tokens == num_tokens, (
            f"{name}[{index}] has {num_tokens} tokens, its slot {chunk.slot} holds {chunk.slot_tokens}"
        )
        if state is ChunkState.RESERVED:
            assert sequence.role is Role.RUNNING, "an unpinned sequence holds a reserved page"
    assert own_counts == sequence.num_by_class, (
        f"{name}: {own_counts} by class, counted {sequence.num_by_class}"
    )
    num_computed_chunks = -(-sequence.num_kv_tokens // chunk_tokens)
    assert num_computed_chunks <= len(sequence.chunks), "computed tokens without a chunk"
    if sequence.role is not Role.RUNNING:
        assert num_computed_chunks == len(sequence.chunks), "a chunk past the computed tokens"
        own = sequence.chunks[sequence.num_shared :]
        assert not own or sequence.is_trunk or own[-1].eviction_class is not EvictionClass.ABSENT, (
            "the last chunk is dropped"
        )


def _check_row(store: ChunkStore, sequence: CachedSequence) -> None:
    has_row = sequence.role is Role.RUNNING and not sequence.is_trunk
    assert (sequence.row >= 0) == has_row, "exactly the running conversations have a row of pages"
    if sequence.row >= 0:
        row = store.page_table.take([sequence.row])[0].tolist()
        pages = [chunk.page for chunk in sequence.chunks]
        assert row[: len(pages)] == pages, "the row of pages and a chunk disagree"
        assert not any(row[len(pages) :]), "pages past the last chunk"


def _check_trunks(store: ChunkStore, chunk_tokens: int) -> None:
    """Assert that every lineage is in the store, and that trunks count their users and running users."""
    users: dict[CachedSequence, list[CachedSequence]] = {trunk: [] for trunk in store if trunk.is_trunk}
    for sequence in store:
        name, trunk = sequence.sequence_id, sequence.trunk
        if trunk is not None:
            users[trunk].append(sequence)
        # Equal lengths also prove that a lineage ends, since every trunk has chunks of its own.
        # `_check_sequence` compares the chunks.
        assert sequence.num_shared == (0 if trunk is None else len(trunk.chunks)), (
            f"{name} shares another number of chunks than its trunk has"
        )
    for trunk, known in users.items():
        name, num_running = trunk.sequence_id, sum(user.role is Role.RUNNING for user in known)
        assert trunk.is_held or len(trunk.chunks) > trunk.num_shared, f"{name} has no chunk of its own"
        assert trunk.num_kv_tokens == len(trunk.chunks) * chunk_tokens, f"{name} has a partial chunk"
        assert trunk.users.keys() == set(known) and trunk.num_running_users == num_running, name
        assert (trunk.role is Role.RUNNING) == (num_running > 0), (
            f"{name} is pinned without users, or unpinned"
        )
        assert trunk.role is not Role.QUEUED, f"{name} is queued"
        alone = len(known) == 1 and known[0].role is Role.IDLE
        assert trunk.is_held or (known and not alone), f"{name} should have been merged or removed"
