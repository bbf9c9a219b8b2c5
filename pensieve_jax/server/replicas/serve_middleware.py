"""What stands around the application where Serve's proxy stands before it.

Owns: the pace of all streams together, and which of the two ids of a request counts: the proxy's, which is
the client's own where it sent one.
Does not know: Ray, or what a piece says.

A proxy takes some half a millisecond of a processor for each piece, and refuses none that comes
too soon: it lies in a queue that grows. So a writer waits for its turn, and a stream whose writer waits makes
one piece of all that comes meanwhile.

The proxy writes its id into each request that has none, and into every answer, whatever the application puts
there. So the application logs by that id, and leaves the header of answers to the proxy.
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
    """An application that all together sends so many pieces of bodies a second at most."""

    def __init__(self, app: ASGIApp, pieces_per_s: float = PIECES_PER_S) -> None:
        """Around the application; nothing has been sent yet."""
        self._app = app
        self._period_s = 1 / pieces_per_s
        self._next_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the ASGI application; each piece of a body but the last waits for its turn."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def in_turn(message: Message) -> None:
            if message.get("more_body"):  # who waits for a whole answer does not wait here
                await self._turn()
            await send(message)

        await self._app(scope, receive, in_turn)

    async def _turn(self) -> None:
        """Wait for a place behind all that were given out."""
        now_s = asyncio.get_running_loop().time()
        place_s = max(now_s, self._next_s)
        self._next_s = place_s + self._period_s
        if place_s > now_s:
            await asyncio.sleep(place_s - now_s)


class ProxyRequestIdMiddleware:
    """An application whose requests have the ids that a proxy gives them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the ASGI application with the proxy's request id, and drop that header from its answer."""
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
    """As the application takes it: what a log should not hold is replaced, so that it is still recognised."""
    return _UNFIT.sub(b"_", request_id)[:MAX_REQUEST_ID_LENGTH]
