"""An engine that hangs, beside a process that does not.

Owns: when silence is a death, which the engine is given then.
Does not know: Ray, or how an engine is started again.

Whoever waits for such an engine waits without a limit, for a turn's end as for its start: its death ends all
of that. An engine that is being started is not watched. A front of replicas cannot tell: it hears from the
actor, and of the engine what that said last.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from pensieve_jax.server.async_engine import EngineState

_log = logging.getLogger(__name__)

# An engine says something every second, or after a step that takes longer; its history is part of a step.
# This is above Postgres' statement_timeout of 60 s: what holds up one statement holds up every replica's
# engine, and one that only waits must not be killed, least of all with all others.
SILENCE_S: Final = 90.0
"""Of a replica, whose turns others take."""
ALONE_SILENCE_S: Final = 600.0
"""Of an engine that nobody else stands in for: on a few processors a step may take minutes."""
LOOK_S: Final = 2.0
"""Between two looks of `watch`."""


class RestartableEngine(Protocol):
    """An engine that is started again when it dies; see `SupervisedEngine`."""

    @property
    def state(self) -> EngineState:
        """What it can be asked for."""
        ...

    @property
    def last_heard_s(self) -> float:
        """Seconds since it said anything."""
        ...

    def kill_life(self) -> None:
        """Kill the engine's process at once."""
        ...


class Watchdog:
    """Kills an engine that says nothing."""

    def __init__(self, engine: RestartableEngine, silence_s: float) -> None:
        """Nothing is known yet; `silence_s` is death."""
        self._engine, self._silence_s = engine, silence_s
        self._was_silent = False

    def look(self) -> None:
        """Kill it where it was silent at the look before, too.

        Whoever stood still itself finds an old word at first, and at its next look what came meanwhile.
        """
        engine = self._engine
        is_silent = engine.state == "ready" and engine.last_heard_s > self._silence_s
        if is_silent and self._was_silent:
            _log.error("The engine has said nothing for %.0f s, and is killed.", engine.last_heard_s)
            engine.kill_life()
            is_silent = False
        self._was_silent = is_silent


async def watch(engine: RestartableEngine) -> None:
    """Look at an engine that is alone again and again, until this is cancelled."""
    watchdog = Watchdog(engine, ALONE_SILENCE_S)
    while True:
        watchdog.look()
        await asyncio.sleep(LOOK_S)
