"""Reaches the replicas through a Ray Serve handle, whose router sends one key to one replica.

Owns: the calls of the replicas, and the translation of Ray's errors.
Does not know: actors, turns, or the content of messages.
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
_LOST: Final = "The replica died. Committed turns are stored; its other turns are lost."
ANSWER_S: Final = 5.0
"""How long to wait for the answers of all replicas. Engines answer between two steps."""


class RayReplicas:
    """`Replicas` behind a Serve handle, whose router sends one key to one replica."""

    def __init__(self, handle: Any, listener: ReportListener, front: ReplyTo) -> None:
        """Use the Serve handle of the replicas' deployment; the replicas send reports of turns to `front`."""
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
            raise _translate(error) from error
        return answer

    async def ask_all(self, question: bytes) -> list[bytes]:
        """Ask every replica, but skip those that hang. Serve's own result collection would wait for them."""
        asking: list[asyncio.Future[bytes]] = []
        there: list[asyncio.Future[bytes]] = []
        try:
            async with asyncio.timeout(ANSWER_S):
                asked = await self._handle.broadcast("ask", question)._fetch_replica_results_async()
                asking = [asyncio.ensure_future(one.get_async()) for one in asked]
                if asking:
                    await asyncio.wait(asking)
        except DeploymentUnavailableError:  # no replica runs at the moment
            return []
        except _FAILED as error:
            raise EngineDiedError(f"The replicas cannot be asked: {error}") from error
        except TimeoutError as error:
            num_late = sum(not one.done() for one in asking)
            if num_late == len(asking):  # also 0 of 0, if Serve has not even listed the replicas
                raise EngineDiedError(f"No replica has answered for {ANSWER_S:g} s.") from error
            if num_late:
                _log.warning("%d of %d replicas have not answered for %g s", num_late, len(asking), ANSWER_S)
        finally:
            there = [one for one in asking if one.done()]
            for one in asking:
                one.cancel()
        return [one.result() for one in there if not _has_no_answer(one)]


def _translate(error: BaseException) -> PensieveError:
    """Translate an error of Ray or Serve that the replica did not raise itself."""
    if isinstance(error, DeploymentUnavailableError):
        return EngineClosedError("There are no replicas, because they cannot be started; see their logs.")
    return EngineDiedError(_LOST)


def _has_no_answer(asked: asyncio.Future[bytes]) -> bool:
    """Return whether a replica gave no answer, and log the error unless it is the replica's death."""
    error = TaskCancelledError() if asked.cancelled() else asked.exception()
    if error is not None and not isinstance(error, _GONE):
        _log.warning("a replica gave no answer: %r", error)
    return error is not None


class RayReplicaStream:
    """`ReplicaStream` of a Serve call, which returns when its turns end; the reports arrive in an inbox."""

    def __init__(self, call: Any, inbox: Inbox) -> None:
        """Follow a Serve response and the inbox whose number the call got."""
        self._call, self._inbox = call, inbox
        self._has_ended = False
        self._waiting = asyncio.ensure_future(self._wait())
        _waiting.add(self._waiting)
        self._waiting.add_done_callback(_waiting.discard)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            message = await self._inbox.take()
        except (asyncio.CancelledError, PensieveError):
            self.cancel()
            raise
        if message is None:
            self._has_ended = True  # the call returns by itself
            raise StopAsyncIteration
        return message

    def cancel(self) -> None:
        """Cancel the turns on the replica. If Serve's cancellation is lost, the closed inbox cancels them."""
        self._inbox.close()
        if not self._has_ended and not self._waiting.done():
            self._call.cancel()

    # Private methods

    async def _wait(self) -> None:
        """Wait for the call; its error ends the stream, unless the stream has already ended."""
        try:
            await self._call
            async with asyncio.timeout(ANSWER_S):
                await self._inbox.ended()  # the end was sent before the call returned, over the connection
        except (TimeoutError, asyncio.CancelledError, PensieveError, *_FAILED) as error:
            if not self._inbox.has_ended:
                self._fail(error)
        except Exception as error:  # the reader of the stream must not wait for ever
            _log.exception("a call of a replica failed with an unexpected error")
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, PensieveError) and not isinstance(error, FrontLostError):
            translated: PensieveError = error  # raised by the replica and passed on by Ray
        else:
            translated = _translate(error)
            translated.__cause__ = error
        if isinstance(error, FrontLostError):
            _log.warning("a replica could not deliver its reports: %s", error)
        if isinstance(error, TimeoutError):
            _log.warning("a replica's turns have ended, but reports were missing after %g s", ANSWER_S)
            self._inbox.drop_connection()
        self._inbox.fail(translated)


_waiting: set[asyncio.Task[None]] = set()
"""References to running tasks, because event loops hold only weak ones."""


def router_hash(key: str) -> int:
    """Return the position of a key, or of a virtual node of a replica, on the router's hash ring."""
    return int(mmh3.hash64(key.encode(), seed=CONSISTENT_HASH_SEED, signed=False)[0])
