"""The learned state of an order survives the engine, and its failures never stop the engine from serving."""

from __future__ import annotations

import logging

import pytest

from pensieve_jax.core.errors import HistoryError
from pensieve_jax.engine import learned_state_store as kept
from tests.cache.helpers import learned_state_of
from tests.engine.harness import Harness, small_config

LEARNED = small_config(policy="learned")


def talk(harness: Harness, num_turns: int, name: str = "a") -> None:
    for _ in range(num_turns):
        harness.turn(name, 20, max_tokens=2)
        harness.clock.advance(3.0)


def seen(harness: Harness) -> float:
    return harness.engine.cache.turns.learned_state().num_returns


def interrupt(harness: Harness) -> None:
    """Raise KeyboardInterrupt in the middle of a change."""

    def change() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harness.engine._guard.run(change)


def test_it_survives_a_restart(tmp_path):
    path = tmp_path / "history.sqlite"
    first = Harness(LEARNED, path=path)
    talk(first, 5)
    before = first.engine.cache.turns.learned_state()
    first.engine.close()
    second = Harness(LEARNED, path=path, clock=first.clock)
    after = second.engine.cache.turns.learned_state()
    assert (after.returns == before.returns).all() and after.num_returns == 4
    talk(second, 1)  # conversations that were idle before the restart have not been observed since
    assert seen(second) == 4
    talk(second, 1)
    assert seen(second) == 5


def test_it_is_written_periodically(tmp_path, monkeypatch):
    """A killed process loses only the last turns."""
    monkeypatch.setattr(kept, "_WRITE_AFTER", 4)
    harness = Harness(LEARNED, path=tmp_path / "history.sqlite")
    talk(harness, 3)
    assert harness.store.note("experience") is None
    talk(harness, 2)
    assert kept.load_learned_state(harness.store, "learned").num_returns == 3


def test_an_interrupt_keeps_what_was_written(monkeypatch):
    monkeypatch.setattr(kept, "_WRITE_AFTER", 1)
    harness = Harness(LEARNED)
    talk(harness, 4)
    interrupt(harness)
    talk(harness, 1)
    assert seen(harness) == 3


def test_if_the_history_cannot_read_it_learning_starts_again(monkeypatch, caplog):
    """The history may fail at any time; after an interrupt the engine reads it again."""
    harness = Harness(LEARNED)
    talk(harness, 3)

    def fail(name: str) -> str | None:
        raise HistoryError("the disk is gone")

    monkeypatch.setattr(harness.store, "note", fail)
    interrupt(harness)
    talk(harness, 1)
    assert "starts empty" in caplog.text and "the disk is gone" in caplog.text and seen(harness) == 0


def test_other_orders_do_not_read_it():
    harness = Harness(small_config(policy="lru"))
    harness.store.keep_note("experience", "{torn")
    assert kept.load_learned_state(harness.store, "lru") is None


def test_forgetting_is_a_change_like_others():
    """It needs the engine's thread. A failing history forgets nothing; an interrupt is recovered from."""
    harness = Harness(LEARNED)
    talk(harness, 3)
    keep_note = harness.store.keep_note

    def fail(name: str, text: str | None) -> None:
        raise HistoryError("the disk is full")

    harness.store.keep_note = fail
    with pytest.raises(HistoryError):
        harness.engine.forget_experience()
    assert seen(harness) == 2 and not harness.engine._guard.interrupted

    def interrupted(name: str, text: str | None) -> None:
        raise KeyboardInterrupt

    harness.store.keep_note = interrupted
    with pytest.raises(KeyboardInterrupt):
        harness.engine.forget_experience()
    assert harness.engine._guard.interrupted
    harness.store.keep_note = keep_note
    talk(harness, 1)


@pytest.mark.parametrize("text", ["", "{torn", "[]", '{"format": "another"}', "[" * 100_000])
def test_invalid_learned_state_is_discarded(tmp_path, text, caplog):
    path = tmp_path / "history.sqlite"
    first = Harness(LEARNED, path=path)
    talk(first, 2)
    first.engine.close()
    with_note = Harness(LEARNED, path=path, clock=first.clock)
    with_note.store.keep_note("experience", text)
    with_note.engine.close()
    with caplog.at_level(logging.WARNING):
        harness = Harness(LEARNED, path=path, clock=first.clock)
    assert "starts empty" in caplog.text and seen(harness) == 0
    talk(harness, 3)
    assert seen(harness) == 2


def test_a_history_that_cannot_be_written_costs_no_turn(monkeypatch, caplog):
    monkeypatch.setattr(kept, "_WRITE_AFTER", 1)
    harness = Harness(LEARNED)

    def fail(name: str, text: str | None) -> None:
        raise HistoryError("the disk is full")

    harness.store.keep_note = fail
    talk(harness, 2)
    assert "the disk is full" in caplog.text and seen(harness) == 1


def test_it_can_be_forgotten(tmp_path):
    path = tmp_path / "history.sqlite"
    harness = Harness(LEARNED, path=path)
    talk(harness, 5)
    harness.engine.forget_experience()
    assert seen(harness) == 0 and harness.store.note("experience") is None
    talk(harness, 1)
    harness.engine.close()
    assert seen(Harness(LEARNED, path=path, clock=harness.clock)) == 0


def test_an_order_that_does_not_learn_writes_nothing():
    harness = Harness(small_config(policy="lru"))
    talk(harness, 3)
    harness.engine._ledger.close()
    assert harness.store.note("experience") is None


def test_only_conversations_that_may_return_are_counted():
    """Excluded are one-off turns, ended conversations and cancelled turns."""
    harness = Harness(LEARNED)
    harness.turn(None, 20, max_tokens=2)
    talk(harness, 1, "ended")
    harness.engine.end("ended")
    talk(harness, 1, "cancelled")
    facts = harness.facts(harness.prompt(20), "cancelled", 0, max_tokens=50)
    turn = harness.submit(facts, "cancelled")
    harness.step(3)
    harness.engine.cancel(turn)
    log = harness.engine.cache.turns._log
    assert len(log) == 1 and seen(harness) == 1  # its user did return
    harness.clock.advance(3.0)
    talk(harness, 1, "cancelled")
    assert seen(harness) == 2


def test_explain_and_stats_name_the_order_in_use():
    harness = Harness(LEARNED)
    talk(harness, 2)
    text = str(harness.engine.explain("a"))
    assert "eviction order 'learned'" in text and "following 'retention'" in text
    harness.engine.cache.turns.begin(learned_state_of(1, "lru"))
    assert "following 'lru'" in str(harness.engine.explain("a"))
    stats = harness.engine.stats()
    assert stats["num_order_changes"] == 0 and stats["shadow_lru_recompute_s"] == 0
