"""GET /health, /ready, /version and /metrics: whether a server is well, for those who run it.

Owns: when a server is healthy and when it is ready.
Does not know: what is counted.

Healthy means that starting the server again would help nobody; ready, that turns are taken. While the engine
starts or is started again, a server is healthy and not ready. One whose queue is full stays ready: whoever
takes servers away for that sends their conversations to others, which have no state of them and fill up in
turn, while the turns that are too many are told when to come back.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.server.http.errors import overloaded
from pensieve_jax.server.http.replies import Bytes, Reply, json_reply
from pensieve_jax.server.http.request import Call
from pensieve_jax.server.http.routes import Route
from pensieve_jax.server.metrics import CONTENT_TYPE
from pensieve_jax.version import __version__

MAX_SILENCE_S: Final = 10.0
"""An engine that says nothing for so long does not run; it says something every second."""
_ANSWER_TIMEOUT_S: Final = 2.0


async def health(call: Call) -> Reply:
    """200, or 503 where the engine has ended for good or says nothing."""
    engine = call.services.engine
    if engine.state == "dead":
        raise overloaded("The engine has ended.", 1)
    if engine.state == "ready" and engine.last_heard_s > MAX_SILENCE_S:
        raise overloaded(f"The engine has said nothing for {engine.last_heard_s:.0f} s.", 1)
    return json_reply({"status": "ok", "engine": engine.state})


async def ready(call: Call) -> Reply:
    """200 where the engine takes turns, at once or after a wait, else 503."""
    call.services.limits.check_ready()
    return await health(call)


async def version(call: Call) -> Reply:
    """The package's."""
    return json_reply({"version": __version__})


async def metrics(call: Call) -> Reply:
    """All metrics in Prometheus' format."""
    services = call.services
    report = services.metrics.engine
    report.stats = services.engine.last_stats
    # Only a stuck engine does not answer in time, and then what it said last is still good.
    with suppress(TimeoutError, PensieveError):
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            report.census = await services.engine.call("census")
            report.distributions = await services.engine.call("distributions")
    return Bytes(services.metrics.render(services.limits.num_waiting), CONTENT_TYPE)


ROUTES = [
    Route("GET", "/health", health, needs_key=False),
    Route("GET", "/ready", ready, needs_key=False),
    Route("GET", "/version", version),
    Route("GET", "/metrics", metrics),
]
