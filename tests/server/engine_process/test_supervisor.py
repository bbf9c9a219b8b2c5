"""Restarts of an engine: starts that fail, and shutdowns requested during a restart."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable

import pytest
import uvloop

from pensieve_jax import AsyncEngine, EngineClosedError, EngineConfig, EngineDiedError
from pensieve_jax.core.errors import (
    ConfigError,
    HistoryCorruptError,
    HistoryError,
    HistoryLockedError,
    HistoryMismatchError,
    HistoryMissingError,
)
from pensieve_jax.history.server_tables.changes import CreateConversation, DeleteConversation
from pensieve_jax.server.engine_process.messages import Failed, Ready, Start, sent_error
from pensieve_jax.server.engine_process.spawn import EngineHandle
from pensieve_jax.server.engine_process.supervisor import RestartPolicy
from tests.server.engine_process.fakes import (
    TIMEOUT_S,
    FakeEngines,
    ScriptedHandle,
    fake_engine,
    run,
    spec,
    until,
)
from tests.server.fakes import FakeEngine

TOO_MANY_FILES = OSError(errno.EMFILE, "Too many open files")


class FailingEngines(FakeEngines):
    """Starts that raise or report the entries of `errors`, in order; None starts an engine."""

    def __init__(self, *errors: Exception | Failed | None) -> None:
        super().__init__()
        self.errors = list(errors)
        self.num_tried = 0

    async def begin(self) -> EngineHandle:
        self.num_tried += 1
        error = self.errors.pop(0) if self.errors else None
        if isinstance(error, Failed):
            return ScriptedHandle(error, has_ended=True)
        if error is not None:
            raise error
        return await super().begin()


def refused(error: Exception) -> Failed:
    """Return what an engine's process sends when it cannot start."""
    return Failed(sent_error(error))


def test_a_start_that_the_system_refuses_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        engines = FailingEngines(None, TOO_MANY_FILES, TOO_MANY_FILES)
        async with fake_engine(engines) as engine:
            engines.handles[-1].kill()
            await until(lambda: engine.epoch == 2)
            assert engine.state == "ready" and not engine.gave_up.is_set() and engines.num_tried == 4
            assert (await engine.submit(spec([5])).result()).finish_reason == "length"

    run(work())
    assert caplog.text.count("cannot be started: Too many open files.") == 2


def test_a_system_that_refuses_every_start_ends_the_server() -> None:
    async def work() -> None:
        engines = FailingEngines(None, *[TOO_MANY_FILES] * RestartPolicy().max_restarts)
        async with fake_engine(engines) as engine:
            engines.handles[-1].kill()
            await engine.gave_up.wait()
            assert engine.state == "dead" and engines.num_tried == 1 + RestartPolicy().max_restarts

    run(work())


def test_an_unexpected_error_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        engines = FailingEngines(None, RuntimeError("unexpected"))
        async with fake_engine(engines) as engine:
            engines.handles[-1].kill()
            await engine.gave_up.wait()
            assert engine.state == "dead"

    run(work())
    (record,) = [record for record in caplog.records if record.exc_info]
    assert isinstance(record.exc_info[1], RuntimeError)


