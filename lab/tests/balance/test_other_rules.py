"""Rules that the server does not use: who is chosen, and when a conversation moves."""

from __future__ import annotations

import itertools
import math
import random

from pensieve_jax.balance import ConsistentHash, HashRing, Load
from pensieve_lab.balance.bounded_hash import BoundedHash
from pensieve_lab.balance.migrating import MigratingHash
from pensieve_lab.balance.state_aware import LeastTokens, StateAware
from tests.balance.loads import IDLE, NAMES, SPEEDS, asked, rule
from tests.seeds import new_seed


def test_bounded_loads_never_exceed_their_bound():
    rng = random.Random(new_seed())
    bound = rng.choice((1.1, 1.25, 2.0))
    bounded, plain = rule(BoundedHash(bound)), rule(ConsistentHash())
    loads, sent = dict(IDLE), []
    for number in range(2000):
        if sent and rng.random() < 0.45:
            loads[name] = Load(loads[name := sent.pop(rng.randrange(len(sent)))].num_turns - 1)
            continue
        turn = asked(f"c{number}", root=f"root-{rng.randrange(3)}")  # three roots have it all
        name = bounded.choose(turn, loads, 0.0)
        before = loads[name].num_turns
        loads[name] = Load(before + 1)
        sent.append(name)
        limit = math.ceil(bound * len(sent) / len(NAMES))
        assert loads[name].num_turns <= limit
        if name != (home := plain.choose(turn, loads, 0.0)):
            assert loads[home].num_turns >= limit, "who has room keeps what is its own"


def test_least_tokens():
    loads = {"r0": Load(1, 0, 500), "r1": Load(9, 0, 400), "r2": Load(0, 0, 450)}
    assert rule(LeastTokens(), loads).choose(asked("a", history=9), loads, 0.0) == "r1"


def test_state_aware_stays_home_while_that_is_idle():
    aware, plain = rule(StateAware(SPEEDS)), rule(ConsistentHash())
    for number in range(200):
        turn = asked(f"c{number}", history=number * 10)
        assert aware.choose(turn, IDLE, 0.0) == plain.choose(turn, IDLE, 0.0)


def test_state_aware_leaves_where_waiting_costs_more_than_recomputing_and_stays_there():
    aware = rule(StateAware(SPEEDS, num_candidates=16))
    turn = asked("c", history=2000)  # 80 ms to compute
    home = aware.home(turn)
    busy = IDLE | {home: Load(1, 1000, 1000)}  # 40 ms of waiting
    assert aware.choose(turn, busy, 0.0) == home
    busy[home] = Load(9, 20_000, 20_000)  # 800 ms
    moved = aware.choose(turn, busy, 1.0)
    assert moved != home and aware.home(turn) == moved
    assert aware.choose(turn, IDLE, 2.0) == moved, "its state is there now"
    aware.set_members(set(NAMES) - {moved})
    assert aware.home(turn) == home, "where it was is gone"


def test_state_aware_counts_what_others_wait():
    turn = asked("c", history=4000)  # 160 ms for each of those who decode elsewhere
    selfish, fair = (rule(StateAware(SPEEDS, others=others)) for others in (0.0, 1.0))
    loads = dict.fromkeys(NAMES, Load(20, 0, 0))
    home = fair.home(turn)
    loads[home] = Load(21, 8000, 8000)
    assert selfish.choose(turn, loads, 0.0) != home
    assert fair.choose(turn, loads, 0.0) == home


def test_first_turns_go_to_the_least_loaded_and_return_to_it():
    placed = rule(StateAware(SPEEDS, least_gain_s=math.inf, num_candidates=16))
    loads = dict.fromkeys(NAMES, Load(5, 5000, 50_000)) | {"r7": Load(1, 0, 100)}
    assert placed.choose(asked("c"), loads, 0.0) == "r7"
    loads["r7"] = Load(500, 500_000, 500_000)
    assert placed.choose(asked("c", history=100), loads, 1.0) == "r7"


def test_the_hottest_root_leaves_a_replica_that_stays_overloaded():
    migrating = rule(MigratingHash(high=1.3, every_s=1.0, rest_s=30.0, smooth_s=0.0))
    ring = HashRing(NAMES)
    here = [f"root-{n}" for n in range(400) if ring.owner(f"root-{n}") == "r3"][:8]
    hot, cold = here[0], here[1]
    loads = IDLE | {"r3": Load(40, 0, 40_000)}
    for step in itertools.count():
        now_s = 0.25 * step
        name = migrating.choose(asked("c", root=hot, history=2000), loads, now_s)
        for root in here[1:]:
            migrating.choose(asked("d", root=root, history=1000), loads, now_s)
        if now_s < 1.0:
            assert name == "r3", "once is not enough"
        elif name != "r3":
            break
        assert now_s < 3.0
    assert migrating.home(asked("c", root=hot)) == name
    balanced = dict.fromkeys(NAMES, Load(4, 0, 4000))
    assert migrating.choose(asked("c", root=hot), balanced, now_s + 5) == name, "it stays"
    assert migrating.choose(asked("d", root=cold), loads, now_s + 6) in NAMES
    migrating.set_members(set(NAMES) - {name})
    assert migrating.home(asked("c", root=hot)) == HashRing(set(NAMES) - {name}).owner(hot)


def test_nobody_moves_while_loads_are_even():
    rng = random.Random(new_seed())
    migrating, plain = rule(MigratingHash(high=1.5)), rule(ConsistentHash())
    for step in range(500):
        loads = {name: Load(5, 0, rng.randint(4000, 5500)) for name in NAMES}
        turn = asked(f"c{rng.randrange(50)}", history=rng.randrange(9000))
        assert migrating.choose(turn, loads, 0.1 * step) == plain.choose(turn, loads, 0.0)
