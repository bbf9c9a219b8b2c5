"""Middleware for an application behind Serve's proxy.

Owns: the rate limit of all streams together, and the choice of the request id, which is the proxy's. The
proxy takes the client's own id if the client sent one.
Does not know: Ray, or the content of body chunks.

A proxy needs about half a millisecond of CPU time per body chunk. It accepts chunks at any rate and queues
them without a limit. Therefore each chunk waits for its turn here, and a waiting stream merges its new output
into one chunk.

The proxy writes its id into each request without one, and into every response, where it replaces the
application's header. Therefore the application logs the proxy's id and omits the response header.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pensieve_jax.server.http.middleware import MAX_REQUEST_ID_LENGTH, REQUEST_ID_CHARACTERS

PIECES_PER_S: Final = 1000.0
_NAME: Final = b"x-request-id"
_UNFIT: Final = re.compile(f"[^{REQUEST_ID_CHARACTERS}]".encode())


class ChunkRateLimiter:
    """Middleware that limits the body chunks per second of all responses together."""

    def __init__(self, app: ASGIApp, pieces_per_s: float = PIECES_PER_S) -> None:
        """Wrap `app` with a limit of `pieces_per_s` chunks per second."""
        self._app = app
        self._period_s = 1 / pieces_per_s
        self._next_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the ASGI application; each body chunk except the last waits for its turn."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def in_turn(message: Message) -> None:
            if message.get("more_body"):  # a response of one chunk does not wait
                await self._turn()
            await send(message)

        await self._app(scope, receive, in_turn)

    async def _turn(self) -> None:
        """Reserve the next send time and wait until then."""
        now_s = asyncio.get_running_loop().time()
        place_s = max(now_s, self._next_s)
        self._next_s = place_s + self._period_s
        if place_s > now_s:
            await asyncio.sleep(place_s - now_s)


class ProxyRequestIdMiddleware:
    """Middleware that makes the application use the request ids of Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the ASGI application with the proxy's request id, and remove that header from its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != _NAME]
                message = {**message, "headers": headers}
            await send(message)

        headers = [(name, _fit(value) if name == _NAME else value) for name, value in scope["headers"]]
        await self._app({**scope, "headers": headers}, receive, without_id)


def _fit(request_id: bytes) -> bytes:
    """Replace the characters that the application does not accept in an id, and truncate it.

    The id stays recognizable in the log.
    """
    return _UNFIT.sub(b"_", request_id)[:MAX_REQUEST_ID_LENGTH]
