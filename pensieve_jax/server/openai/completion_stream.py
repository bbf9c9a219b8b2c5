"""The response to a completion, whole or in chunks, from its running turns.

Owns: the steps that Chat Completions and Completions share once their turns run, and the frame of chunks.
Does not know: the fields of a choice; each API writes its own. Called by the handlers of both.

Each chunk is a few bytes of text in a frame that is the same for the whole stream. The frame is encoded once,
which avoids encoding an object for every chunk.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Output
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.http.errors import ApiError, as_api_error, renamed_fields
from pensieve_jax.server.http.replies import (
    DONE,
    Events,
    HttpResponse,
    encode_json,
    event,
    json_reply,
    long_json_reply,
)
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.turns.run import ReplyTurns, merged, takes_long
from pensieve_jax.server.turns.sampling import SamplingFields
from pensieve_jax.server.workers import run_cpu


class WireFormat(Protocol):
    """The response format of one API for the turns of a request; choices of chunks are encoded JSON."""

    @property
    def fields(self) -> Mapping[str, str]:
        """This API's names of fields by the engine's names; see `renamed_fields`."""
        ...

    async def record_usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Record that all turns have succeeded, and return the usage object. Called once."""
        ...

    def response(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Return the whole response without usage."""
        ...

    def head(self) -> dict[str, Any]:
        """Return the fields of every chunk except choices and usage; at least one."""
        ...

    def first_choices(self) -> Iterable[bytes]:
        """Return the choices to send before any text."""
        ...

    def choices(self, index: int, delta: AsyncDelta) -> Iterable[bytes]:
        """Return the choices for a delta of a turn, each for a chunk of its own."""
        ...

    def last_choices(self, index: int, output: Output) -> Iterable[bytes]:
        """Return the choices for the end of a turn; the last one has its finish reason."""
        ...


async def reply_in(
    wire_format: WireFormat, call: HttpRequest, body: SamplingFields, running: ReplyTurns
) -> HttpResponse:
    """Return the response to a request whose turns run, and close them after it; raise their failure."""
    if body.stream:
        settings = call.services.settings
        return Events(
            _chunks(wire_format, running, includes_usage=body.includes_usage),
            heartbeat_s=settings.heartbeat_s,
            on_end=running.close,
            on_tick=running.charge_unread,
        )
    try:
        with renamed_fields(wire_format.fields):
            outputs = await call.unless_gone(running.results())
        usage = await wire_format.record_usage(outputs)
        if not takes_long(outputs):
            return json_reply({**wire_format.response(outputs), "usage": usage})
        return await run_cpu(call.owner, True, _long_reply, wire_format, outputs, usage)
    finally:
        await running.close()


def _long_reply(wire_format: WireFormat, outputs: Sequence[Output], usage: dict[str, Any]) -> HttpResponse:
    return long_json_reply({**wire_format.response(outputs), "usage": usage})


async def _chunks(
    wire_format: WireFormat, running: ReplyTurns, *, includes_usage: bool
) -> AsyncGenerator[bytes]:
    """Yield the chunks; a failure becomes an error event in the stream."""
    head = encode_json(wire_format.head())[:-1]
    before, after = head + b',"choices":[', b'],"usage":null}' if includes_usage else b"]}"
    for first in wire_format.first_choices():
        yield event(before + first + after)
    try:
        async with aclosing(merged(running.turns)) as deltas:
            async for index, delta in deltas:
                if delta is None:
                    output = running.turns[index].output
                    assert output is not None
                    choices = wire_format.last_choices(index, output)
                else:
                    choices = wire_format.choices(index, delta)
                chunks = b"".join([event(before + choice + after) for choice in choices])
                if chunks:
                    yield chunks
    except (ApiError, PensieveError) as error:
        yield event(encode_json(as_api_error(error, wire_format.fields).body))
    else:
        usage = await wire_format.record_usage(
            [output for turn in running.turns if (output := turn.output) is not None]
        )
        if includes_usage:
            yield event(before + b'],"usage":' + encode_json(usage) + b"}")
    yield DONE
