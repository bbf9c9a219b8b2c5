"""What Ray says of a call, and what comes on its stream, as turns understand both. Ray does not run."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, UnknownTurnError
from pensieve_jax.server.replicas.report_stream import FrontLostError, ReportListener

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Ray imports


class Call:
    """Returns once it is let, or raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error
        self._may_end = asyncio.Event()
        self.is_cancelled = False
        if error is not None:
            self._may_end.set()

    def __await__(self):
        return self._wait().__await__()

    async def _wait(self) -> None:
        await self._may_end.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        self._may_end.set()

    def cancel(self) -> None:
        from ray.serve.exceptions import RequestCancelledError

        self.is_cancelled = True
        self._error = RequestCancelledError("its id")
        self._may_end.set()


def read(*messages, error=None, ends=True):
    """All lines, where the call raises an error behind so many messages."""
    from pensieve_jax.server.replicas.ray_replicas import RayReplicaStream

    async def all_of_it():
        call, inbox = Call(error), ReportListener().open()
        for message in messages:
            inbox.add(message)
        if ends:
            inbox.add(b"")
        lines = RayReplicaStream(call, inbox)
        call.end()
        found = [line async for line in lines]
        lines.cancel()
        assert not call.is_cancelled
        await lines._waiting
        return found

    return asyncio.run(all_of_it())


def test_lines_come_as_they_are():
    assert read(b"a", b"b") == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["ActorDiedError", "RaySystemError", "TaskCancelledError", "CancelledError"])
def test_whatever_ends_a_call_but_its_reader_is_a_replica_that_is_gone(kind):
    error = asyncio.CancelledError() if kind == "CancelledError" else None
    if error is None:
        made = getattr(ray.exceptions, kind)
        error = made("gone") if kind == "RaySystemError" else made()
    with pytest.raises(EngineDiedError):
        read(b"a", error=error, ends=False)


def test_what_had_come_to_its_end_has_ended_whatever_becomes_of_the_call():
    assert read(b"a", error=ray.exceptions.ActorDiedError()) == [b"a"]


def test_what_a_replica_raises_is_told_as_it_is():
    with pytest.raises(UnknownTurnError):
        read(error=UnknownTurnError("0" * 32), ends=False)


def test_a_stream_that_the_replica_lost_is_lost_with_its_turns(monkeypatch, caplog):
    heard(monkeypatch)
    with pytest.raises(EngineDiedError) as raised:
        read(b"a", error=FrontLostError("no way"), ends=False)
    assert "no way" in caplog.text and isinstance(raised.value.__cause__, FrontLostError)


def test_a_call_that_returns_before_its_stream_has_ended_is_waited_for_only_so_long(monkeypatch):
    from pensieve_jax.server.replicas import ray_replicas

    monkeypatch.setattr(ray_replicas, "ANSWER_S", 0.01)
    with pytest.raises(EngineDiedError):
        read(b"a", ends=False)


def test_no_replica_at_all_is_a_closed_engine():
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    with pytest.raises(EngineClosedError):
        read(error=DeploymentUnavailableError(DeploymentID("EngineReplica", "pensieve")), ends=False)


def test_what_nobody_expected_is_logged_and_leaves_no_reader_waiting(monkeypatch, caplog):
    heard(monkeypatch)
    with pytest.raises(EngineDiedError):
        read(error=ZeroDivisionError("a bug"), ends=False)
    assert "a bug" in caplog.text


def test_what_is_left_unread_when_it_is_cancelled_is_not_read():
    from pensieve_jax.server.replicas.ray_replicas import RayReplicaStream

    async def work():
        inbox = ReportListener().open()
        inbox.add(b"a")
        lines = RayReplicaStream(Call(), inbox)
        lines.cancel()
        return [line async for line in lines]

    assert asyncio.run(work()) == []


def test_a_turn_is_asked_for_by_its_key_with_where_its_messages_are_to_go():
    from pensieve_jax.server.replicas.ray_replicas import RayReplicas

    class Handle:
        def __init__(self, asked, **options) -> None:
            self._asked, self._options = asked, options

        def options(self, **more):
            return Handle(self._asked, **self._options, **more)

        def remote(self, *arguments):
            self._asked.append((self._options, arguments))
            return Call()

    async def work():
        asked, listener = [], ReportListener()
        replicas = RayReplicas(Handle(asked), listener, "the front")
        lines = [replicas.run(key, b"turns") for key in ("one", "other")]
        inboxes = [listener._inboxes[number] for number in (1, 2)]
        inboxes[1].add(b"second")
        assert await anext(lines[1]) == b"second"
        for one in lines:
            one.cancel()
        await asyncio.gather(*(one._waiting for one in lines))
        return asked

    assert asyncio.run(work()) == [
        ({"method_name": "run", "session_id": key}, (b"turns", "the front", number))
        for number, key in ((1, "one"), (2, "other"))
    ]


def heard(monkeypatch):
    """What is logged, which the package keeps to itself."""
    for name in ("pensieve_jax", "pensieve_jax.server"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)


@pytest.mark.parametrize("how", ["left", "cancelled", "lost"])
def test_a_reader_that_leaves_cancels_the_call(how):
    from pensieve_jax.server.replicas.ray_replicas import RayReplicaStream

    async def leave():
        call, inbox = Call(), ReportListener().open()
        lines = RayReplicaStream(call, inbox)
        reading = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        if how == "left":
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        elif how == "lost":
            inbox.fail(EngineDiedError("the connection"))
            with pytest.raises(EngineDiedError):
                await reading
        else:
            lines.cancel()
            with pytest.raises(StopAsyncIteration):
                await reading
        return call.is_cancelled

    assert asyncio.run(leave())
