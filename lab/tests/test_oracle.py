"""The eviction order that knows the future: computed by hand, and compared with the others."""

from __future__ import annotations

import math

import pytest

from pensieve_lab.workload import ConversationTrace, Session, TurnTrace
from tests.launching import load

CHUNK = 10
COSTS_S = [1.0, 2.0, 4.0, 8.0]


@pytest.fixture
def oracle():
    return load("pensieve_lab.experiments.oracle")


def session(name, arrival_s, think_s):
    turns = tuple(TurnTrace(5, 15) for _ in range(len(think_s) + 1))
    return Session(ConversationTrace(name, turns), arrival_s, tuple(think_s))


def test_turns_are_in_order_and_know_their_returns(oracle):
    turns = oracle.turns_of([session("a", 0.0, [7.0]), session("b", 3.0, [])])
    assert [(turn.sent_s, turn.conversation_id, turn.returns_s) for turn in turns] == [
        (0.0, "a", 7.0),
        (3.0, "b", math.inf),
        (7.0, "a", math.inf),
    ]
    assert [(turn.num_history_tokens, turn.num_tokens) for turn in turns] == [(0, 20), (0, 20), (20, 40)]


def test_a_session_in_mid_life_begins_with_its_first_turn(oracle):
    whole = session("a", 0.0, [7.0, 9.0])
    begun = Session(whole.conversation, 1.0, whole.think_s, first_turn=1)
    assert [(turn.sent_s, turn.num_history_tokens) for turn in oracle.turns_of([begun])] == [
        (1.0, 20),
        (10.0, 40),
    ]


def test_it_keeps_the_returning_conversation_and_not_the_latest_one(oracle):
    """`a` returns and `b` does not; with room for one of them, LRU keeps the wrong one."""
    turns = oracle.turns_of([session("a", 0.0, [7.0]), session("b", 3.0, [])])
    share = {
        policy.name: oracle.recomputed_share(turns, policy, COSTS_S, num_chunks=2, chunk_tokens=CHUNK)
        for policy in (oracle.OraclePolicy(turns, COSTS_S), oracle.LruPolicy())
    }
    assert share == {"oracle": 0.0, "lru": 1.0}


def test_of_two_returning_conversations_the_later_one_is_evicted_from_its_beginning(oracle):
    """At 1 s `b` returns in 3 s and `a` in 8: 1 s of the 3 + 3 s of both is recomputed."""
    turns = oracle.turns_of([session("a", 0.0, [9.0]), session("b", 1.0, [3.0])])
    policy = oracle.OraclePolicy(turns, COSTS_S)
    shares = [oracle.recomputed_share(turns, policy, COSTS_S, n, CHUNK) for n in (100, 0)]
    assert shares == [0.0, 1.0]
    # When `b` has returned, its four chunks are useless, and go before the one chunk left of `a`.
    assert oracle.recomputed_share(turns, policy, COSTS_S, 3, CHUNK) == pytest.approx(1 / 6)
