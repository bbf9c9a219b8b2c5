"""Another program locks the history: changes wait in order beside streams, which go on."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve_jax.core.errors import ClockAheadError, HistoryBusyError, UnknownRecordError
from pensieve_jax.history.server_tables.changes import CreateConversation, Expire, UpdateConversation
from pensieve_jax.server.engine_process import engine_server
from tests.engine.test_locked_history import wait_long_for_locks
from tests.server.engine_process.fakes import FakeEngines, expected, fake_engine, run, spec, until


@pytest.fixture(autouse=True)
def _locks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waited for a lock would not end within the limit of a test."""
    wait_long_for_locks(monkeypatch)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        yield
    finally:
        other.close()


def creation(name: str) -> CreateConversation:
    return CreateConversation(owner="ann", conversation_id=name, metadata="{}", created_at_s=1.0)


def update(name: str) -> UpdateConversation:
    return UpdateConversation(owner="ann", conversation_id=name, metadata='{"a":"b"}')


def test_changes_wait_in_order_while_a_stream_and_other_calls_go_on(tmp_path: Path) -> None:
    async def work() -> None:
        path = tmp_path / "history"
        engines = FakeEngines(path)
        async with fake_engine(engines) as engine:
            with locked(path):
                changes = [
                    asyncio.ensure_future(engine.apply(change))
                    for change in (creation("conv_a"), update("conv_a"), update("conv_b"))
                ]
                census = asyncio.ensure_future(engine.call("census"))
                stored = engine.submit(spec([5, 6], conversation_id="a"))
                stream = engine.submit(spec([7, 8], max_tokens=200))
                assert (await stream.result()).token_ids == expected(
                    engines.harness, spec([7, 8], max_tokens=200)
                )
                assert (await engine.call("stats"))["num_turns_finished"] == 1
                await engine.call("chunk_map", "ann")
                assert not any(one.done() for one in (*changes, census)) and stored.output is None
            await changes[0]
            await changes[1]
            with pytest.raises(UnknownRecordError):
                await changes[2]
            await census
            assert (await stored.result()).token_ids == expected(engines.harness, spec([5, 6]))

    run(work())


def test_a_change_that_waits_too_long_gets_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "LOCK_WAIT_S", 0.0)

    async def work() -> None:
        path = tmp_path / "history"
        async with fake_engine(FakeEngines(path)) as engine:
            with locked(path), pytest.raises(HistoryBusyError):
                await engine.apply(creation("conv_a"))
            await engine.apply(creation("conv_a"))

    run(work())


def test_idle_conversations_that_cannot_be_ended_do_not_end_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        path = tmp_path / "history"
        engines = FakeEngines(path, max_idle_conversations=1)
        async with fake_engine(engines) as engine:
            for name in "ab":
                await engine.submit(spec([5, 6], conversation_id=name)).result()
            with locked(path):
                await until(lambda: "another program has locked" in caplog.text)
            assert (await engine.submit(spec([7])).result()).token_ids == expected(engines.harness, spec([7]))

    run(work())


def test_a_clock_that_is_ahead_is_no_failure_of_the_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with fake_engine(FakeEngines(tmp_path / "history")) as engine:
            await engine.apply(creation("conv_a"))
            with pytest.raises(ClockAheadError):
                await engine.apply(Expire(now_s=1e6))

    run(work())
    assert "the newest time in the history" not in caplog.text
