"""What a handler answers with, and how that is written to a client.

Owns: whole answers: JSON and plain text.
Does not know: what is in them; streams of events, which `sse` writes.
Called by: handlers, which return one; the application, which sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.types import Receive, Send

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
    """An answer of bytes that are there already."""

    body: bytes
    content_type: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    async def send(self, receive: Receive, send: Send) -> None:
        """Write it in one piece."""
        headers = [
            (b"content-type", self.content_type.encode("latin-1")),
            (b"content-length", str(len(self.body)).encode()),
            *(
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in self.headers.items()
            ),
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Bytes:
    """A JSON answer."""
    return Bytes(encode_json(value), "application/json", status, headers or {})


def error_reply(error: ApiError) -> Bytes:
    """The answer that says what is wrong."""
    return json_reply(error.body, error.status, error.headers)
