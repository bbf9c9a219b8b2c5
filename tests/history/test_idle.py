"""Named conversations that are idle for too long, or too many: found without a listing, by the same rule."""

from __future__ import annotations

import random

import pytest

from pensieve_jax.history import HistoryStore, SQLiteHistoryStore, TurnRecord
from pensieve_jax.history.named_conversations import idle


def say(store: HistoryStore, name: str, at_s: float, index: int = 0) -> None:
    assert store.commit([TurnRecord(name, index, (1, 2), (3,), 7, "stop", at_s)]) == {}


def expected(store: HistoryStore, before_s: float | None, num_kept: int | None, busy: set[str]) -> list[str]:
    infos = [info for info in store.conversations() if info.conversation_id not in busy]
    return [
        info.conversation_id
        for position, info in enumerate(infos)
        if (num_kept is not None and position >= num_kept)
        or (before_s is not None and info.last_active_s < before_s)
    ]


def test_conversations_beyond_a_number_and_before_a_time_are_found(store: HistoryStore) -> None:
    """Busy ones are neither listed nor counted; equal times are ordered by id, as in the listing."""
    chance = random.Random(5)
    for number in range(40):
        say(store, f"c{chance.randrange(10_000)}-{number}", float(chance.randrange(20)))
    names = [info.conversation_id for info in store.conversations()]
    for _ in range(60):
        before_s = chance.choice([None, chance.uniform(-1, 21)])
        num_kept = chance.choice([None, chance.randrange(1, 45)])
        busy = {*chance.sample(names, chance.randrange(30)), "begun and not committed"}
        found = store.idle(before_s, num_kept, busy)
        assert sorted(found) == sorted(expected(store, before_s, num_kept, busy))


def test_extreme_limits_are_accepted(store: HistoryStore) -> None:
    say(store, "a", 1.0)
    assert store.idle(float("-inf"), 10**30, ()) == []
    assert store.idle(float("inf"), None, ()) == ["a"]
    assert store.idle(None, 1, ()) == [] == store.idle(None, None, ())


def test_more_conversations_may_be_busy_than_a_statement_takes_values(store: HistoryStore) -> None:
    for number in range(4):
        say(store, f"c{number}", float(number))
    busy = {"c3", "c1", *(f"new-{number}" for number in range(70_000))}
    assert store.idle(None, 1, busy) == ["c0"]


def test_server_conversations_and_placed_turns_are_excluded(store: HistoryStore) -> None:
    assert store.commit([TurnRecord("", 0, (1,), (2,), 7, "stop", 1.0, turn_id="0" * 32, owner="ann")]) == {}
    assert store.idle(float("inf"), 1, ()) == []


@pytest.mark.parametrize("asked", [(5.0, None), (None, 1)])
def test_an_index_is_read_and_nothing_is_sorted(tmp_path, asked) -> None:
    """This also holds for a history from before this index existed."""
    path = tmp_path / "chats.sqlite"
    for _ in range(2):
        with SQLiteHistoryStore(path, fingerprint="f") as store:
            queries: list[str] = []
            store._connection.set_trace_callback(queries.append)
            idle(store._connection, *asked, ())
            store._connection.set_trace_callback(None)
            plan = store._connection.execute(f"EXPLAIN QUERY PLAN {queries[0]}").fetchall()
            assert len(plan) == 1 and "named_by_activity" in plan[0][3]
            store._connection.execute("DROP INDEX named_by_activity")
