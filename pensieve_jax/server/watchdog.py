"""Kills an engine that hangs while its process stays alive.

Owns: the silence limits after which an engine counts as hanging, and the decision to kill it.
Does not know: Ray, or how an engine is restarted.

Callers wait for a hanging engine without a limit; killing it ends all their waits. An engine that is starting
is not watched. The front end of replicas cannot detect a hang: it gets answers from the replica's actor, with
the engine's latest values.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from pensieve_jax.server.async_engine import EngineState

_log = logging.getLogger(__name__)

# An engine sends a message every second, or after a step that takes longer. A step includes history writes.
# The limit is above Postgres' statement_timeout of 60 s: one slow statement can block every replica's engine,
# and an engine that only waits for the database must not be killed, least of all with all others.
SILENCE_S: Final = 90.0
"""Limit for the engine of a replica, whose turns other replicas can run."""
ALONE_SILENCE_S: Final = 600.0
"""Limit for a single engine without a substitute; on few CPU cores a step may take minutes."""
POLL_S: Final = 2.0
"""Interval between two checks of `watch`."""


class RestartableEngine(Protocol):
    """Engine that is restarted when it dies; see `SupervisedEngine`."""

    @property
    def state(self) -> EngineState:
        """State of the engine. Only "ready" is watched."""
        ...

    @property
    def last_heard_s(self) -> float:
        """Seconds since the engine's last message."""
        ...

    def kill_process(self) -> None:
        """Kill the engine's process at once."""
        ...


class Watchdog:
    """Watchdog that kills a silent engine."""

    def __init__(self, engine: RestartableEngine, silence_s: float) -> None:
        """Watch `engine`, which counts as hanging after `silence_s` seconds of silence."""
        self._engine, self._silence_s = engine, silence_s
        self._was_silent = False

    def look(self) -> None:
        """Kill the engine if it is silent at two consecutive checks.

        One check is not enough: if this process was paused itself, its first check sees an old timestamp, and
        only the second check sees the messages that arrived meanwhile.
        """
        engine = self._engine
        is_silent = engine.state == "ready" and engine.last_heard_s > self._silence_s
        if is_silent and self._was_silent:
            _log.error("The engine has been silent for %.0f s and is killed.", engine.last_heard_s)
            engine.kill_process()
            is_silent = False
        self._was_silent = is_silent


async def watch(engine: RestartableEngine) -> None:
    """Check a single engine every `POLL_S` seconds until this coroutine is cancelled."""
    watchdog = Watchdog(engine, ALONE_SILENCE_S)
    while True:
        watchdog.look()
        await asyncio.sleep(POLL_S)
