"""How the outcome of a Ray call and the messages of its stream reach turns. Ray does not run."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, UnknownTurnError
from pensieve_jax.server.replicas.report_stream import FrontLostError, ReportListener

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray's imports


class Call:
    """Fake call that returns or raises once the test allows it."""

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
    """Return all lines of a stream whose call raises `error` after `messages`."""
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


def test_lines_arrive_unchanged():
    assert read(b"a", b"b") == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["ActorDiedError", "RaySystemError", "TaskCancelledError", "CancelledError"])
def test_a_call_that_ends_without_its_reader_is_a_lost_replica(kind):
    error = asyncio.CancelledError() if kind == "CancelledError" else None
    if error is None:
        made = getattr(ray.exceptions, kind)
        error = made("gone") if kind == "RaySystemError" else made()
    with pytest.raises(EngineDiedError):
        read(b"a", error=error, ends=False)


def test_a_stream_that_was_complete_stays_complete_whatever_happens_to_the_call():
    assert read(b"a", error=ray.exceptions.ActorDiedError()) == [b"a"]


def test_an_error_of_a_replica_is_raised_unchanged():
    with pytest.raises(UnknownTurnError):
        read(error=UnknownTurnError("0" * 32), ends=False)


def test_turns_of_a_lost_stream_fail(monkeypatch, caplog):
    heard(monkeypatch)
    with pytest.raises(EngineDiedError) as raised:
        read(b"a", error=FrontLostError("no way"), ends=False)
    assert "no way" in caplog.text and isinstance(raised.value.__cause__, FrontLostError)


def test_waiting_for_the_stream_of_a_returned_call_is_limited(monkeypatch):
    from pensieve_jax.server.replicas import ray_replicas

    monkeypatch.setattr(ray_replicas, "ANSWER_S", 0.01)
    with pytest.raises(EngineDiedError):
        read(b"a", ends=False)


def test_without_any_replica_the_engine_is_closed():
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    with pytest.raises(EngineClosedError):
        read(error=DeploymentUnavailableError(DeploymentID("EngineReplica", "pensieve")), ends=False)


def test_an_unexpected_error_is_logged_and_its_reader_does_not_hang(monkeypatch, caplog):
    heard(monkeypatch)
    with pytest.raises(EngineDiedError):
        read(error=ZeroDivisionError("a bug"), ends=False)
    assert "a bug" in caplog.text


def test_unread_messages_are_dropped_on_cancellation():
    from pensieve_jax.server.replicas.ray_replicas import RayReplicaStream

    async def work():
        inbox = ReportListener().open()
        inbox.add(b"a")
        lines = RayReplicaStream(Call(), inbox)
        lines.cancel()
        return [line async for line in lines]

    assert asyncio.run(work()) == []


def test_a_turn_is_requested_with_its_key_and_the_address_for_its_messages():
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
    """Capture the log: the package does not propagate it."""
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
