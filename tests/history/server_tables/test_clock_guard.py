"""A clock that is far ahead deletes nothing until it is confirmed."""

from __future__ import annotations

import json

import pytest

from pensieve_jax.core.errors import ClockAheadError
from pensieve_jax.history import open_store
from pensieve_jax.history.server_tables.changes import (
    AppendItems,
    CreateConversation,
    Expire,
    UpdateConversation,
)
from tests.history.conftest import FINGERPRINT
from tests.history.server_tables.test_responses import commit, counts, message, turn

DAY_S = 24 * 3600.0
NOW_S = 1_790_000_000.0


def filled(store, at_s=NOW_S):
    """Store a response that expires 30 days after it was created."""
    one = turn(created_at_s=at_s)
    assert commit(store, one, created_at_s=at_s, expires_at_s=at_s + 30 * DAY_S) == {}


def num_responses(store) -> int:
    return store.read(lambda connection: connection.execute("SELECT count(*) FROM responses").fetchone()[0])


def test_a_clock_ahead_of_the_newest_row_deletes_nothing(read_store):
    filled(read_store)
    for _ in range(2):
        with pytest.raises(ClockAheadError, match="must be at most a day after 1790000000") as raised:
            read_store.apply(Expire(now_s=NOW_S + 31 * DAY_S, idle_s=DAY_S))
    assert (raised.value.now_s, raised.value.trusted_s) == (NOW_S + 31 * DAY_S, NOW_S)
    assert num_responses(read_store) == 1
    read_store.apply(Expire(now_s=NOW_S + DAY_S))  # the clock was put right


def test_a_confirmed_clock_deletes(read_store):
    filled(read_store)
    with pytest.raises(ClockAheadError):
        read_store.apply(Expire(now_s=NOW_S + 31 * DAY_S, confirmed_until_s=NOW_S + 30 * DAY_S))
    read_store.apply(Expire(now_s=NOW_S + 31 * DAY_S, confirmed_until_s=NOW_S + 31 * DAY_S))
    assert num_responses(read_store) == 0
    read_store.apply(Expire(now_s=NOW_S + 31.9 * DAY_S))  # from now on that time is trusted


def test_what_a_clock_that_is_ahead_writes_does_not_confirm_it(location):
    """It is started twice before it is put right: its rows and its refused deletions are dated ahead."""
    with open_store(location, fingerprint=FINGERPRINT) as store:
        filled(store)
        store.apply(Expire(now_s=NOW_S))
    for _ in range(2):
        with open_store(location, fingerprint=FINGERPRINT) as store:
            with pytest.raises(ClockAheadError):
                store.apply(Expire(now_s=NOW_S + 31 * DAY_S))
            filled(store, NOW_S + 31 * DAY_S)
    with open_store(location, fingerprint=FINGERPRINT) as store:
        store.apply(Expire(now_s=NOW_S + 60.0))
        assert num_responses(store) == 3


def test_a_server_that_runs_without_turns_stays_trusted(read_store):
    filled(read_store)
    for number in range(60):
        read_store.apply(Expire(now_s=NOW_S + number * 0.9 * DAY_S))
    assert num_responses(read_store) == 0


def test_a_clock_that_was_behind_is_right_again(read_store):
    """A machine without a battery begins in 1970."""
    filled(read_store)
    read_store.apply(Expire(now_s=NOW_S))
    read_store.apply(Expire(now_s=0.0))
    read_store.apply(Expire(now_s=NOW_S + 0.5 * DAY_S))


def test_an_empty_history_trusts_any_clock(read_store):
    read_store.apply(Expire(now_s=NOW_S))
    with pytest.raises(ClockAheadError):
        read_store.apply(Expire(now_s=NOW_S + 2 * DAY_S))


@pytest.mark.parametrize("what", ["turn", "named", "conversation", "items", "metadata"])
def test_the_newest_of_all_rows_counts(read_store, what):
    def create(at_s):
        made = CreateConversation(owner="ann", conversation_id="conv_1", metadata="{}", created_at_s=at_s)
        read_store.apply(made)

    filled(read_store)
    late_s = NOW_S + 40 * DAY_S
    match what:
        case "turn":
            read_store.commit([turn(created_at_s=late_s)])
        case "named":
            read_store.commit([turn(None, "", conversation_id="named", turn_id="", created_at_s=late_s)])
        case "conversation":
            create(late_s)
        case "items":
            create(NOW_S)
            items = json.dumps([message("a")])
            read_store.apply(
                AppendItems(
                    owner="ann",
                    conversation_id="conv_1",
                    expected_version=0,
                    items=items,
                    appended_at_s=late_s,
                )
            )
        case "metadata":
            create(NOW_S)
            read_store.apply(
                UpdateConversation(owner="ann", conversation_id="conv_1", metadata="{}", updated_at_s=late_s)
            )
    with pytest.raises(ClockAheadError) as raised:
        read_store.apply(Expire(now_s=late_s + 2 * DAY_S))
    assert raised.value.trusted_s == late_s
    read_store.apply(Expire(now_s=late_s))
    assert counts(read_store)["responses"] == 0
