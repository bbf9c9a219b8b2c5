"""Replicas in this process that a test kills, over engines whose replies the test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from pensieve_jax.balance.ring import hash_of
from pensieve_jax.core.errors import EngineDiedError
from pensieve_jax.core.outputs import Output
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.turn_node import TurnNode, new_turn_id
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.server.engine_process.messages import Call
from pensieve_jax.server.replicas.links import REPORT, decoded_answer, decoded_replica_report, encoded
from pensieve_jax.server.replicas.placement import RootPlacer
from pensieve_jax.server.replicas.replica import Replica
from pensieve_jax.server.replicas.routed_engine import RoutedEngine
from tests.server.fakes import FakeEngine, FakeTurn


class FakeLines:
    """Result stream of one submission; the replica may die during it."""

    def __init__(self, replica: Replica, submission: bytes) -> None:
        self.is_cancelled = False
        self._lines: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._read(replica, submission))

    async def _read(self, replica: Replica, submission: bytes) -> None:
        lines = replica.run(submission)
        try:
            async for line in lines:
                self._lines.put_nowait(line)
        finally:
            await lines.aclose()
            self._lines.put_nowait(None)

    def die(self) -> None:
        self._lines.put_nowait(EngineDiedError("killed"))

    def cancel(self) -> None:
        self.is_cancelled = True
        self._task.cancel()

    def __aiter__(self) -> FakeLines:
        return self

    async def __anext__(self) -> bytes:
        line = await self._lines.get()
        if line is None:
            raise StopAsyncIteration
        if isinstance(line, BaseException):
            raise line
        return line


class FakeReplicas:
    """A set of replicas: the first living one owns every key, unless `place` names another.

    Attributes:
        engines: by name; keys: which key was requested where, in order.
    """

    def __init__(
        self, num: int = 2, script: Callable[[FakeTurn], None] | None = None, *, batch_s: float = 0.0
    ) -> None:
        self.engines = {f"r{number}": FakeEngine(script or _nothing) for number in range(num)}
        self.place: dict[str, str] = {}
        self.keys: list[tuple[str, str]] = []
        self.lines: list[FakeLines] = []
        self._replicas = {
            name: Replica(cast(Any, engine), name, batch_s=batch_s) for name, engine in self.engines.items()
        }
        self._open: dict[str, list[FakeLines]] = {name: [] for name in self.engines}

    def kill(self, name: str) -> None:
        """Stop the replica and drop its state."""
        del self._replicas[name]
        for lines in self._open.pop(name):
            lines.die()

    def run(self, key: str, submission: bytes) -> FakeLines:
        name = self._chosen(key)
        lines = FakeLines(self._replicas[name], submission)
        self.lines.append(lines)
        self._open[name].append(lines)
        return lines

    async def ask(self, key: str, question: bytes) -> bytes:
        return await self._replicas[self._chosen(key)].ask(question)

    async def ask_all(self, question: bytes) -> list[bytes]:
        return [await replica.ask(question) for replica in list(self._replicas.values())]

    def _chosen(self, key: str) -> str:
        if not self._replicas:
            raise EngineDiedError("none is left")
        wanted = self.place.get(key)
        name = wanted if wanted in self._replicas else next(iter(self._replicas))
        self.keys.append((key, name))
        return name


def _nothing(turn: FakeTurn) -> None:
    """Do nothing: the test writes the reply."""


async def nothing_kept(spec: TurnSpec) -> Output | None:
    return None


async def routed(
    replicas: FakeReplicas, kept: Any = nothing_kept, names: RootPlacer | None = None, **options: Any
) -> RoutedEngine:
    """Yield a front end's engine over replicas, built as a front end builds it."""
    answer = decoded_answer(await replicas.ask("", encoded(Call(0, REPORT, []))))
    names = names or RootPlacer(hash_of)
    engine = RoutedEngine(replicas, decoded_replica_report(answer.value), kept, names, **options)
    await engine.refresh()
    replicas.keys.clear()
    return engine


def spec_of(
    turn_id: str | None = None, *, durable: bool = True, parent_id: str | None = None, **params: Any
) -> TurnSpec:
    node = TurnNode(turn_id=turn_id or new_turn_id(parent_id), parent_id=parent_id, durable=durable)
    return TurnSpec([1, 2, 3], SamplingParams(max_tokens=64, **params), node=node)