@pytest.mark.parametrize("kind", [HistoryCorruptError, HistoryMismatchError, HistoryMissingError])
def test_an_engine_whose_history_is_gone_is_not_restarted(
    kind: type[HistoryError], caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file is moved. The next start would create an empty one, which the front end never reads."""

    async def work() -> None:
        engines = FailingEngines(None, refused(kind("The history is damaged.")))
        async with fake_engine(engines) as engine:
            engines.handles[-1].kill()
            await until(lambda: engine.gave_up.is_set() or engine.epoch == 2)
            assert (engine.state, engine.epoch, engines.num_tried) == ("dead", 1, 2)
            assert engine.is_damaged

    run(work())
    assert caplog.text.count("cannot restart: The history is damaged.") == 1


def test_only_the_first_start_creates_a_history() -> None:
    """A later start would create a new file, which the front end, with the old one open, never reads."""

    async def work() -> None:
        handles: list[ScriptedHandle] = []

        async def begin() -> EngineHandle:
            greeting = Start("fake", "auto", "/a/path", "normal", EngineConfig(), False)
            handles.append(ScriptedHandle(Ready(FakeEngine().info), greeting=greeting))
            return handles[-1]

        async with AsyncEngine(begin, patience_s=0.01) as engine:
            assert handles[0].heard().may_make_history
            handles[0].kill()
            await until(lambda: engine.epoch == 2)
            assert not handles[1].heard().may_make_history

    run(work())


@pytest.mark.parametrize(
    "error", [HistoryLockedError("locked"), HistoryError("cannot be opened"), ConfigError("dtype", "f", "g")]
)
def test_temporary_errors_are_retried(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        engines = FailingEngines(None, refused(error), refused(error))
        async with fake_engine(engines) as engine:
            engines.handles[-1].kill()
            await until(lambda: engine.epoch == 2)
            assert (
                engine.state == "ready"
                and not engine.is_damaged
                and not engine.gave_up.is_set()
                and engines.num_tried == 4
            )

    with caplog.at_level("INFO"):
        run(work())
    assert caplog.text.count(f"cannot start: {error}") == 2 and "ready again, after" in caplog.text


def test_a_first_start_that_the_system_refuses_gives_the_reason() -> None:
    async def work() -> None:
        engine = AsyncEngine(FailingEngines(TOO_MANY_FILES).begin)
        with pytest.raises(EngineDiedError, match="Too many open files"):
            await engine.open()
        assert engine.state == "dead"

    run(work())


@pytest.mark.parametrize("is_first", [True, False])
def test_an_engine_that_cannot_be_reached_is_ended(is_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its process would otherwise hold the device without use."""

    class Unreachable(FakeEngines):
        async def begin(self) -> EngineHandle:
            handle = await super().begin()
            if len(self.handles) == (1 if is_first else 2):
                handle.front.close()
            return handle

    async def work() -> None:
        engines = Unreachable()
        if is_first:
            with pytest.raises(EngineDiedError, match="Bad file descriptor"):
                await AsyncEngine(engines.begin).open()
        else:
            async with fake_engine(engines) as engine:
                engines.handles[-1].kill()
                await until(lambda: engine.epoch == 2)
        assert all(handle._ended.is_set() for handle in engines.handles)

    run(work())


@pytest.mark.parametrize("how", ["drain", "kill"])
@pytest.mark.parametrize("moment", ["before it begins", "before it is ready"])
def test_a_shutdown_request_ends_an_engine_that_is_being_restarted(
    how: str, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    class SlowEngines(FakeEngines):
        async def begin(self) -> EngineHandle:
            if moment == "before it is ready":
                handle = await super().begin()
            if len(self.handles) + (moment == "before it begins") > 1:
                begins.set()
                await may_begin.wait()
            return handle if moment == "before it is ready" else await super().begin()

    begins, may_begin = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        engines = SlowEngines()
        async with fake_engine(engines) as engine:
            engines.handles[-1].kill()
            await begins.wait()
            if how == "drain":
                await engine.drain(0.0)
                assert engine.state == "draining"
            else:
                engine.kill()
            may_begin.set()
            assert engine._watch is not None
            await engine._watch
            assert (engine.state, engine.epoch) == ("dead", 1)
            assert not engine.gave_up.is_set()
            assert len(engines.handles) == 2 and all(handle._ended.is_set() for handle in engines.handles)
            with pytest.raises(EngineClosedError, match="dead"):
                engine.submit(spec([5]))

    run(work())


def test_a_drain_does_not_wait_for_a_stuck_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        engines, steps, may_go_on = FakeEngines(), threading.Event(), threading.Event()

        def stick(output: object) -> None:
            steps.set()
            may_go_on.wait(TIMEOUT_S)

        engines.prepare = lambda harness: setattr(harness, "on_step", stick)
        engine = AsyncEngine(engines.begin, patience_s=0.01)
        await engine.open()
        turn = engine.submit(spec([5], max_tokens=1500))
        await until(steps.is_set)
        try:
            await engine.drain(0.0)
            with pytest.raises(EngineDiedError):
                await turn.result()
        finally:
            may_go_on.set()
        await engine.close()
        assert engine.state == "dead" and not engine.gave_up.is_set()

    run(work())
    assert "did not cancel its turns within 0.01 s" in caplog.text


def test_cancelling_on_a_stuck_engine_does_not_wait() -> None:
    async def work() -> None:
        engines, steps, may_go_on = FakeEngines(), threading.Event(), threading.Event()

        def stick(output: object) -> None:
            steps.set()
            may_go_on.wait(TIMEOUT_S)

        engines.prepare = lambda harness: setattr(harness, "on_step", stick)
        async with AsyncEngine(engines.begin, answer_s=0.01) as engine:
            turn = engine.submit(spec([5]))
            await until(steps.is_set)
            change = DeleteConversation(owner="", conversation_id="c")
            try:
                for asked in (engine.call("stats"), engine.apply(change)):
                    with pytest.raises(EngineClosedError, match=r"0\.01 s"):
                        await asked
                assert engine._connection is not None and not engine._connection._calls
            finally:
                may_go_on.set()
            assert (await turn.result()).finish_reason == "length"  # its late messages have no effect
            assert engine.state == "ready"

    run(work())


def test_a_shutdown_request_between_two_starts_prevents_the_second() -> None:
    async def work() -> None:
        engines = FailingEngines(None, TOO_MANY_FILES)
        restarts = RestartPolicy(first_delay_s=0.01)
        async with AsyncEngine(engines.begin, restarts=restarts) as engine:
            engines.handles[-1].kill()
            await until(lambda: engines.num_tried == 2)
            await engine.drain(0.0)
            assert engine._watch is not None
            await engine._watch
            assert engine.state == "dead" and engines.num_tried == 2 and not engine.gave_up.is_set()

    run(work())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_engine_that_reads_nothing_does_not_keep_the_server_from_ending(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Closing a socket with unsent bytes leaves it open."""

    async def work() -> None:
        handle = ScriptedHandle(Ready(FakeEngine().info))

        async def begin() -> EngineHandle:
            return handle

        engine = AsyncEngine(begin, patience_s=0.01, answer_s=0.01)
        await engine.open()
        more = CreateConversation(
            owner="", conversation_id="c", metadata="{}", created_at_s=0.0, items="x" * 10**7
        )
        with pytest.raises(EngineClosedError, match="not answered"):
            await engine.apply(more)
        await engine.drain(1.0)
        async with asyncio.timeout(TIMEOUT_S):
            await engine.close()
        assert handle.killed.is_set() and engine.state == "dead" and not engine.gave_up.is_set()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())


@pytest.mark.parametrize("how", ["closed", "killed", "closed by somebody who is cancelled"])
def test_no_process_outlives_the_server(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A process may hang after its socket closed, and would keep device memory and the history's lock."""

    async def work() -> None:
        handle = ScriptedHandle(Ready(FakeEngine().info))

        async def begin() -> EngineHandle:
            return handle

        is_patient = how != "closed"
        engine = AsyncEngine(begin, patience_s=TIMEOUT_S if is_patient else 0.01)
        await engine.open()
        handle.hang()
        await until(lambda: engine.state == "starting")  # the supervisor waits for its end
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        if how == "killed":
            engine.kill()
        elif is_patient:
            closing.cancel()
        await asyncio.wait([closing])
        assert handle.killed.is_set() and engine.state == "dead"

    run(work())
