"""Another program locks the history: complete turns wait outside the batch, and all others go on."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pensieve_jax.core.errors import ConversationBusyError, HistoryBusyError, StepFailedError
from pensieve_jax.engine import ledger
from pensieve_jax.history import database, sqlite_store
from pensieve_jax.history.table_store import TableHistoryStore
from pensieve_jax.server.engine_process import engine_server
from tests.engine.harness import Harness, small_config
from tests.seeds import new_seed

LONG_S = 300.0
"""How long locks are waited for here: longer than a test takes on a busy machine."""


def wait_long_for_locks(patch: pytest.MonkeyPatch) -> None:
    """Let every wait for a lock, within a step or beside it, take `LONG_S`."""
    for module in (database, engine_server, ledger, sqlite_store):
        patch.setattr(module, "LOCK_WAIT_S", LONG_S)
    patch.setattr(TableHistoryStore, "lock_wait_s", LONG_S)


@pytest.fixture(autouse=True)
def _locks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_long_for_locks(monkeypatch)


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Hold the lock for writing, as a backup tool or a shell does."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        other.execute("BEGIN IMMEDIATE")
        yield other
    finally:
        other.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history"


def step_until(harness: Harness, done) -> None:
    for _ in range(10_000):
        if done():
            return
        harness.step()
    raise AssertionError("it was never done")


def complete(harness: Harness, name: str, *, seed: int = 1, **params):
    """Return a turn whose reply is complete and cannot be written, and its facts."""
    facts = harness.facts(harness.prompt(9, seed=seed), name, **({"max_tokens": 6} | params))
    turn = harness.submit(facts, name)
    step_until(harness, lambda: turn.request in harness.engine._ledger.complete)
    assert not turn.done and tuple(turn.token_ids) == harness.expected(facts)
    return turn, facts


def test_turns_that_are_not_stored_do_not_wait_for_the_lock(path: Path) -> None:
    harness = Harness(path=path)
    stream = harness.submit(harness.facts(harness.prompt(5, seed=3), max_tokens=300), None)
    with locked(path):
        stored, facts = complete(harness, "a")
        began_s = time.monotonic()
        while not stream.done:
            harness.step()
        assert time.monotonic() - began_s < LONG_S
    harness.run(stored)
    assert stored.output.token_ids == harness.expected(facts)
    assert harness.history("a")[-6:] == stored.output.token_ids


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_turn_is_reported_after_its_commit_and_continues_exactly(path: Path, ends_early: bool) -> None:
    """Its chunks leave the device while it waits; a token of the look-ahead step is discarded."""
    harness = Harness(small_config(gpu_pages=6), path=path)
    params = {}
    if ends_early:
        whole = harness.expected(harness.facts(harness.prompt(9, seed=1), "a", max_tokens=6))
        params = {"stop_token_ids": (whole[3],)}
    with locked(path):
        turn, facts = complete(harness, "a", **params)
        for seed in range(4):  # these need its pages
            big = harness.facts(harness.prompt(60, seed=seed), max_tokens=4)
            other = harness.submit(big, None)
            step_until(harness, lambda other=other: other.done)
            assert other.output.token_ids == harness.expected(big)
        assert not turn.done and harness.store.conversations() == []
        with pytest.raises(ConversationBusyError):
            harness.submit(facts, "a")
    assert harness.run(turn)[0].token_ids == harness.expected(facts)
    assert [record.output_token_ids for record in harness.store.commits[-1]] == [turn.output.token_ids]
    following = harness.facts(harness.prompt(9, seed=8), "a", max_tokens=6)
    assert harness.run(harness.submit(following, "a"))[0].token_ids == harness.expected(following)
    harness.check_empty()


def test_turns_that_end_meanwhile_are_written_together_in_order(path: Path) -> None:
    harness = Harness(path=path)
    with locked(path):
        turns = [complete(harness, name)[0] for name in "abc"]
    harness.run(*turns)
    (commit,) = harness.store.commits
    assert [record.conversation_id for record in commit] == ["a", "b", "c"]


def test_a_turn_that_waits_too_long_gets_a_typed_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(path=path)
    harness.turn("a", 20, seed=1, max_tokens=5)
    before = harness.history("a")
    with locked(path):
        monkeypatch.setattr(ledger, "LOCK_WAIT_S", 0.0)
        facts = harness.facts(harness.prompt(9, seed=2), "a", max_tokens=6)
        turn = harness.submit(facts, "a")
        step_until(harness, lambda: turn.done)
    assert isinstance(turn.error, HistoryBusyError) and harness.history("a") == before
    assert harness.run(harness.submit(facts, "a"))[0].token_ids == harness.expected(facts)
    harness.check_empty()


def test_a_waiting_turn_can_be_cancelled(path: Path) -> None:
    harness = Harness(path=path)
    with locked(path):
        turn, facts = complete(harness, "a")
        harness.engine.cancel(turn)
        assert turn.output.finish_reason == "cancelled" and not harness.engine.has_unfinished
    assert harness.store.conversations() == []
    assert harness.run(harness.submit(facts, "a"))[0].token_ids == harness.expected(facts)


def test_a_waiting_turn_survives_a_failed_step(path: Path) -> None:
    harness = Harness(path=path)
    with locked(path):
        turn, facts = complete(harness, "a")
        lost = harness.submit(harness.facts(harness.prompt(9, seed=5), max_tokens=20), None)
        harness.step(3)
        harness.runner.faults["launch"] = lambda: StepFailedError("the device failed")
        step_until(harness, lambda: lost.done)
        assert isinstance(lost.error, StepFailedError) and not turn.done
    assert harness.run(turn)[0].token_ids == harness.expected(facts)


def test_changes_wait_as_long_as_they_are_told(path: Path) -> None:
    harness = Harness(path=path)
    harness.turn("a", 20, seed=1, max_tokens=5)
    harness.engine.wait_for_locks(0.0)
    with locked(path):
        began_s = time.monotonic()
        for change in (lambda: harness.engine.end("a"), lambda: harness.engine.fork("a", "b")):
            with pytest.raises(HistoryBusyError, match="another program has locked"):
                change()
        assert time.monotonic() - began_s < LONG_S
    harness.engine.fork("a", "b")
    harness.engine.end("a")


@pytest.mark.parametrize("attempt", range(6))
def test_random_locks_change_no_token(path: Path, attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_RETRY_S", 0.0)
    chooser = random.Random(new_seed() + attempt)
    harness = Harness(small_config(gpu_pages=12, cpu_pages=chooser.choice([0, 4])), path=path)
    running = {}
    other = sqlite3.connect(path, isolation_level=None)
    try:
        for number in range(300):
            draw = chooser.random()
            if draw < 0.1:
                other.execute("ROLLBACK" if other.in_transaction else "BEGIN IMMEDIATE")
            elif draw < 0.3:
                name = chooser.choice([None, *(f"{letter}{number // 50}" for letter in "abc")])
                facts = harness.facts(
                    harness.prompt(chooser.randrange(1, 20), seed=number),
                    name,
                    max_tokens=chooser.randrange(1, 9),
                )
                if name is None or not harness.engine.conversations.is_busy(name):
                    running[harness.submit(facts, name)] = facts
            elif draw < 0.33 and running:
                harness.engine.cancel(chooser.choice(list(running)))
            else:
                harness.step()
            for turn in [turn for turn in running if turn.done]:
                facts = running.pop(turn)
                if turn.output.finish_reason != "cancelled":
                    assert turn.output.token_ids == harness.expected(facts)
    finally:
        other.close()
    outputs = harness.run(*running)
    assert [output.token_ids for output in outputs] == list(map(harness.expected, running.values()))
    harness.check_empty()
