"""The interface of a front end to its replicas, and their messages.

Owns: the protocol, the messages in addition to those of an engine's process, and their encoding.
Does not know: Ray, or which replica a key belongs to.
`RayReplicas` implements the protocol over Ray Serve handles; tests implement it with fakes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import msgspec

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.server.async_engine import EngineInfo, EngineState
from pensieve_jax.server.engine_process.messages import Answer, Apply, Call, Report, Submit


class ReplicaStream(Protocol):
    """Stream of the reports of one submission; see `Replicas.run`."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes:
        """Return the next message; raises EngineDiedError if the replica was lost."""
        ...

    def cancel(self) -> None:
        """Cancel the turns on the replica as if they had never been submitted, and end the stream."""
        ...


class Replicas(Protocol):
    """Interface to all replicas. Every method raises EngineDiedError if the replica it reached was lost."""

    def run(self, key: str, submission: bytes) -> ReplicaStream:
        """Run turns on the replica of a key; the stream yields encoded `Report` messages."""
        ...

    async def ask(self, key: str, question: bytes) -> bytes:
        """Send a `Call` or an `Apply` to the replica of a key, and return its encoded `Answer`."""
        ...

    async def ask_all(self, question: bytes) -> list[bytes]:
        """Return the encoded `Answer`s of all replicas, except those that are lost or hang."""
        ...


class ReplicaReport(msgspec.Struct, array_like=True):
    """Status of a replica, its result of the call `REPORT`.

    Attributes:
      replica: the name of the replica.
      state, last_heard_s, stats: the values of its engine.
      info: the description of its engine; None until the engine is ready for the first time.
    """

    replica: str
    state: EngineState
    last_heard_s: float
    stats: dict[str, Any]
    info: EngineInfo | None = None


REPORT: Final = "replica_report"
_encoder = msgspec.msgpack.Encoder()
_submission = msgspec.msgpack.Decoder(Submit)
_question: Any = msgspec.msgpack.Decoder(Call | Apply)
_report = msgspec.msgpack.Decoder(Report)
_answer = msgspec.msgpack.Decoder(Answer)


class UnreadableMessageError(PensieveError):
    """A message between front end and replica is invalid. All processes must run the same release."""


def encoded(message: Any) -> bytes:
    """Encode a message; raises UnreadableMessageError for values that cannot be sent."""
    try:
        return _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise UnreadableMessageError(f"A value of this kind cannot be sent to a replica: {error}.") from error


def decoded_submission(data: bytes) -> Submit:
    """Decode the argument of `Replicas.run`; raise UnreadableMessageError if it is not a `Submit`."""
    return _decoded(_submission, data)


def decoded_question(data: bytes) -> Call | Apply:
    """Decode the argument of `Replicas.ask`; raise UnreadableMessageError for any other message."""
    return _decoded(_question, data)


def decoded_report(data: bytes) -> Report:
    """Decode a message of `Replicas.run`; raise UnreadableMessageError if it is not a `Report`."""
    return _decoded(_report, data)


def decoded_answer(data: bytes) -> Answer:
    """Decode a result of `Replicas.ask`; raise UnreadableMessageError if it is not an `Answer`."""
    return _decoded(_answer, data)


def decoded_replica_report(value: Any) -> ReplicaReport:
    """Convert the value of an answer to `REPORT`; raise UnreadableMessageError if it has another form."""
    try:
        return msgspec.convert(value, ReplicaReport)
    except msgspec.ValidationError as error:
        raise UnreadableMessageError(f"The status of a replica is invalid: {error}.") from error


def _decoded(decoder: Any, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise UnreadableMessageError(f"A message of a front end or replica is invalid: {error}.") from error
