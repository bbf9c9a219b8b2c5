"""What has expired goes, while a server runs.

Owns: when the history is told to forget what has expired, and how much at a time.
Does not know: what expires, which is written with it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.history.server_tables.changes import Expire
from pensieve_jax.server.http.services import Services

_PERIOD_S: Final = 600.0


async def expire_now_and_then(services: Services) -> None:
    """Have the history forget what has expired, until this is cancelled."""
    while True:
        if services.engine.state == "ready":
            now_s = services.now_s()
            with suppress(PensieveError):  # the next time
                await services.engine.apply(Expire(now_s=now_s))
                while await services.read(
                    "", services.history.has_expired, now_s
                ):  # a few at a time, with steps in between
                    await services.engine.apply(Expire(now_s=now_s))
        await asyncio.sleep(_PERIOD_S)
