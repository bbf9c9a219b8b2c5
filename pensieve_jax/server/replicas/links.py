"""The replicas as a front reaches them, and what the two say to each other.

Owns: the protocol, the messages beside those of an engine's process, and their bytes.
Does not know: Ray, or which replica a key belongs to.
Implemented over handles of Ray Serve, and by fakes in
tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import msgspec

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.server.async_engine import EngineInfo, EngineState
from pensieve_jax.server.engine_process.messages import Answer, Apply, Call, Report, Submit


class ReplicaStream(Protocol):
    """What comes of one submission, message by message; see `Replicas.run`."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes:
        """The next message; raises EngineDiedError where the replica was lost."""
        ...

    def cancel(self) -> None:
        """Have the replica end the turns as if they had never been sent; nothing comes any more."""
        ...


class Replicas(Protocol):
    """All replicas. Every method raises EngineDiedError where the replica that it reached was lost."""

    def run(self, key: str, submission: bytes) -> ReplicaStream:
        """Run turns on the replica of a key; what comes are `Report`s."""
        ...

    async def ask(self, key: str, question: bytes) -> bytes:
        """The `Answer` of the replica of a key to a `Call` or an `Apply`."""
        ...

    async def ask_all(self, question: bytes) -> list[bytes]:
        """The `Answer`s of all replicas; those that were lost meanwhile, or hang, give none."""
        ...


class ReplicaReport(msgspec.Struct, array_like=True):
    """What a replica tells of itself, asked with the call `REPORT`.

    Attributes:
      replica: its name.
      state, last_heard_s, stats: of its engine.
      info: of its engine; None before that was ready once.
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
    """What came from a replica, or to one, is no message of this release: all must run the same."""


def encoded(message: Any) -> bytes:
    """As it crosses; raises UnreadableMessageError for what cannot."""
    try:
        return _encoder.encode(message)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise UnreadableMessageError(f"A value of this kind cannot cross to a replica: {error}.") from error


def decoded_submission(data: bytes) -> Submit:
    """What `run` was given; raises UnreadableMessageError, as the others do."""
    return _decoded(_submission, data)


def decoded_question(data: bytes) -> Call | Apply:
    """What `ask` was given."""
    return _decoded(_question, data)


def decoded_report(data: bytes) -> Report:
    """Decode a message of `Replicas.run`; raise UnreadableMessageError if it is not a `Report`."""
    return _decoded(_report, data)


def decoded_answer(data: bytes) -> Answer:
    """Decode a result of `Replicas.ask`; raise UnreadableMessageError if it is not an `Answer`."""
    return _decoded(_answer, data)


def decoded_replica_report(value: Any) -> ReplicaReport:
    """The value of an answer to `REPORT`."""
    try:
        return msgspec.convert(value, ReplicaReport)
    except msgspec.ValidationError as error:
        raise UnreadableMessageError(f"A replica says what this front cannot read: {error}.") from error


def _decoded(decoder: Any, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise UnreadableMessageError(f"A message between a front and a replica is none: {error}.") from error
