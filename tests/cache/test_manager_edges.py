"""The manager call by call: limits, reports, and what each call must not change."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import ChunkDrop, DropReason, EvictionClass, Role
from pensieve_jax.cache.chunk_store import ChunkStore
from tests.cache.helpers import CHUNK, Cache, pages_of, resident, states


def test_an_admission_keeps_chunks_behind_the_requested_tokens():
    cache = Cache(8)
    sequence = cache.queued("a", cache.idle("a", 3 * CHUNK))
    assert cache.manager.try_admit(sequence, CHUNK, waive_reserve=True)
    assert resident(sequence) == [0, 1, 2] and cache.pool.num_free == 5


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(CHUNK - 1, 1), (CHUNK, 1), (CHUNK + 1, 2)])
def test_an_admission_takes_a_page_for_every_started_chunk(num_tokens, num_pages):
    cache = Cache(8)
    sequence = cache.queued("a")
    assert cache.manager.try_admit(sequence, num_tokens, waive_reserve=True)
    assert cache.pool.num_free == 8 - num_pages


@pytest.mark.parametrize(
    ("num_tokens", "fits"), [(2 * CHUNK, [False, False]), (2 * CHUNK - 1, [False, True])]
)
def test_a_chunk_that_did_not_fit_the_host_may_fit_after_a_write(num_tokens, fits):
    cache = Cache(8, 8)
    sequence = cache.queued("a", cache.idle("a", num_tokens))
    for chunk in sequence.chunks:
        chunk.fits_host = False
    assert cache.manager.try_admit(sequence, num_tokens, waive_reserve=True)
    assert [chunk.fits_host for chunk in sequence.chunks] == fits


def test_growing_takes_one_page_per_chunk():
    cache = Cache(8)
    sequence = cache.running("a", CHUNK)
    for num_tokens, num_chunks in ((CHUNK, 1), (CHUNK + 1, 2), (2 * CHUNK, 2), (4 * CHUNK + 1, 5)):
        assert cache.manager.grow(sequence, num_tokens) and len(sequence.chunks) == num_chunks
        assert cache.pool.num_free == 8 - num_chunks


def test_filling_counts_started_chunks():
    cache = Cache(8)
    sequence = cache.queued("a")
    assert cache.manager.try_admit(sequence, 3 * CHUNK, waive_reserve=True)
    cache.manager.fill(sequence, 0, CHUNK)
    assert states(sequence) == ["on gpu", "reserved", "reserved"]
    cache.manager.fill_next([sequence])
    assert states(sequence) == ["on gpu", "on gpu", "reserved"] and sequence.num_kv_tokens == CHUNK + 1
    cache.manager.fill_next([sequence])
    assert states(sequence)[2] == "reserved" and sequence.num_kv_tokens == CHUNK + 2
    cache.check()


def test_decodes_of_several_sequences_are_filled_in_one_call():
    cache = Cache(8)
    one, two = (cache.queued(name) for name in ("one", "two"))
    for sequence, num_tokens in ((one, CHUNK), (two, 3)):
        assert cache.manager.try_admit(sequence, CHUNK + 1, waive_reserve=True)
        cache.manager.fill(sequence, 0, num_tokens)
    cache.manager.fill_next([one, two])
    assert (one.num_kv_tokens, two.num_kv_tokens) == (CHUNK + 1, 4)
    assert states(one) == ["on gpu", "on gpu"] and states(two) == ["on gpu", "reserved"]


@pytest.mark.parametrize(("max_num_copies", "is_expedited"), [(2, False), (3, True)])
def test_nothing_is_expedited_if_more_copies_are_in_flight_than_a_step_waits_for(
    max_num_copies, is_expedited
):
    cache = Cache(6, 6, max_num_copies=max_num_copies)
    sequence = cache.queued("a", cache.on_cpu("a", 3 * CHUNK))
    assert cache.manager.try_admit(sequence, 3 * CHUNK, waive_reserve=True)
    assert len(cache.manager.expedite(sequence)) == 3 * is_expedited


def test_only_arriving_chunks_are_expedited():
    cache = Cache(8, 8, clean_pages=8)
    sequence = cache.on_cpu("a", 3 * CHUNK, but=[1])
    cache.running("runs", CHUNK)
    cache.end_step()
    cache.queued("a", sequence)
    assert cache.manager.try_admit(sequence, 3 * CHUNK, waive_reserve=True)
    assert states(sequence) == ["copying in", "copying out", "copying in"]
    _, ins = cache.begin()
    assert cache.manager.expedite(sequence) == tuple(copy.copy_id for copy in ins)
    assert states(sequence) == ["on both", "copying out", "on both"]


def test_a_queued_request_waits_for_pages_that_copies_hold():
    """Copies in of other sequences, and of chunks that are gone, hold pages; copies out do not."""
    cache = Cache(10, 10, clean_pages=10, retrieval_priority=False)
    other, gone = cache.on_cpu("other", CHUNK), cache.on_cpu("gone", CHUNK)
    leaving = cache.idle("leaving", CHUNK)
    for sequence in (other, gone):
        cache.queued("in", sequence)
        assert cache.manager.try_admit(sequence, CHUNK, waive_reserve=True)
    _, ins = cache.begin()
    cache.end_step()
    assert states(leaving) == ["copying out"]
    cache.manager.truncate(gone, 0)
    waits = cache.queued("waits")
    assert cache.manager.blocking_copies(waits) == [copy.copy_id for copy in ins]
    assert cache.manager.try_admit(waits, CHUNK, waive_reserve=True)
    assert cache.manager.blocking_copies(waits) == []
    assert cache.manager.blocking_copies(other) == [ins[0].copy_id]


def test_prefetch_stops_at_the_reserve_and_counts_its_copies():
    cache = Cache(10, 10, reserve_pages=2)
    cache.running("runs", 6 * CHUNK)
    waits = cache.queued("waits", cache.on_cpu("waits", 3 * CHUNK))
    cache.end_step()
    assert states(waits) == ["copying in", "copying in", "on cpu"] and waits.fetched == {0, 1}
    assert cache.manager.num_prefetched_chunks == 2
    cache.manager.suspend(waits)
    assert not waits.fetched
    cache.manager.end_step()
    cache.queued("waits", waits)
    assert not waits.fetched


def test_prefetch_continues_up_to_its_number_of_copies():
    cache = Cache(10, 10, max_num_copies=2)
    cache.queued("waits", cache.on_cpu("waits", 5 * CHUNK))
    assert [len(cache.end_step()[1]) for _ in range(2)] == [2, 0]
    cache.complete(*list(cache.copies_in)[:1])
    assert len(cache.end_step()[1]) == 1


def test_chunks_are_laid_out_only_behind_computed_ones():
    cache = Cache(10)
    sequence = cache.idle("a", CHUNK + 5)
    cache.manager.prepare_fork(sequence, CHUNK + 9)
    assert sequence.num_kv_tokens == CHUNK + 5 and sequence.trunk is None
    cache.manager.prepare_fork(sequence, 2 * CHUNK)
    assert sequence.num_kv_tokens == 2 * CHUNK and states(sequence) == ["on gpu", "dropped"]
    assert sequence.trunk is not None
    cache.manager.fork(sequence, 2 * CHUNK, "fork")
    cache.check()


def test_a_fork_has_its_sources_activity_and_bucket():
    cache = Cache(10)
    source = cache.idle("source", 3 * CHUNK, 30.0)
    source.bucket = 4
    fork = cache.manager.fork(source, 2 * CHUNK, "fork")
    assert (fork.last_active_s, fork.bucket) == (70.0, 4)
    assert (fork.trunk.last_active_s, fork.trunk.bucket) == (70.0, 4)


def test_a_prefix_is_active_when_it_is_opened():
    cache = Cache(10)
    assert cache.manager.open_prefix("prefix", 2 * CHUNK).last_active_s == 100.0


def test_every_chunk_and_every_detached_copy_is_in_the_census():
    cache = Cache(12, 12, clean_pages=12, retrieval_priority=False)
    mixed = cache.on_both("mixed", 4 * CHUNK, but=[3])
    cache.manager._store.give_page(mixed, 1)
    cache.drop(mixed, 2)
    gone_in, gone_out = cache.on_cpu("in", CHUNK), cache.idle("out", CHUNK)
    cache.end_step()
    cache.queued("in", gone_in)
    assert cache.manager.try_admit(gone_in, CHUNK, waive_reserve=True)
    cache.manager.truncate(gone_in, 0)
    cache.manager.truncate(gone_out, 0)
    census = cache.manager.census()
    assert census == {
        **{"reserved": 0, "on gpu": 0, "copying out": 1, "leaving": 1, "on both": 1, "on cpu": 1},
        **{"copying in": 1, "free pages": 9, "free slots": 7},
    }
    assert sorted(cache.manager.held()) == [("mixed", 0), ("mixed", 1), ("mixed", 3)]


def test_pages_of_idle_and_queued_sequences_are_available_but_not_to_their_owner():
    cache = Cache(10, 10)
    runs, idle = cache.running("runs", 3 * CHUNK), cache.idle("idle", CHUNK)
    waits = cache.queued("waits", cache.on_both("waits", 2 * CHUNK, but=[1]))
    assert cache.pool.num_free == 4
    assert [cache.manager.num_available(asks) for asks in (None, runs, idle, waits)] == [7, 7, 6, 5]
    cache.manager.suspend(runs)
    assert [cache.manager.num_available(asks) for asks in (None, runs)] == [10, 7]


def test_stats_count_places():
    cache = Cache(8, 5, clean_pages=2)
    cache.idle("idle", 2 * CHUNK)
    cache.running("runs", 3 * CHUNK)
    stats = cache.manager.stats()
    assert stats == {
        **{"num_gpu_pages": 8, "num_available_gpu_pages": 5, "num_free_gpu_pages": 3, "num_cpu_pages": 5},
        **{"num_free_cpu_pages": 5, "num_forced_swap_outs": 0, "num_lost_copies": 0},
        "num_prefetched_chunks": 0,
    }


def test_drops_are_reported_at_once_and_once():
    store, told = None, []
    store = ChunkStore(4, 4, CHUNK, told.append)
    assert store.take_drops() == () and store.take_copies() == ((), ())
    cache = Cache(4)
    sequence = cache.idle("a", 2 * CHUNK)
    cache.manager._store._on_drop = told.append
    cache.drop(sequence, 0)
    assert told == [ChunkDrop("a", 0, DropReason.NO_HOST_MEMORY, None)]
    assert cache.manager.take_drops() == tuple(told) and cache.manager.take_drops() == ()


def test_copies_are_numbered_from_one_and_taken_once():
    cache = Cache(4, 4, clean_pages=4)
    cache.idle("a", 2 * CHUNK)
    cache.manager.begin_step()
    cache.manager.end_step()
    outs, ins = cache.manager.take_copies()
    assert [copy.copy_id for copy in outs] == [1, 2] and ins == ()
    assert cache.manager.take_copies() == ((), ())


def test_members_of_a_role_are_in_the_order_in_which_they_took_it():
    cache = Cache(8)
    one, two = cache.idle("one", CHUNK), cache.idle("two", CHUNK)
    assert one.role_number < two.role_number
    cache.queued("one", one)
    cache.manager.release(one)
    assert list(cache.manager._store.members[Role.IDLE]) == [two, one]
    assert one.role_number > two.role_number


def test_the_order_is_notified_of_idle_sequences_and_changes():
    cache = Cache(8, 8)
    idle, runs = cache.idle("idle", CHUNK), cache.running("runs", CHUNK)
    store = cache.manager._store
    for change in (
        lambda sequence: store.set_active(sequence, 5.0),
        lambda sequence: store.set_bucket(sequence, 5),
    ):
        for changed in store.changed.values():
            changed.clear()
        change(idle)
        change(runs)
        assert all(list(changed) == [idle] for changed in store.changed.values())
    assert (idle.last_active_s, idle.bucket, runs.last_active_s, runs.bucket) == (5.0, 5, 5.0, 5)
    for changed in store.changed.values():
        changed.clear()
    store.swap_out(idle, 0, cache.slots.allocate())
    assert [
        list(store.changed[eviction_class])
        for eviction_class in (EvictionClass.DIRTY, EvictionClass.CLEAN, EvictionClass.HOST)
    ] == [
        [],
        [idle],
        [],
    ]


def test_a_closed_sequence_is_forgotten_by_every_eviction_class():
    cache = Cache(8, 8)
    cache.manager.close(cache.idle("a", CHUNK))
    store = cache.manager._store
    assert not any(store.changed.values()) and not list(store)


@pytest.mark.parametrize(("kept", "num_kv_tokens"), [((1,), 2 * CHUNK), ((0, 1), 2 * CHUNK), ((), 0)])
def test_a_lost_tail_shortens_a_sequence(kept, num_kv_tokens):
    cache = Cache(8)
    sequence = cache.idle("a", 3 * CHUNK + 2)
    for index in range(4):
        if index not in kept:
            cache.manager._store.drop(sequence, index, DropReason.NO_HOST_MEMORY, None)
    cache.manager._store.trim(sequence)
    assert sequence.num_kv_tokens == num_kv_tokens and len(sequence.chunks) * CHUNK == num_kv_tokens
    cache.check()


def test_a_row_follows_its_sequences_pages():
    cache = Cache(8, 8)
    sequence = cache.queued("a", cache.on_cpu("a", 2 * CHUNK))
    assert cache.manager.try_admit(sequence, 3 * CHUNK, waive_reserve=True)
    row = cache.manager.page_table.take([sequence.row])[0].tolist()
    assert row[:3] == pages_of(sequence) and all(row[:3]) and not any(row[3:])
    cache.manager.truncate(sequence, 0)
    assert not any(cache.manager.page_table.take([sequence.row])[0].tolist())
    cache.check()


def test_rows_are_freed_when_sequences_stop():
    cache = Cache(8)
    rows = set()
    for i in range(40):
        sequence = cache.running(str(i), CHUNK)
        rows.add(sequence.row)
        stop = cache.manager.release if i % 2 else cache.manager.suspend
        stop(sequence)
        cache.manager.truncate(sequence, 0)
    assert rows == {0}
