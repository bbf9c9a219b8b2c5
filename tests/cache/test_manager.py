"""The cache manager: pinning, reserving, evicting, and the count of available pages."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve_jax.cache import CachedSequence, ChunkState, Role
from pensieve_jax.config import POLICIES
from tests.cache.helpers import CHUNK, Cache, resident, states


def test_admission_reserves_every_missing_page():
    cache = Cache(10)
    idle = cache.idle("a", 4 * CHUNK)
    cache.drop(idle, 0, 2)
    sequence = cache.queued("a", idle)
    assert cache.manager.try_admit(sequence, 6 * CHUNK + 1, waive_reserve=False)
    assert states(sequence) == ["reserved", "on gpu", "reserved", "on gpu", *["reserved"] * 3]
    assert sequence.holes(CHUNK) == [(0, 16), (32, 48)]
    assert cache.pool.num_free == 3 and sequence.role is Role.RUNNING
    assert len({chunk.page for chunk in sequence.chunks} - {0}) == 7
    cache.check()


@pytest.mark.parametrize(("num_chunks", "admitted"), [(7, True), (8, True), (9, False), (10, False)])
def test_the_reserve_stays_available(num_chunks, admitted):
    """Of 10 pages 1 is in use and 1 must stay free; idle ones count as available."""
    cache = Cache(10, reserve_pages=1)
    cache.running("runs", CHUNK)
    cache.idle("idle", 5 * CHUNK)
    sequence = cache.queued("new")
    assert cache.manager.try_admit(sequence, num_chunks * CHUNK, waive_reserve=False) is admitted
    assert len(sequence.chunks) == (num_chunks if admitted else 0), "a refusal changes nothing"
    assert (sequence.role is Role.RUNNING) is admitted
    cache.check()


def test_the_reserve_is_waived_if_nothing_runs():
    cache = Cache(10, reserve_pages=3)
    sequence = cache.queued("new")
    assert not cache.manager.try_admit(sequence, 10 * CHUNK, waive_reserve=False)
    assert not cache.manager.try_admit(sequence, 11 * CHUNK, waive_reserve=True)
    assert cache.manager.try_admit(sequence, 10 * CHUNK, waive_reserve=True)
    cache.check()


def test_a_requesters_own_chunks_are_pinned_before_anything_is_dropped():
    """Otherwise its leading chunks would be the first victims."""
    cache = Cache(6)
    old = cache.idle("old", 3 * CHUNK, idle_s=50)
    cache.idle("young", 3 * CHUNK, idle_s=1)
    sequence = cache.queued("old", old)
    assert cache.manager.num_available(sequence) == 3 and cache.manager.num_available() == 6
    cache.manager.begin_step()
    assert cache.manager.try_admit(sequence, 5 * CHUNK, waive_reserve=True)
    assert resident(old) == [0, 1, 2]
    assert cache.take_drops() == [("young", 0), ("young", 1)]
    assert cache.take_drops() == []
    cache.check()


def test_running_sequences_are_never_victims():
    cache = Cache(5)
    first = cache.running("first", 3 * CHUNK)
    second = cache.running("second", 2 * CHUNK)
    assert cache.manager.num_available() == 0
    assert not cache.manager.grow(first, 3 * CHUNK + 1)
    assert len(first.chunks) == 3 and resident(second) == [0, 1]
    assert cache.manager.grow(first, 3 * CHUNK), "it needs no page for that"
    cache.check()


def test_growing_evicts_idle_chunks_then_those_of_the_latest_in_the_queue():
    cache = Cache(7)
    first = cache.running("first", CHUNK)
    queued = [cache.queued(f"q{i}", cache.idle(f"q{i}", 2 * CHUNK)) for i in range(2)]
    idle = cache.idle("idle", 2 * CHUNK)
    assert cache.pool.num_free == 0
    order = []
    for num_chunks in range(2, 8):
        cache.manager.begin_step()
        assert cache.manager.grow(first, num_chunks * CHUNK)
        order += cache.take_drops()
        cache.check()
    assert order == [("idle", 0), ("idle", 1), ("q1", 0), ("q1", 1), ("q0", 0), ("q0", 1)]
    assert not cache.manager.grow(first, 8 * CHUNK)
    assert idle.num_kv_tokens == 0 and all(not sequence.chunks for sequence in queued)


def test_queued_chunks_give_way_to_earlier_arrivals_only():
    cache = Cache(4)
    waiting = cache.queued("waiting", cache.idle("waiting", 2 * CHUNK))
    late = cache.running("late", 2 * CHUNK)
    cache.manager.begin_step()
    assert not cache.manager.grow(late, 3 * CHUNK)
    assert resident(waiting) == [0, 1]


def test_pages_of_earlier_queued_sequences_are_not_available():
    """They do not give way, so a later arrival that needs one of them is refused and changes nothing."""
    cache = Cache(8)
    early = cache.queued("early", cache.idle("early", 3 * CHUNK))
    late = cache.queued("late", cache.idle("late", 2 * CHUNK))
    assert cache.pool.num_free == 3
    assert [cache.manager.num_available(asks) for asks in (None, early, late)] == [8, 5, 3]
    cache.manager.begin_step()
    assert not cache.manager.try_admit(late, 6 * CHUNK, waive_reserve=True)
    assert late.role is Role.QUEUED and len(late.chunks) == 2
    assert cache.manager.try_admit(late, 5 * CHUNK, waive_reserve=True)
    assert resident(early) == [0, 1, 2] and cache.pool.num_free == 0
    cache.check()


def test_the_reserve_is_counted_without_pages_of_earlier_queued_sequences():
    cache = Cache(8, reserve_pages=2)
    cache.queued("early", cache.idle("early", 3 * CHUNK))
    late = cache.queued("late")
    assert not cache.manager.try_admit(late, 4 * CHUNK, waive_reserve=False)
    assert cache.manager.try_admit(late, 3 * CHUNK, waive_reserve=False)
    cache.check()


def test_a_conversation_that_is_pinned_within_a_step_is_not_a_victim():
    """The order of victims was computed before its admission."""
    cache = Cache(6)
    first, second = (cache.idle(name, 2 * CHUNK, idle_s) for name, idle_s in (("a", 9), ("b", 5)))
    runs = cache.running("runs", 2 * CHUNK)
    cache.manager.begin_step()
    assert cache.manager.grow(runs, 3 * CHUNK)
    assert cache.take_drops() == [("a", 0)]
    cache.queued("a", first)
    assert cache.manager.try_admit(first, 2 * CHUNK, waive_reserve=False)
    assert cache.take_drops() == [("b", 0)]
    assert resident(first) == [1] and resident(second) == [1]
    cache.check()


def test_fill_makes_reserved_chunks_resident():
    cache = Cache(10)
    sequence = cache.queued("a")
    cache.manager.try_admit(sequence, 50, waive_reserve=True)
    cache.manager.fill(sequence, 0, 20)
    assert resident(sequence) == [0, 1] and sequence.num_kv_tokens == 20
    cache.manager.fill(sequence, 20, 32)
    assert resident(sequence) == [0, 1] and sequence.num_kv_tokens == 32
    cache.manager.fill(sequence, 32, 33)
    assert resident(sequence) == [0, 1, 2]
    assert sequence.chunks[3].state is ChunkState.RESERVED
    cache.check()


def test_filling_a_hole_does_not_move_the_end():
    cache = Cache(10)
    sequence = cache.idle("a", 70)
    cache.drop(sequence, 1, 2)
    cache.queued("a", sequence)
    cache.manager.try_admit(sequence, 75, waive_reserve=True)
    cache.manager.fill(sequence, 16, 32)
    assert sequence.num_kv_tokens == 70 and sequence.holes(CHUNK) == [(32, 48)]


@pytest.mark.parametrize("how", ["suspend", "release"])
def test_unpinning_frees_pages_that_were_only_reserved(how):
    cache = Cache(10)
    sequence = cache.queued("a")
    cache.manager.try_admit(sequence, 80, waive_reserve=True)
    cache.manager.fill(sequence, 0, 40)
    cache.clock.advance(5)
    getattr(cache.manager, how)(sequence)
    assert cache.pool.num_free == 7 and sequence.num_kv_tokens == 40 and len(sequence.chunks) == 3
    assert sequence.role is (Role.QUEUED if how == "suspend" else Role.IDLE)
    assert sequence.last_active_s == (0.0 if how == "suspend" else 105.0)
    cache.check()


@pytest.mark.parametrize("num_tokens", [0, 1, 16, 17, 63, 64, 100])
def test_truncate_frees_whole_chunks_past_the_cut(num_tokens):
    cache = Cache(10)
    sequence = cache.idle("a", 64)
    cache.manager.truncate(sequence, num_tokens)
    assert sequence.num_kv_tokens == min(num_tokens, 64)
    assert len(sequence.chunks) == -(-min(num_tokens, 64) // CHUNK)
    assert cache.take_drops() == [], "drops are left that no call took"
    cache.check()


def test_losing_the_tail_shortens_the_computed_part():
    """A hole has computed tokens behind it, so a lost tail is not a hole."""
    cache = Cache(9, policy="trailing")
    sequence = cache.idle("a", 60)
    cache.drop(sequence, 1)
    runs = cache.running("runs", 6 * CHUNK)
    cache.manager.begin_step()
    assert cache.manager.grow(runs, 8 * CHUNK)
    assert sequence.num_kv_tokens == 16 and len(sequence.chunks) == 1, "chunk 3, then 2; 1 was gone"
    assert sequence.holes(CHUNK) == []
    cache.check()


def test_closing_frees_every_page():
    cache = Cache(10)
    sequence = cache.idle("a", 60)
    cache.drop(sequence, 0)
    cache.manager.close(sequence)
    assert cache.pool.num_free == 10
    cache.check()


def test_lost_pools_drop_every_chunk():
    cache = Cache(10)
    idle, runs = cache.idle("idle", 40), cache.running("runs", 40)
    queued = cache.queued("queued", cache.idle("queued", 20))
    cache.manager.lose_device()
    assert cache.pool.num_free == 10 and idle.num_kv_tokens == queued.num_kv_tokens == 0
    assert not resident(runs)
    cache.manager.truncate(runs, 40)
    cache.manager.release(runs)
    cache.check()


def test_the_page_table_has_the_pages_of_running_sequences():
    cache = Cache(100)
    idle, sequence = cache.idle("b", CHUNK), cache.running("a", 70 * CHUNK)
    row = cache.manager.page_table.take([sequence.row])[0].tolist()
    assert row[:70] == [chunk.page for chunk in sequence.chunks] and not any(row[70:])
    assert len(set(row[:70])) == 70 and 0 not in row[:70]
    assert idle.row == -1
    cache.manager.release(sequence)
    assert sequence.row == -1
    cache.check()


def test_a_page_table_grows_in_rows_and_columns():
    cache = Cache(200)
    sequences = [cache.running(f"a{i}", (1 + i % 3 * 20) * CHUNK) for i in range(5)]
    sequences += [cache.running(f"b{i}", CHUNK) for i in range(40)]
    table = cache.manager.page_table.take([sequence.row for sequence in sequences])
    assert table.tolist() == [
        [chunk.page for chunk in sequence.chunks] + [0] * (table.shape[1] - len(sequence.chunks))
        for sequence in sequences
    ]
    assert len({sequence.row for sequence in sequences}) == 45
    cache.check()


@given(
    policy=st.sampled_from(POLICIES),
    ops=st.lists(
        st.tuples(
            st.sampled_from(["turn", "turn", "turn", "truncate", "close", "suspend", "think"]),
            st.integers(0, 4),
            st.integers(1, 60),
        ),
        max_size=40,
    ),
)
def test_any_order_of_turns_keeps_its_invariants(policy, ops):
    """Turns grow, are suspended, cut or forgotten; after each call the counts match."""
    cache, sequences = Cache(12, policy=policy), {}
    for op, number, size in ops:
        sequence = sequences.get(number)
        if op == "think":
            cache.clock.advance(size)
        elif op in ("turn", "suspend"):
            sequence = cache.queued(f"s{number}", sequence)
            sequences[number] = sequence
            num_tokens = min(sequence.num_kv_tokens + size, 12 * CHUNK)
            cache.manager.begin_step()
            assert cache.manager.try_admit(sequence, num_tokens, waive_reserve=True)
            if op == "turn":
                for start, end in sequence.holes(CHUNK):
                    cache.manager.fill(sequence, start, end)
                cache.manager.fill(sequence, sequence.num_kv_tokens, num_tokens)
                assert not sequence.holes(CHUNK) and sequence.num_kv_tokens == num_tokens
            else:
                cache.manager.suspend(sequence)
            cache.manager.release(sequence)
        elif sequence is not None:
            cache.manager.truncate(sequence, size)
            if op == "close":
                cache.manager.close(sequences.pop(number))
        cache.check()
    for sequence in sequences.values():
        cache.manager.close(sequence)
    assert cache.pool.num_free == 12


@pytest.mark.parametrize(
    "policy",
    ["retention", *(pytest.param(one, marks=pytest.mark.long) for one in POLICIES if one != "retention")],
)
@pytest.mark.parametrize("cpu_pages", [0, 8])
@pytest.mark.parametrize("num_pages", [6, 20])
def test_nothing_is_kept_of_closed_sequences(policy, cpu_pages, num_pages):
    """This includes orders of eviction classes that are never used: without host memory, or if all fits."""
    cache = Cache(num_pages, cpu_pages, policy=policy)
    cache.idle("stays", 2 * CHUNK)
    for i in range(400):
        sequence = cache.running(f"closed {i}", 3 * CHUNK)
        cache.manager.release(sequence)
        cache.manager.close(sequence)
        cache.manager.take_drops()
        cache.complete()
    gc.collect()
    found = [one.sequence_id for one in gc.get_objects() if isinstance(one, CachedSequence)]
    assert sum(name.startswith("closed") for name in found) < 100
