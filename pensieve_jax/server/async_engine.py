"""An engine as an asynchronous program sees it: what a front end may ask of it.

Owns: the protocols and the values that cross.
Does not know: in which process or thread the engine runs, HTTP, or where turns come from.
Implemented over a socket by the client of the
engine's process, and by fakes in tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError
from pensieve_jax.core.outputs import Output, TokenLogprob
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.history.server_tables.changes import HistoryChange

EngineState = Literal["starting", "ready", "draining", "dead"]
UNANSWERED: Final = (EngineClosedError, EngineDiedError)
"""What is raised where nobody knows whether the engine did, or still will do, what it was asked for."""


@dataclass(frozen=True, slots=True)
class AsyncDelta:
    """What came of a reply since the last one: whole characters, the ids sampled, and their logprobs.

    Deltas that nobody took in time are merged into one.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine's process tells of itself once, when it is ready.

    Attributes:
      model_name: as it was given.
      source: the model's directory, or random:<preset>.
      fingerprint: who may read the history.
      history: the path of the history's file.
      description: as `LLM.describe()`.
    """

    model_name: str
    source: str
    fingerprint: str
    history: str
    limits: ModelLimits
    max_num_running: int
    chunk_tokens: int
    description: dict[str, Any]

    @property
    def chunk_bytes(self) -> int:
        """Of the state of one chunk, on all devices together."""
        cache, device = self.description.get("cache", {}), self.description.get("device", {})
        return int(cache.get("page_bytes", 0)) * int(device.get("count", 1))

    @property
    def slot_bytes(self) -> int:
        """Of one chunk in host memory and on its way there, on all devices together."""
        return int(self.description.get("cache", {}).get("slot_bytes", 0))


class AsyncTurn(Protocol):
    """A running turn: an iterator of deltas, which belongs to whoever holds it."""

    @property
    def turn_id(self) -> str:
        """Its id; for a turn without a node, one of this process only."""
        ...

    @property
    def output(self) -> Output | None:
        """The result, once the turn has ended well."""
        ...

    async def accepted(self) -> None:
        """Wait until the engine has queued it; raises what it was refused with."""
        ...

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        """Deltas until the end; raises what the turn failed with. After the last one `output` is there."""
        ...

    async def result(self) -> Output:
        """Wait for the end, whatever of the deltas was taken; raises what the turn failed with."""
        ...

    async def cancel(self) -> None:
        """End it as if it had never been sent; nothing happens to one that is done."""
        ...


class EngineService(Protocol):
    """An engine elsewhere. Errors are those of `Engine`, with the same fields."""

    @property
    def info(self) -> EngineInfo:
        """Raises EngineClosedError before it is ready."""
        ...

    @property
    def state(self) -> EngineState:
        """What it can be asked for: turns only when it is ready."""
        ...

    @property
    def epoch(self) -> int:
        """Counts the engine's starts: what was in memory only did not outlive one."""
        ...

    @property
    def last_heard_s(self) -> float:
        """Seconds since the engine said anything, which it does once a second; infinity before it began."""
        ...

    @property
    def last_stats(self) -> Mapping[str, Any]:
        """`Engine.stats`, at most a second old while it runs; nothing before it began."""
        ...

    def submit(self, spec: TurnSpec) -> AsyncTurn:
        """Queue a turn. What `Engine.submit` refuses, the turn raises: at `accepted`, or when iterated.

        Raises EngineClosedError while it takes none.
        """
        ...

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[AsyncTurn]:
        """Queue turns, all or none."""
        ...

    async def apply(self, change: HistoryChange) -> None:
        """Change what the history keeps beside turns; raises HistoryError and what the change says."""
        ...

    async def call(self, name: str, *arguments: Any) -> Any:
        """One of the engine's other methods by name, with plain values: "stats", "push_out", ..."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """Take no more turns, and wait for those that run, or cancel them when the time is over."""
        ...
