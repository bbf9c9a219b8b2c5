"""What Ray says of a stream, as turns understand it."""

from __future__ import annotations

import asyncio

import pytest

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, UnknownTurnError

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Ray imports


class Stream:
    """Gives these, and raises those that are errors."""

    def __init__(self, *lines) -> None:
        self._lines = list(lines)
        self.is_cancelled = False

    async def __anext__(self):
        if not self._lines:
            raise StopAsyncIteration
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    def cancel(self) -> None:
        self.is_cancelled = True


def read(stream):
    from pensieve_jax.server.replicas.serve_app import RayLines

    async def all_of_it():
        return [line async for line in RayLines(stream)]

    return asyncio.run(all_of_it())


def test_lines_come_as_they_are():
    assert read(Stream(b"a", b"b")) == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["ActorDiedError", "RaySystemError", "TaskCancelledError", "CancelledError"])
def test_whatever_ends_a_stream_but_its_reader_is_a_replica_that_is_gone(kind):
    error = asyncio.CancelledError() if kind == "CancelledError" else None
    if error is None:
        made = getattr(ray.exceptions, kind)
        error = made("gone") if kind == "RaySystemError" else made()
    with pytest.raises(EngineDiedError):
        read(Stream(b"a", error))


def test_what_a_replica_raises_is_told_as_it_is():
    with pytest.raises(UnknownTurnError):
        read(Stream(UnknownTurnError("0" * 32)))


def test_no_replica_at_all_is_a_closed_engine():
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    with pytest.raises(EngineClosedError):
        read(Stream(DeploymentUnavailableError(DeploymentID("EngineReplica", "pensieve"))))


def test_a_reader_that_is_cancelled_cancels_the_stream():
    from pensieve_jax.server.replicas.serve_app import RayLines

    class Waiting(Stream):
        async def __anext__(self):
            await asyncio.Event().wait()

    async def leave():
        stream = Waiting()
        reading = asyncio.ensure_future(anext(RayLines(stream)))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        return stream.is_cancelled

    assert asyncio.run(leave())
