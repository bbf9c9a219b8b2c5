"""What a handler answers with, and how that is written to a client.

Owns: whole answers: JSON and plain text.
Does not know: what is in them; streams of events, which `sse` writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Receive, Send

from pensieve_jax.server.http.call import ClientGoneError, until_disconnect
from pensieve_jax.server.http.errors import ApiError

_ENCODER = msgspec.json.Encoder()
encode_json = _ENCODER.encode
"""A value of plain ones, structs and dataclasses as JSON."""


class Reply(Protocol):
    """An answer that can send itself, once."""

    async def send(self, receive: Receive, send: Send) -> None:
        """Write it; `receive` tells when the client leaves."""
        ...


@dataclass(slots=True)
class Bytes:
    """An answer of bytes that are there already.

    Attributes:
      undelivered: called where the client has left before it was written.
    """

    body: bytes
    content_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    undelivered: Callable[[], None] | None = None

    async def send(self, receive: Receive, send: Send) -> None:
        """Write it in one piece; raises ClientGoneError where `undelivered` was called."""
        headers = [
            (b"content-type", self.content_type.encode("latin-1")),
            (b"content-length", str(len(self.body)).encode()),
            *(
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in self.headers.items()
            ),
        ]
        start = {"type": "http.response.start", "status": self.status, "headers": headers}
        if self.undelivered is None:
            await send(start)
            await send({"type": "http.response.body", "body": self.body})
        else:
            await self._send_watched(start, receive, send, self.undelivered)

    async def _send_watched(
        self, start: Message, receive: Receive, send: Send, undelivered: Callable[[], None]
    ) -> None:
        """A server takes whatever is sent to a client that has left, and says so by `receive` alone."""
        watch = asyncio.ensure_future(until_disconnect(receive))
        is_written = False
        try:
            await send(start)
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await asyncio.sleep(0)  # or the watch would not have looked
            is_written = not watch.done()
        finally:
            watch.cancel()
            if not is_written:
                undelivered()
        if not is_written:
            raise ClientGoneError
        await send({"type": "http.response.body", "body": b""})


def json_reply(
    value: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    *,
    undelivered: Callable[[], None] | None = None,
) -> Bytes:
    """A JSON answer; see `Bytes`."""
    return Bytes(encode_json(value), "application/json", status, headers or {}, undelivered)


def error_reply(error: ApiError) -> Bytes:
    """The answer that says what is wrong."""
    return json_reply(error.body, error.status, error.headers)
