"""One id for each request, where Serve's proxy stands before the application and gives ids as well.

Owns: which of the two ids there is then: the proxy's, which is the client's own where it sent one.
Does not know: Ray, or what an id is for.

The proxy writes its id into each request that has none, and into every answer, whatever the application
puts there. So the application logs by that id, and leaves the header of answers to the proxy.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pensieve_jax.server.http.middleware import MAX_REQUEST_ID_LENGTH, REQUEST_ID_CHARACTERS

_NAME: Final = b"x-request-id"
_UNFIT: Final = re.compile(f"[^{REQUEST_ID_CHARACTERS}]".encode())


class ProxysRequestId:
    """An application whose requests have the ids that a proxy gives them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
