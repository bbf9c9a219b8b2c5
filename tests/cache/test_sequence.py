"""The chunk list of one conversation: owners of chunks, the starts of eviction classes, and losses."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import CachedSequence, ChunkState, EvictionClass, Role
from pensieve_jax.cache.sequence import Chunk
from tests.cache.helpers import CHUNK

GPU, CPU, BOTH, GONE = ChunkState.ON_GPU, ChunkState.ON_CPU, ChunkState.ON_BOTH, ChunkState.DROPPED


def sequence_of(*states: ChunkState, num_tokens: int | None = None, name: str = "a") -> CachedSequence:
    sequence = CachedSequence(name)
    for index, state in enumerate(states):
        chunk = Chunk()
        chunk.state = state
        sequence.chunks.append(chunk)
        sequence.count(index, state.eviction_class, 1)
    sequence.num_kv_tokens = len(states) * CHUNK if num_tokens is None else num_tokens
    return sequence


def test_a_new_sequence_is_empty_idle_and_without_a_row():
    sequence = CachedSequence("a")
    assert (sequence.num_kv_tokens, sequence.num_shared, sequence.row, sequence.arrival) == (0, 0, -1, -1)
    assert (sequence.last_active_s, sequence.bucket, sequence.num_running_users) == (0.0, 0, 0)
    assert sequence.role is Role.IDLE and not sequence.is_trunk and not sequence.is_held
    assert not sequence.holds_state and sequence.num_resident == 0
    chunk = Chunk()
    assert (chunk.page, chunk.slot, chunk.slot_tokens, chunk.copy_id, chunk.fits_host) == (0, 0, 0, 0, True)
    assert not chunk.readable


@pytest.mark.parametrize(
    ("states", "holds"), [((), False), ((GONE, GONE), False), ((GONE, CPU), True), ((GPU,), True)]
)
def test_a_sequence_has_kv_cache_if_one_chunk_is_in_some_tier(states, holds):
    assert sequence_of(*states).holds_state is holds


def test_resident_chunks_are_those_that_steps_can_read():
    sequence = sequence_of(GPU, CPU, BOTH, GONE, ChunkState.COPYING_OUT, ChunkState.COPYING_IN)
    assert sequence.num_resident == 3
    assert [chunk.readable for chunk in sequence.chunks] == [True, False, True, False, True, False]


@pytest.mark.parametrize(("index", "writes"), [(0, False), (1, True), (2, True)])
def test_a_running_sequence_will_write_its_last_chunk_and_those_behind(index, writes):
    sequence = sequence_of(GPU, GPU, GPU, num_tokens=CHUNK + 3)
    assert not sequence.will_write(index, CHUNK)
    sequence.role = Role.RUNNING
    assert sequence.will_write(index, CHUNK) is writes


def test_a_full_last_chunk_is_not_written_any_more():
    sequence = sequence_of(GPU, GPU, num_tokens=CHUNK)
    sequence.role = Role.RUNNING
    assert [sequence.will_write(index, CHUNK) for index in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("states", "first", "last"),
    [((GPU, CPU, GPU, CPU), 1, 3), ((CPU,), 0, 0), ((GPU, GPU), 2, -1), ((), 0, -1)],
)
def test_first_and_last_of_an_eviction_class(states, first, last):
    sequence = sequence_of(*states)
    assert [sequence.first_of(EvictionClass.HOST) for _ in range(2)] == [first, first]
    assert sequence.last_of(EvictionClass.HOST) == last
    assert sequence.indices_of(EvictionClass.HOST) == [i for i, state in enumerate(states) if state is CPU]


def test_the_start_moves_ahead_when_a_chunk_before_it_joins():
    sequence = sequence_of(GPU, GPU, GPU, CPU)
    assert sequence.first_of(EvictionClass.HOST) == 3
    for index in (2, 0):
        sequence.chunks[index].state = CPU
        sequence.move(index, EvictionClass.DIRTY, EvictionClass.HOST)
        assert sequence.first_of(EvictionClass.HOST) == index
    assert sequence.num_by_class[EvictionClass.DIRTY] == 1 and sequence.num_by_class[EvictionClass.HOST] == 3
    assert sequence.first_of(EvictionClass.DIRTY) == 1


def test_the_start_moves_back_when_its_first_chunk_leaves():
    sequence = sequence_of(CPU, GPU, CPU)
    sequence.chunks[0].state = GPU
    sequence.move(0, EvictionClass.HOST, EvictionClass.DIRTY)
    assert sequence.first_of(EvictionClass.HOST) == 2 and sequence.first_of(EvictionClass.DIRTY) == 0


def test_counted_chunks_move_the_start_when_they_join():
    sequence = sequence_of(GPU, GPU)
    assert sequence.first_of(EvictionClass.ABSENT) == 2
    sequence.chunks += [Chunk(), Chunk()]
    sequence.count(2, EvictionClass.ABSENT, 2)
    assert sequence.first_of(EvictionClass.ABSENT) == 2 and sequence.num_by_class[EvictionClass.ABSENT] == 2
    sequence.count(3, EvictionClass.ABSENT, -1)
    assert sequence.num_by_class[EvictionClass.ABSENT] == 1


# Shared chunks.


def a_family() -> tuple[CachedSequence, CachedSequence, CachedSequence]:
    """Return a sequence of 5 chunks. An inner trunk has 3 of them, and an outer trunk has the first."""
    sequence = sequence_of(GPU, CPU, GPU, CPU, GPU)
    outer, inner = (CachedSequence(name, is_trunk=True) for name in ("outer", "inner"))
    for trunk, end in ((outer, 1), (inner, 3)):
        sequence.give_to(trunk, end)
        trunk.num_kv_tokens = end * CHUNK
    return sequence, inner, outer


def test_every_chunk_has_its_owner():
    sequence, inner, outer = a_family()
    assert [sequence.owner_of(index) for index in range(5)] == [outer, inner, inner, sequence, sequence]
    assert list(sequence.lineage()) == [sequence, inner, outer] and list(outer.lineage()) == [outer]
    assert [own.num_shared for own in (sequence, inner, outer)] == [3, 1, 0]
    assert inner.chunks == sequence.chunks[:3] and outer.chunks == sequence.chunks[:1]


def test_eviction_classes_start_within_own_chunks():
    sequence, inner, outer = a_family()
    assert [own.first_of(EvictionClass.DIRTY) for own in (sequence, inner, outer)] == [4, 2, 0]
    assert [own.first_of(EvictionClass.HOST) for own in (sequence, inner, outer)] == [3, 1, 1]
    assert [own.last_of(EvictionClass.HOST) for own in (sequence, inner, outer)] == [3, 1, -1]
    assert [own.indices_of(EvictionClass.DIRTY) for own in (sequence, inner, outer)] == [[4], [2], [0]]


def test_a_sequence_takes_back_the_chunks_of_its_trunk():
    sequence, inner, outer = a_family()
    sequence.take_from(inner)
    assert sequence.trunk is outer and sequence.num_shared == 1
    assert sequence.first_of(EvictionClass.HOST) == 1 and sequence.first_of(EvictionClass.DIRTY) == 2
    assert sequence.owner_of(1) is sequence


def test_a_sequence_begins_with_a_trunk_or_with_nothing():
    _, inner, _ = a_family()
    fork = CachedSequence("fork")
    fork.begin_with(inner)
    assert fork.chunks == inner.chunks and fork.chunks is not inner.chunks
    assert (fork.num_shared, fork.num_kv_tokens, fork.first_of(EvictionClass.HOST)) == (3, 3 * CHUNK, 3)
    fork.begin_with(None)
    assert (fork.trunk, fork.chunks, fork.num_shared, fork.num_kv_tokens) == (None, [], 0, 0)


def test_the_first_arriving_chunk_may_belong_to_any_trunk_of_the_lineage():
    sequence, inner, outer = a_family()
    assert sequence.first_arriving is None
    for owner, index in ((sequence, 3), (inner, 1), (outer, 0)):
        before = owner.chunks[index].state.eviction_class
        owner.chunks[index].state = ChunkState.COPYING_IN
        owner.num_by_class[before] -= 1
        owner.num_by_class[EvictionClass.ARRIVING] += 1
        owner._first_of[EvictionClass.ARRIVING] = owner.num_shared
        assert sequence.first_arriving == index


# Tokens.


@pytest.mark.parametrize(("index", "num_tokens"), [(0, CHUNK), (1, CHUNK), (2, 3), (3, 0), (4, 0)])
def test_tokens_of_a_chunk(index, num_tokens):
    assert sequence_of(*[GPU] * 5, num_tokens=2 * CHUNK + 3).num_tokens_of(index, CHUNK) == num_tokens


@pytest.mark.parametrize(
    ("states", "num_tokens", "holes"),
    [
        ((GONE, GONE, GPU), 3 * CHUNK, [(0, 2 * CHUNK)]),
        ((GONE, GPU, GONE, GPU), 4 * CHUNK, [(0, CHUNK), (2 * CHUNK, 3 * CHUNK)]),
        ((GPU, ChunkState.RESERVED, ChunkState.RESERVED), CHUNK + 5, [(CHUNK, CHUNK + 5)]),
        ((GPU, ChunkState.RESERVED), CHUNK, []),
        ((GPU, CPU, BOTH, ChunkState.LEAVING, ChunkState.COPYING_IN), 5 * CHUNK, []),
    ],
)
def test_holes_are_computed_tokens_in_no_tier(states, num_tokens, holes):
    assert sequence_of(*states, num_tokens=num_tokens).holes(CHUNK) == holes
