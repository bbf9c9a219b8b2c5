"""Prefixes that conversations share: one set of full chunks, in any tier, for all of them."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import Role
from tests.cache.helpers import CHUNK, Cache, pages_of, resident, states


def users_of_a_prefix(cache, *lens, prefix_len=2 * CHUNK + 5):
    prefix = cache.manager.open_prefix("prefix", prefix_len)
    users = []
    for number, length in enumerate(lens):
        user = cache.manager.open(f"user{number}")
        cache.manager.share(user, prefix)
        users.append(cache.running(f"user{number}", length, user))
    return prefix, users


def test_only_full_chunks_of_a_prefix_are_shared():
    cache = Cache(12, 12)
    prefix, (one, two) = users_of_a_prefix(cache, 3 * CHUNK, 5 * CHUNK)
    assert len(prefix.chunks) == 2 and cache.pool.num_free == 12 - 2 - 1 - 3
    assert pages_of(one)[:2] == pages_of(two)[:2] == pages_of(prefix)
    assert not set(pages_of(one)[2:]) & set(pages_of(two)[2:])
    cache.check()


def test_a_prefix_is_pinned_only_while_a_running_request_uses_it():
    cache = Cache(6, 0)
    prefix, (one, two) = users_of_a_prefix(cache, 3 * CHUNK, 3 * CHUNK)
    cache.manager.release(one)
    assert prefix.role is Role.RUNNING and cache.manager.num_available() == 3
    cache.manager.release(two)
    assert prefix.role is Role.IDLE and cache.manager.num_available() == 6
    cache.running("new", 6 * CHUNK)
    assert states(prefix) == ["dropped"] * 2 and prefix.num_kv_tokens == 2 * CHUNK
    assert one.num_kv_tokens == two.num_kv_tokens == 2 * CHUNK, "holes, not an end"
    assert one.holes(CHUNK) == [(0, 2 * CHUNK)]


def test_a_prefix_is_as_recent_as_its_latest_user():
    cache = Cache(12, 0, policy="lru")
    prefix, (one, two) = users_of_a_prefix(cache, 3 * CHUNK, 3 * CHUNK)
    for user in (one, two):
        cache.clock.advance(10)
        cache.manager.release(user)
    assert prefix.last_active_s == two.last_active_s > one.last_active_s
    cache.running("new", 9 * CHUNK)
    assert states(one)[2:] == [] and resident(prefix) == [0, 1], "the older user's own chunk goes first"


def test_a_prefix_moves_to_host_memory_and_back_for_all_of_its_users():
    cache = Cache(6, 6)
    prefix, (one, two) = users_of_a_prefix(cache, 3 * CHUNK, 3 * CHUNK)
    cache.manager.release(one)
    cache.manager.release(two)
    other = cache.running("other", 6 * CHUNK)
    cache.complete()
    assert states(prefix) == ["on cpu"] * 2 and len(cache.copies_out) == 0
    cache.manager.truncate(other, 0)
    cache.manager.release(other)
    for user in (one, two):
        cache.queued(user.sequence_id, user)
        cache.manager.begin_step()
        assert cache.manager.try_admit(user, 3 * CHUNK, waive_reserve=True)
    assert len(cache.begin()[1]) == 4, "two of the prefix, and one of each user"
    assert one.first_arriving == two.first_arriving == 0
    cache.complete()
    assert resident(one) == resident(two) == [0, 1, 2]


def test_a_conversation_that_is_cut_inside_its_prefix_keeps_the_full_chunks_before_the_cut():
    cache = Cache(12, 12)
    prefix, (one, two) = users_of_a_prefix(cache, 3 * CHUNK, 3 * CHUNK)
    for user in (one, two):
        cache.manager.release(user)
    cache.manager.truncate(one, CHUNK + 3)
    assert one.num_kv_tokens == CHUNK and resident(prefix) == resident(two)[:2] == [0, 1]
    assert prefix.is_held and prefix.trunk is one.trunk and pages_of(one) == pages_of(prefix)[:1]
    cache.check()
    cache.running("user0", 2 * CHUNK, one)
    assert pages_of(one)[0] == pages_of(prefix)[0] and pages_of(one)[1] not in pages_of(prefix)
    cache.manager.release(one)
    cache.manager.truncate(one, CHUNK - 1)
    assert one.trunk is None and not one.chunks and prefix.trunk is None, "the prefix is one again"
    cache.check()


def test_a_split_prefix_is_merged_when_the_last_running_user_is_cut():
    cache = Cache(12, 12)
    prefix, (one, two) = users_of_a_prefix(cache, 3 * CHUNK, 3 * CHUNK)
    cache.manager.release(one)
    cache.manager.truncate(one, CHUNK)
    cache.manager.truncate(one, 0)
    assert prefix.trunk is not None, "its first chunk is a trunk's while a conversation runs with it"
    cache.manager.truncate(two, 0)
    assert prefix.trunk is None and len(prefix.chunks) == 2 and not prefix.users
    cache.check()


@pytest.mark.parametrize("num_tokens", [2 * CHUNK, 3 * CHUNK])
def test_a_conversation_that_is_cut_behind_its_prefix_keeps_it(num_tokens):
    cache = Cache(12, 12)
    prefix, (one,) = users_of_a_prefix(cache, 3 * CHUNK + 4)
    cache.manager.release(one)
    cache.manager.truncate(one, num_tokens)
    assert one.trunk is prefix and one.num_kv_tokens == num_tokens == len(one.chunks) * CHUNK
    cache.check()


def test_a_released_prefix_is_freed_with_its_last_user():
    cache = Cache(12, 12)
    prefix, (one, two) = users_of_a_prefix(cache, 3 * CHUNK, 3 * CHUNK)
    cache.manager.release(one)
    cache.manager.release_prefix(prefix)
    cache.check()
    cache.manager.close(one)
    assert resident(two) == [0, 1, 2] and cache.pool.num_free == 12 - 3
    cache.manager.truncate(two, 0)  # it runs: the prefix is unpinned, and then forgotten
    cache.manager.release(two)
    cache.check()
    assert two.trunk is None and cache.pool.num_free == 12 and not prefix.chunks


def test_an_unused_released_prefix_is_freed_at_once():
    cache = Cache(4, 4)
    prefix, (one,) = users_of_a_prefix(cache, 3 * CHUNK)
    cache.manager.release(one)
    cache.manager.truncate(one, 0)
    other = cache.running("other", 4 * CHUNK)  # pushes it out to the host
    cache.complete()
    assert states(prefix) == ["on cpu"] * 2
    cache.manager.release_prefix(prefix)
    cache.manager.truncate(other, 0)
    cache.check()
    assert cache.slots.num_free == 4 and prefix not in list(cache.manager._store)
