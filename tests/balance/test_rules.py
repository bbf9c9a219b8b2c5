"""Rings and rules: which conversations move, which never do, and which replica is chosen."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest

from pensieve_jax.balance import ConsistentHash, HashRing, IncomingTurn, Load, RootPlacement
from tests.balance.loads import IDLE, NAMES, SPEEDS, asked, rule


@pytest.mark.parametrize("joins", [True, False])
def test_a_ring_change_moves_one_share_and_nothing_else(joins):
    keys = [f"root-{number}" for number in range(8000)]
    fewer, more = HashRing(NAMES[:-1]), HashRing(reversed(NAMES))
    before, after = (fewer, more) if joins else (more, fewer)
    moved = [key for key in keys if before.owner(key) != after.owner(key)]
    for key in moved:
        assert NAMES[-1] in ((after if joins else before).owner(key),), "between two that stay nothing moves"
    assert 0.5 / 16 < len(moved) / len(keys) < 1.7 / 16


def test_a_ring_is_even_to_a_tenth_or_so_and_depends_on_names_alone():
    ring = HashRing(NAMES)
    counts = Counter(ring.owner(f"root-{number}") for number in range(16_000))
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1400 and min(counts.values()) > 650
    assert HashRing(["a", "b"]).owner("k") == HashRing(["b", "a", "a"]).owner("k")
    with pytest.raises(LookupError, match="no replica"):
        HashRing([]).owner("k")


def test_clockwise_lists_every_replica_once_from_the_owner_on():
    ring = HashRing(NAMES)
    for key in map(str, range(50)):
        order = list(ring.clockwise(key))
        assert order[0] == ring.owner(key) and sorted(order) == sorted(NAMES)
        left = HashRing(set(NAMES) - {order[0]})
        assert left.owner(key) == order[1], "who follows is who takes over"


def test_a_full_memory_makes_new_turns_wait():
    turn = asked("c")
    fits, full = Load(4, 0, 100_000), Load(8, 0, 200_000)
    assert SPEEDS.seconds(full, 50) == pytest.approx(2 * SPEEDS.seconds(fits, 50), rel=0.01)
    assert SPEEDS.seconds_of_others(full, turn, 50) == 2 * SPEEDS.seconds_of_others(fits, turn, 50)


def test_a_new_root_is_named_after_the_least_loaded_replica_and_any_front_end_finds_it():
    named, other = rule(RootPlacement(SPEEDS, num_candidates=16)), rule(ConsistentHash())
    for number in range(30):
        free = NAMES[number % 16]
        loads = dict.fromkeys(NAMES, Load(5, 5000, 50_000)) | {free: Load(1, 0, 100)}
        first = asked(f"c{number}")
        later = IncomingTurn(named.name(first, loads), first.conversation, 50, 1000)
        assert named.choose(later, IDLE, 0.0) == other.choose(later, IDLE, 0.0) == free
        assert other.name(first, loads) == first.root
    assert named.name(asked("c"), IDLE) == "c", "where all are alike, nothing is tried"


def test_names_use_the_ring_of_another_router():
    def other_hash(key):
        return zlib.crc32(key.encode()[::-1])

    named, other = (
        RootPlacement(SPEEDS, num_candidates=16, hash_key=other_hash),
        HashRing(NAMES, 100, other_hash),
    )
    named.set_members(NAMES)
    loads = dict.fromkeys(NAMES, Load(5, 5000, 50_000)) | {"r7": Load(1, 0, 100)}
    assert {other.owner(named.name(asked(f"c{number}"), loads)) for number in range(20)} == {"r7"}
