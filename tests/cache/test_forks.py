"""Forks: sequences that share their beginning, to any depth, with one owner per chunk."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import DropReason, EvictionClass, Role
from pensieve_jax.cache.order.ghost_cache import GhostCache
from pensieve_jax.cache.order.policies import LruPolicy
from tests.cache.fork_scenarios import run_fork_scenario
from tests.cache.helpers import CHUNK, Cache, pages_of, resident, states


def fork(cache, source, num_tokens, name="fork"):
    made = cache.manager.fork(source, num_tokens, name)
    cache.check()
    return made


def a_line_of_forks(cache, *lens):
    """Return a source of the last of these lengths, and a fork of it at each of the others."""
    source = cache.idle("source", lens[-1] * CHUNK)
    forks = [fork(cache, source, length * CHUNK, f"fork {length}") for length in lens[:-1]]
    return source, forks


def lineage(sequence):
    """Return the ends of its shared parts, in chunks, its own first."""
    return [len(own.chunks) for own in sequence.lineage()]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_fork_shares_full_chunks_and_copies_nothing(is_running):
    cache = Cache(12, 12)
    source = cache.running("source", 4 * CHUNK + 5)
    if not is_running:
        cache.manager.release(source)
    pages = pages_of(source)
    made = fork(cache, source, 2 * CHUNK + 7)
    assert made.chunks == source.chunks[:2] and made.num_kv_tokens == 2 * CHUNK
    assert pages_of(source) == pages and cache.pool.num_free == 12 - 5 and not any(cache.begin())
    assert made.role is Role.IDLE and made.trunk is source.trunk
    assert made.trunk.role is (Role.RUNNING if is_running else Role.IDLE)


def test_a_fork_takes_only_computed_full_chunks():
    cache = Cache(12)
    source = cache.idle("source", 2 * CHUNK + 5)
    assert fork(cache, source, 10 * CHUNK, "all").num_kv_tokens == 2 * CHUNK
    short = fork(cache, source, CHUNK - 1, "short")
    assert short.trunk is None and not short.chunks


def test_forks_of_forks_hold_every_chunk_once():
    cache = Cache(12)
    source, _ = a_line_of_forks(cache, 4, 2, 3, 1, 6)
    assert lineage(source) == [6, 4, 3, 2, 1]
    assert cache.pool.num_free == 12 - 6
    twin = fork(cache, source, 2 * CHUNK + 1, "twin")
    assert lineage(twin) == [2, 2, 1], "the trunk that ends there is taken as it is"


def test_the_last_user_of_a_trunk_gets_its_chunks_back():
    cache = Cache(12)
    source, (two, four) = a_line_of_forks(cache, 2, 4, 6)
    cache.manager.close(two)
    cache.check()
    assert lineage(source) == [6, 4] and lineage(four) == [4, 4]
    cache.manager.close(source)
    cache.check()
    assert lineage(four) == [4] and resident(four) == [0, 1, 2, 3] and cache.pool.num_free == 8
    cache.manager.close(four)
    cache.check()
    assert cache.pool.num_free == 12 and not list(cache.manager._store)


def test_a_lost_tail_ends_the_sequence_that_gets_it_back():
    cache = Cache(12)
    source, (made,) = a_line_of_forks(cache, 3, 4)
    trunk = source.trunk
    cache.drop(trunk, 1, 2)
    cache.manager.close(source)
    cache.check()
    assert made.num_kv_tokens == CHUNK and len(made.chunks) == 1


def test_a_trunk_stays_while_its_only_user_runs_and_is_merged_when_it_stops():
    cache = Cache(12)
    source, (made,) = a_line_of_forks(cache, 2, 4)
    cache.running("fork", 3 * CHUNK, made)
    cache.manager.close(source)
    cache.check()
    assert lineage(made) == [3, 2]
    cache.manager.release(made)
    cache.check()
    assert lineage(made) == [3] and made.num_resident == 3


def test_the_shared_beginning_of_a_waiting_sequence_moves_to_the_split_trunk():
    cache = Cache(12)
    source, (made,) = a_line_of_forks(cache, 2, 5)
    cache.queued("source", source)
    cache.manager.close(made)
    assert lineage(source) == [5, 2]
    fork(cache, source, 4 * CHUNK, "fork")
    assert lineage(source) == [5, 4]


def test_all_trunks_are_pinned_while_one_sequence_runs():
    cache = Cache(8)
    source, (one, three) = a_line_of_forks(cache, 1, 3, 4)
    cache.running("three", 3 * CHUNK + 2, three)
    assert [own.role for own in source.lineage()] == [Role.IDLE, Role.RUNNING, Role.RUNNING]
    assert cache.manager.num_available() == 8 - 4, "the fork's own page, and three of trunks"
    cache.running("new", 4 * CHUNK)
    assert resident(three) == [0, 1, 2, 3] and resident(source) == [0, 1, 2]
    cache.manager.release(three)
    cache.check()
    assert {own.role for own in source.lineage()} == {Role.IDLE} and cache.manager.num_available() == 4
    assert resident(one) == [0]


def test_reserved_chunks_of_a_trunk_are_freed_with_the_last_running_user():
    cache = Cache(12)
    source, (made,) = a_line_of_forks(cache, 3, 4)
    cache.drop(source.trunk, 0, 1)
    for sequence in (source, made):
        cache.queued("again", sequence)
        cache.manager.begin_step()
        assert cache.manager.try_admit(sequence, 4 * CHUNK, waive_reserve=True)
    cache.manager.suspend(source)
    cache.check()
    assert states(made)[:3] == ["reserved", "reserved", "on gpu"]
    cache.manager.truncate(made, 3 * CHUNK)
    cache.manager.release(made)
    cache.check()
    assert states(made)[:3] == ["dropped", "dropped", "on gpu"]


def test_available_room_does_not_count_a_requests_shared_beginning():
    cache = Cache(8)
    source, (_, three) = a_line_of_forks(cache, 1, 3, 5)
    assert cache.manager.num_available() == 8 and cache.manager.num_available(three) == 5
    assert cache.manager.num_available(source) == 3
    cache.queued("three", three)
    assert not cache.manager.try_admit(three, 9 * CHUNK, waive_reserve=True)
    assert cache.manager.try_admit(three, 8 * CHUNK, waive_reserve=True)
    cache.check()


def test_a_trunk_is_as_recent_as_its_latest_user():
    cache = Cache(12, policy="lru")
    source, (one, three) = a_line_of_forks(cache, 1, 3, 5)
    cache.clock.advance(10)
    cache.manager.touch(one)
    cache.clock.advance(10)
    cache.manager._set_bucket(three, 3)
    cache.manager.touch(three)
    ages = [cache.clock.now() - own.last_active_s for own in source.lineage()]
    assert ages == [20, 0, 0] and [own.bucket for own in source.lineage()] == [0, 3, 3]


def test_a_touched_sequence_sets_the_activity_of_its_trunks():
    """The most recently active user sets the bucket of a trunk."""
    cache = Cache(12)
    source, (one, three) = a_line_of_forks(cache, 1, 3, 5)
    cache.manager._set_bucket(three, 3)
    cache.manager._set_bucket(source, 5)
    assert [own.bucket for own in three.lineage()] == [3, 5, 5] and one.trunk.bucket == 5
    cache.manager.touch(three)
    assert [own.bucket for own in three.lineage()] == [3, 3, 3]
    assert [own.bucket for own in source.lineage()] == [5, 3, 3]
    cache.manager.touch(source)
    assert [own.bucket for own in three.lineage()] == [3, 5, 5]


def test_copies_in_flight_move_with_their_chunks():
    cache = Cache(12, 12)
    source = cache.on_cpu("source", 4 * CHUNK, but=(3,))
    cache.queued("source", source)
    cache.manager.begin_step()
    assert cache.manager.try_admit(source, 5 * CHUNK, waive_reserve=True)
    cache.begin()
    made = fork(cache, source, 2 * CHUNK)
    assert made.first_arriving == source.first_arriving == 0
    assert (
        made.trunk.num_by_class[EvictionClass.ARRIVING] == 2
        and source.num_by_class[EvictionClass.ARRIVING] == 1
    )
    first = source.chunks[0].copy_id
    cache.complete(first)
    assert made.first_arriving == 1
    assert set(cache.manager.expedite(source)) == set(cache.copies_in)
    cache.check()
    assert resident(source) == [0, 1, 2, 3] and resident(made) == [0, 1]


def test_a_request_waits_for_the_copies_of_every_trunk():
    cache = Cache(12, 12)
    source, (one, three) = a_line_of_forks(cache, 1, 3, 5)
    root = one.trunk
    cache.manager._store.swap_out(root, 0, cache.slots.allocate())
    cache.manager._store.give_page(root, 0)
    (copy_id,) = (copy.copy_id for copy in cache.begin()[0])
    cache.queued("three", three)
    assert not cache.manager.try_admit(three, 4 * CHUNK, waive_reserve=True)
    assert cache.manager.blocking_copies(three) == [copy_id]
    cache.complete(copy_id)
    assert cache.manager.try_admit(three, 4 * CHUNK, waive_reserve=True)
    assert source.first_arriving == three.first_arriving == 0
    cache.complete()
    assert resident(three) == [0, 1, 2]


def test_pages_of_a_returning_trunk_are_in_the_rows_of_running_users():
    cache = Cache(12, 12)
    source, (one, three) = a_line_of_forks(cache, 1, 3, 5)
    cache.drop(source.trunk, 1)
    cache.drop(one.trunk, 0)
    for sequence in (source, three):
        cache.queued("again", sequence)
        cache.manager.begin_step()
        assert cache.manager.try_admit(sequence, 6 * CHUNK, waive_reserve=True)
        cache.check()
    for sequence in (source, three):
        row = cache.manager.page_table.take([sequence.row])[0].tolist()
        assert row[:6] == pages_of(sequence) and all(row[:6])


@pytest.mark.parametrize(
    ("num_tokens", "kept"), [(5 * CHUNK - 1, 4), (3 * CHUNK, 3), (2 * CHUNK + 3, 2), (3, 0)]
)
def test_a_cut_keeps_the_full_chunks_before_it_and_does_not_affect_others(num_tokens, kept):
    cache = Cache(16)
    source, (three, five) = a_line_of_forks(cache, 3, 5, 6)
    cache.manager.truncate(five, num_tokens)
    cache.check()
    assert five.num_kv_tokens == kept * CHUNK and resident(five) == list(range(kept))
    assert resident(source) == [0, 1, 2, 3, 4, 5] and resident(three) == [0, 1, 2]
    assert cache.pool.num_free == 10


def test_a_turn_that_is_cancelled_while_it_runs_leaves_its_trunk_pinned_for_others():
    cache = Cache(16)
    source, (three,) = a_line_of_forks(cache, 3, 6)
    cache.running("source", 7 * CHUNK, source)
    cache.running("three", 5 * CHUNK, three)
    cache.manager.truncate(three, CHUNK)
    cache.check()
    assert three.role is Role.RUNNING and lineage(three) == [1, 1] and lineage(source) == [7, 3, 1]
    assert [own.num_running_users for own in three.lineage()] == [0, 2]
    cache.manager.release(three)
    cache.check()
    assert resident(source) == list(range(7))


def test_uncomputed_shared_chunks_are_computed_once_for_all():
    """Several choices share one prompt."""
    cache = Cache(16)
    one = cache.idle("one", CHUNK + 5)
    cache.manager.prepare_fork(one, 4 * CHUNK + 9)
    two = cache.manager.fork(one, 4 * CHUNK + 9, "two")
    cache.check()
    assert one.num_kv_tokens == two.num_kv_tokens == 4 * CHUNK and resident(two) == [0]
    for sequence in (one, two):
        cache.queued("both", sequence)
        cache.manager.begin_step()
        assert cache.manager.try_admit(sequence, 5 * CHUNK, waive_reserve=True)
    assert cache.pool.num_free == 16 - 4 - 2 and two.holes(CHUNK) == [(CHUNK, 4 * CHUNK)]
    cache.manager.fill(two, CHUNK, 4 * CHUNK)
    cache.check()
    assert resident(one) == [0, 1, 2, 3]
    cache.manager.truncate(one, CHUNK)  # it is cancelled
    cache.manager.release(one)
    cache.check()
    assert one.num_kv_tokens == CHUNK and resident(two) == [0, 1, 2, 3]


def test_shared_chunks_that_are_never_computed_are_released():
    cache = Cache(16)
    one = cache.idle("one", CHUNK + 5)
    cache.manager.prepare_fork(one, 4 * CHUNK)
    two = cache.manager.fork(one, 4 * CHUNK, "two")
    cache.manager.close(two)
    cache.check()
    assert one.num_kv_tokens == CHUNK and one.trunk is None


def test_a_lost_device_leaves_the_content_of_slots_at_every_depth():
    cache = Cache(16, 16)
    source = cache.on_both("source", 6 * CHUNK, but=(1, 5))
    made = [fork(cache, source, number * CHUNK, f"fork {number}") for number in (2, 4)]
    cache.queued("fork", made[1])
    cache.manager.begin_step()
    assert cache.manager.try_admit(made[1], 5 * CHUNK, waive_reserve=True)
    cache.begin()
    cache.manager.lose_device()
    assert states(source) == ["on cpu", "dropped", "on cpu", "on cpu", "on cpu"]
    cache.manager.truncate(made[1], 4 * CHUNK)
    cache.manager.release(made[1])
    cache.check()
    assert source.num_kv_tokens == 5 * CHUNK and cache.pool.num_free == 16


def test_pushing_out_a_conversation_leaves_its_shared_beginning():
    cache = Cache(16, 16)
    source, (three,) = a_line_of_forks(cache, 3, 6)
    assert cache.manager.push_out(source) == 3
    cache.complete()
    assert resident(three) == [0, 1, 2] and states(source)[3:] == ["on cpu"] * 3


def test_reports_name_every_chunk_once():
    cache = Cache(16, 16)
    _, (one, three) = a_line_of_forks(cache, 1, 3, 5)
    assert cache.manager.census()["on gpu"] == 5
    held = list(cache.manager.held())
    assert sorted(index for _, index in held) == [0, 1, 2, 3, 4]
    assert {name for name, _ in held} == {"source", one.trunk.sequence_id, three.trunk.sequence_id}


def test_observers_are_told_of_chunks_that_change_owner():
    moves = []
    cache = Cache(16)
    cache.manager._trunks._on_move = lambda *move: moves.append(move)
    source, (made,) = a_line_of_forks(cache, 3, 5)
    name = made.trunk.sequence_id
    assert moves == [("source", name, range(3))] and "\0" in name
    cache.manager.close(source)
    assert moves[1:] == [(name, "fork 3", range(3)), (name, None, range(0))]


def test_victims_are_right_after_a_fork():
    """The eviction order was cached before the fork, and chunks have changed their owner since."""
    cache = Cache(10, policy="lru")
    source = cache.idle("source", 4 * CHUNK, idle_s=50)
    cache.idle("other", 4 * CHUNK, idle_s=20)
    cache.running("new", 3 * CHUNK)
    assert states(source) == ["dropped"] + ["on gpu"] * 3
    made = fork(cache, source, 2 * CHUNK)
    cache.clock.advance(1)
    cache.manager.touch(made)
    cache.running("newer", 2 * CHUNK)
    assert states(source) == ["dropped", "on gpu"], "its own, before what its fork was active with just now"
    cache.manager.close(made)
    cache.running("newest", CHUNK)
    assert states(source) == [], "the trunk's chunk is its own again, and as old as it is"


def test_ghost_caches_follow_a_fork():
    ghosts = GhostCache(LruPolicy(), 10)
    ghosts.left("a", 8, num_shared=0, bucket=0, now_s=1.0)
    ghosts.resized("a", 3)
    assert ghosts.num_held == 5
    ghosts.left("b", 7, num_shared=0, bucket=0, now_s=2.0)
    assert ghosts.num_held == 10
    ghosts.resized("a", 4)
    assert ghosts.num_held == 10, "what it gives away was lost before"
    ghosts.resized("a", 0)
    assert ghosts.returned("a") == 5, "leading ones are lost, so those that it got back are"


def test_a_drop_of_a_shared_chunk_is_recorded_once():
    cache = Cache(16)
    source, (made,) = a_line_of_forks(cache, 3, 5)
    trunk = made.trunk
    cache.manager._store.drop(trunk, 1, DropReason.NO_HOST_MEMORY, 0.5)
    assert [drop.conversation_id for drop in cache.manager.take_drops()] == [trunk.sequence_id]
    assert source.holes(CHUNK) == made.holes(CHUNK) == [(CHUNK, 2 * CHUNK)]


@pytest.mark.parametrize("seed", range(60))
def test_random_forks(seed):
    """Runs all operations on a tree of sequences; each reads what was computed for it."""
    run_fork_scenario(seed)
