"""Replicas behind a handle of Ray Serve, whose router sends one key to one replica.

Owns: how they are asked, and what Ray's errors are here.
Does not know: actors, turns, or what is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import mmh3
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import (
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from ray.serve.experimental.consistent_hash_router import CONSISTENT_HASH_SEED

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, PensieveError
from pensieve_jax.server.replicas.report_stream import FrontLostError, Inbox, ReplyTo, ReportListener

_log = logging.getLogger(__name__)

_GONE: Final = (RayActorError, ObjectLostError, NodeDiedError, WorkerCrashedError, ReplicaUnavailableError)
_FAILED: Final = (RayError, RayServeException)
_LOST: Final = "The replica died. What it had committed is kept; the rest of its turns is lost."
ANSWER_S: Final = 5.0
"""How long all replicas are waited for that are asked something: engines answer between two steps."""


class RayReplicas:
    """`Replicas` behind a handle of Serve, whose router sends one key to one replica."""

    def __init__(self, handle: Any, listener: ReportListener, front: ReplyTo) -> None:
        """A handle of the deployment of replicas, and where what comes of turns is to go."""
        self._listener, self._front = listener, front
        self._run = handle.options(method_name="run")
        self._ask = handle.options(method_name="ask")
        self._handle = handle

    def run(self, key: str, submission: bytes) -> RayReplicaStream:
        """Run turns on the replica of a key."""
        inbox = self._listener.open()
        call = self._run.options(session_id=key).remote(submission, self._front, inbox.number)
        return RayReplicaStream(call, inbox)

    async def ask(self, key: str, question: bytes) -> bytes:
        """Ask the replica of a key."""
        try:
            answer: bytes = await self._ask.options(session_id=key).remote(question)
        except PensieveError:
            raise
        except _FAILED as error:
            raise _told(error) from error
        return answer

    async def ask_all(self, question: bytes) -> list[bytes]:
        """Ask every replica; one that hangs is not waited for, as Serve's own collecting would."""
        asking: list[asyncio.Future[bytes]] = []
        there: list[asyncio.Future[bytes]] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                asked = await self._handle.broadcast("ask", question)._fetch_replica_results_async()
                asking = [asyncio.ensure_future(one.get_async()) for one in asked]
                if asking:
                    await asyncio.wait(asking)
        except DeploymentUnavailableError:  # there are none at the moment
            return []
        except _FAILED as error:
            raise EngineDiedError(f"The replicas cannot be asked: {error}") from error
        except TimeoutError as error:
            num_late = sum(not one.done() for one in asking)
            if num_late == len(asking):  # none of none, where Serve has not even said which there are
                raise EngineDiedError(f"No replica has answered for {ANSWER_S:g} s.") from error
            if num_late:
                _log.warning("%d of %d replicas have not answered for %g s", num_late, len(asking), ANSWER_S)
        finally:
            there = [one for one in asking if one.done()]
            for one in asking:
                one.cancel()
        return [one.result() for one in there if not _says_why_not(one)]


def _told(error: BaseException) -> PensieveError:
    """What an error that is not a replica's own says of it."""
    if isinstance(error, DeploymentUnavailableError):
        return EngineClosedError("There are no replicas: they cannot be started.")
    return EngineDiedError(_LOST)


def _says_why_not(asked: asyncio.Future[bytes]) -> bool:
    """Whether a replica gave no answer; what is not a replica's death is logged."""
    error = TaskCancelledError() if asked.cancelled() else asked.exception()
    if error is not None and not isinstance(error, _GONE):
        _log.warning("a replica gave no answer: %r", error)
    return error is not None


class RayReplicaStream:
    """`ReplicaStream` of a call of Serve, which ends with its turns; what comes of them comes on a stream."""

    def __init__(self, call: Any, inbox: Inbox) -> None:
        """A response of Serve, and the stream that the call was told of."""
        self._call, self._inbox = call, inbox
        self._has_ended = False
        self._waiting = asyncio.ensure_future(self._wait())
        _waiting.add(self._waiting)
        self._waiting.add_done_callback(_waiting.discard)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            line = await self._inbox.take()
        except (asyncio.CancelledError, PensieveError):
            self.cancel()
            raise
        if line is None:
            self._has_ended = True  # the call returns by itself
            raise StopAsyncIteration
        return line

    def cancel(self) -> None:
        """End the turns on the replica, also where Serve's word does not get there: see `report_stream`."""
        self._inbox.leave()
        if not self._has_ended and not self._waiting.done():
            self._call.cancel()

    # Inside

    async def _wait(self) -> None:
        """For the call: what it raises is how the stream ends, unless that came to its end before."""
        try:
            await self._call
            async with asyncio.timeout(ANSWER_S):
                await self._inbox.ended()  # it was sent before the call returned, by another way
        except (TimeoutError, asyncio.CancelledError, PensieveError, *_FAILED) as error:
            if not self._inbox.has_ended:
                self._fail(error)
        except Exception as error:  # whatever it is, somebody waits for the stream
            _log.exception("a call of a replica failed otherwise than it can")
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, PensieveError) and not isinstance(error, FrontLostError):
            told: PensieveError = error  # of the replica, which Ray passes on
        else:
            told = _told(error)
            told.__cause__ = error
        if isinstance(error, FrontLostError):
            _log.warning("what a replica had to say could not come here: %s", error)
        if isinstance(error, TimeoutError):
            _log.warning("a replica's turns have ended, and %g s later not all had come of them", ANSWER_S)
            self._inbox.drop_connection()
        self._inbox.fail(told)


_waiting: set[asyncio.Task[None]] = set()
"""Event loops do not hold tasks by themselves."""


def router_hash(key: str) -> int:
    """Where a key, or a point of a replica, lies on the router's ring."""
    return int(mmh3.hash64(key.encode(), seed=CONSISTENT_HASH_SEED, signed=False)[0])
