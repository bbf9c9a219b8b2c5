"""How fast pieces of replies go out where Serve's proxy stands before the application.

Owns: the pace of all streams together.
Does not know: Ray, or what a piece says.

A proxy takes some half a millisecond of a processor for each piece, and refuses none that comes
too soon: it lies in a queue that grows. So whoever writes waits for its turn, and a stream whose writer waits
makes one piece of all that comes meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PIECES_PER_S: Final = 1000.0


class Paced:
    """An application that all together sends so many pieces of bodies a second at most."""

    def __init__(self, app: ASGIApp, pieces_per_s: float = PIECES_PER_S) -> None:
        """Around the application; nothing has been sent yet."""
        self._app = app
        self._period_s = 1 / pieces_per_s
        self._next_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
