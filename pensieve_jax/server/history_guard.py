"""An engine behind a check of its history: a damaged one takes no more turns and no changes.

Owns: when a history counts as damaged, and what is refused then. Changes wait in a queue (`change_queue`).
Does not know: HTTP, or how damage is found; the history's reader and its writer find it when they use it.

Damage stays until a restart, which reads the whole file and moves it aside. Turns that are not stored go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pensieve_jax.core.errors import HistoryCorruptError
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.server.async_engine import AsyncTurn, EngineInfo, EngineService, EngineState
from pensieve_jax.server.change_queue import ChangeQueue


class HistoryGuard:
    """An `EngineService` that refuses what needs a damaged history."""

    def __init__(self, engine: EngineService, reader: HistoryReader) -> None:
        """Guard `engine`, whose history `reader` reads."""
        self._engine = engine
        self._reader = reader
        self._changes = ChangeQueue(engine)

    @property
    def is_damaged(self) -> bool:
        """Whether the reader or the engine has found damage since it started."""
        return self._reader.is_damaged or bool(self.last_stats.get("history_is_damaged"))

    def check(self) -> None:
        """Raise HistoryCorruptError for a damaged history."""
        if self.is_damaged:
            raise HistoryCorruptError("The history was damaged while the server ran; see the log.")

    def submit(self, spec: TurnSpec) -> AsyncTurn:
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[AsyncTurn]:
        """See `EngineService`; raise HistoryCorruptError for stored turns of a damaged history."""
        if any(spec.is_durable for spec in specs):
            self.check()
        return self._engine.submit_all(specs)

    async def apply(self, change: HistoryChange) -> None:
        """See `EngineService`; raise HistoryCorruptError for a damaged history."""
        self.check()
        await self._changes.apply(change)

    # The engine's own

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def epoch(self) -> int:
        return self._engine.epoch

    @property
    def last_heard_s(self) -> float:
        return self._engine.last_heard_s

    @property
    def last_stats(self) -> Mapping[str, Any]:
        return self._engine.last_stats

    async def call(self, name: str, *arguments: Any) -> Any:
        return await self._engine.call(name, *arguments)

    async def drain(self, deadline_s: float) -> None:
        await self._engine.drain(deadline_s)
