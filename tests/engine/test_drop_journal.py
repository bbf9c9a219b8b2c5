"""The record of drops: the latest of each chunk, moved and forgotten with its owner, within a bound."""

from __future__ import annotations

import pytest

from pensieve_jax.cache import Drop, DropReason
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.engine import drop_journal
from pensieve_jax.engine.drop_journal import DropJournal, DropRecord

REASON, OTHER = DropReason.NO_HOST_MEMORY, DropReason.SLOT_NEEDED


def noted(*drops):
    """A journal of (sequence, chunk), a second apart."""
    clock = VirtualClock(10.0)
    journal = DropJournal(clock)
    for name, index in drops:
        journal.note(Drop(name, index, REASON, 2.0))
        clock.advance(1.0)
    return journal


def indices(journal, *names):
    return [sorted(journal.of(name)) for name in names]


def test_the_latest_drop_of_a_chunk_is_told():
    journal = noted(("a", 3), ("a", 4))
    journal.note(Drop("a", 3, OTHER, None))
    assert journal.of("a") == {3: DropRecord(12.0, OTHER, None), 4: DropRecord(11.0, REASON, 2.0)}
    assert journal.of("b") == {} and journal._num_records == 2


@pytest.mark.parametrize(
    ("bound", "left"), [(5, [[0, 1], [0], [0, 1]]), (4, [[], [0], [0, 1]]), (2, [[], [], [0, 1]])]
)
def test_conversations_that_lost_something_longest_ago_are_forgotten_first(monkeypatch, bound, left):
    monkeypatch.setattr(drop_journal, "_MAX_NUM_RECORDS", bound)
    journal = noted(("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1))
    assert indices(journal, "a", "b", "c") == left
    assert journal._num_records == sum(map(len, left))


def test_another_drop_keeps_a_conversation_and_the_newest_one_stays_whole(monkeypatch):
    monkeypatch.setattr(drop_journal, "_MAX_NUM_RECORDS", 2)
    assert indices(noted(("a", 0), ("b", 0), ("a", 0), ("c", 0)), "a", "b", "c") == [[0], [], [0]]
    assert indices(noted(*[("a", index) for index in range(4)]), "a") == [[0, 1, 2, 3]]


def test_forgetting_makes_room():
    journal = noted(("a", 0), ("a", 1), ("b", 0))
    journal.forget("a")
    journal.forget("a")
    assert indices(journal, "a", "b") == [[], [0]] and journal._num_records == 1


def test_chunks_that_change_their_owner_take_their_records_along():
    journal = noted(("a", 0), ("a", 1), ("a", 2), ("trunk", 1))
    journal.move("a", "trunk", range(2))
    assert indices(journal, "a", "trunk") == [[2], [0, 1]]
    assert journal.of("trunk")[1].at_s == 11.0, "what was moved is told of a chunk that both had"
    assert journal._num_records == 3
    journal.move("a", "other", range(2))
    assert "other" not in journal._drops
    journal.move("a", None, range(2))
    assert indices(journal, "a") == [[]] and journal._num_records == 2


def test_all_that_was_held_is_lost_at_once():
    journal = noted(("a", 0))
    journal.lose([("a", 1), ("b", 5)], OTHER)
    assert journal.of("a")[1] == journal.of("b")[5] == DropRecord(11.0, OTHER, None)
