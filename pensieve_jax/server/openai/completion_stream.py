"""From the turns of a completion to its answer, whole or in chunks.

Owns: what Chat Completions and Completions have in common once their turns run, and the form of chunks.
Does not know: what a choice is made of; each API writes its own.

A delta is a few bytes of text in a frame that is the same for all chunks of a stream, so the frame is encoded
once, and no encoder goes its way through objects.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import FinishReason, Output
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.http.errors import ApiError, as_api_error, renamed_fields
from pensieve_jax.server.http.replies import DONE, Events, HttpResponse, encode_json, event, json_reply
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.turns.run import RunningTurns, merged
from pensieve_jax.server.turns.sampling import SamplingFields


class WireFormat(Protocol):
    """How one of the APIs says what came of a request's turns; choices of chunks are JSON already."""

    @property
    def fields(self) -> Mapping[str, str]:
        """What the engine calls fields of this API: `renamed_fields`."""
        ...

    def settled(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """All turns have ended well; called once, returns the usage object."""
        ...

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The answer, but for its usage."""
        ...

    def head(self) -> dict[str, Any]:
        """The fields of every chunk beside its choices and its usage, at least one."""
        ...

    def first_choices(self) -> Iterable[bytes]:
        """Those of chunks before any text."""
        ...

    def choice(self, index: int, delta: AsyncDelta) -> bytes | None:
        """What came of a turn; None for what is not worth a chunk."""
        ...

    def last_choice(self, index: int, reason: FinishReason) -> bytes:
        """A turn has ended."""
        ...


async def reply_in(
    words: WireFormat, call: HttpRequest, body: SamplingFields, running: RunningTurns
) -> HttpResponse:
    """The answer to a request whose turns run; they are closed with it. Raises what they failed with."""
    if body.stream:
        settings = call.services.settings
        return Events(
            _chunks(words, running, includes_usage=body.includes_usage),
            heartbeat_s=settings.heartbeat_s,
            stall_timeout_s=settings.stall_timeout_s,
            on_end=running.close,
        )
    try:
        with renamed_fields(words.fields):
            outputs = await call.unless_gone(running.results())
        usage = words.settled(outputs)
        return json_reply({**words.whole(outputs), "usage": usage})
    finally:
        await running.close()


async def _chunks(words: WireFormat, running: RunningTurns, *, includes_usage: bool) -> AsyncGenerator[bytes]:
    """What fails in between is told in the stream."""
    head = encode_json(words.head())[:-1]
    before, after = head + b',"choices":[', b'],"usage":null}' if includes_usage else b"]}"
    for first in words.first_choices():
        yield event(before + first + after)
    try:
        async with aclosing(merged(running.turns)) as deltas:
            async for index, delta in deltas:
                if delta is None:
                    output = running.turns[index].output
                    assert output is not None
                    yield event(before + words.last_choice(index, output.finish_reason) + after)
                elif (choice := words.choice(index, delta)) is not None:
                    yield event(before + choice + after)
    except (ApiError, PensieveError) as error:
        yield event(encode_json(as_api_error(error, words.fields).body))
    else:
        usage = words.settled([output for turn in running.turns if (output := turn.output) is not None])
        if includes_usage:
            yield event(before + b'],"usage":' + encode_json(usage) + b"}")
    yield DONE
