"""The asynchronous interface of an engine that front ends use.

Owns: the protocols, and the types of their arguments and results.
Does not know: in which process or thread the engine runs, HTTP, or where turns come from.
The client of the engine's process implements it over a socket; tests implement it with fakes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError
from pensieve_jax.core.outputs import Output, TokenLogprob
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.history.server_tables.changes import HistoryChange

EngineState = Literal["starting", "ready", "draining", "dead"]
UNANSWERED: Final = (EngineClosedError, EngineDiedError)
"""Errors that leave open whether the engine executed the request, or still will."""


class AsyncDelta(msgspec.Struct, frozen=True):
    """New part of a reply since the previous delta: whole characters, sampled token ids, and their logprobs.

    Deltas that the caller has not read yet are merged into one, or into several with many log-probabilities.
    There is one for most tokens, and this kind of class is made faster than a dataclass.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


def num_entries(logprobs: Iterable[TokenLogprob] | None) -> int:
    """Return the number of log-probabilities of some tokens, alternatives included."""
    return sum(1 + len(one.top) for one in logprobs or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Description that the engine's process sends once, when it is ready.

    Attributes:
      model_name: the name as configured.
      source: the model's directory, or random:<preset>.
      fingerprint: the model fingerprint. Only models with the same one may read the history.
      history: the path of the history file.
      description: the value of `LLM.describe()`.
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
        """Size of one chunk's KV cache in device memory, summed over all devices."""
        cache, device = self.description.get("cache", {}), self.description.get("device", {})
        return int(cache.get("page_bytes", 0)) * int(device.get("count", 1))

    @property
    def slot_bytes(self) -> int:
        """Size of one chunk in host memory and in transfers, summed over all devices."""
        return int(self.description.get("cache", {}).get("slot_bytes", 0))


class AsyncTurn(Protocol):
    """Running turn and iterator of its deltas. A turn that no caller references any more is cancelled."""

    @property
    def turn_id(self) -> str:
        """Id of the turn. For a turn without a node, it is valid in this process only."""
        ...

    @property
    def output(self) -> Output | None:
        """Result of the turn, or None until it ends successfully."""
        ...

    @property
    def num_unread_entries(self) -> int:
        """Number of log-probabilities, alternatives included, that have arrived and were not read."""
        ...

    async def accepted(self) -> None:
        """Wait until the engine has queued the turn; raises the error if the engine refuses it."""
        ...

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        """Iterate over the deltas; raises the turn's error. `output` is set after the last delta."""
        ...

    async def result(self) -> Output:
        """Wait for the end, whether or not the deltas were read; raises the turn's error."""
        ...

    async def cancel(self) -> None:
        """End the turn as if it had never been submitted. A finished turn is unaffected."""
        ...


class EngineService(Protocol):
    """Asynchronous engine. It raises the errors of `Engine`, with the same fields."""

    @property
    def info(self) -> EngineInfo:
        """Description of the engine; raises EngineClosedError before the engine is ready."""
        ...

    @property
    def state(self) -> EngineState:
        """State of the engine. It accepts turns only while "ready"."""
        ...

    @property
    def epoch(self) -> int:
        """Number of engine starts. Data that was only in memory does not survive a restart."""
        ...

    @property
    def last_heard_s(self) -> float:
        """Seconds since the engine's last message. It sends one every second; infinity before the first."""
        ...

    @property
    def last_stats(self) -> Mapping[str, Any]:
        """Latest `Engine.stats`, at most a second old while the engine runs; empty before it starts."""
        ...

    def submit(self, spec: TurnSpec) -> AsyncTurn:
        """Queue a turn; raises EngineClosedError while the engine accepts no turns.

        If the engine refuses the turn, `accepted` or the iteration raises the error of `Engine.submit`.
        """
        ...

    def submit_all(self, specs: Sequence[TurnSpec]) -> list[AsyncTurn]:
        """Queue all turns, or none of them."""
        ...

    async def apply(self, change: HistoryChange) -> None:
        """Change the history's tables other than turns; raises HistoryError and the errors of the change."""
        ...

    async def call(self, name: str, *arguments: Any) -> Any:
        """Call another engine method by name, with plain values: "stats", "push_out", ..."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """Accept no more turns and wait for the running ones; cancel them after `deadline_s` seconds."""
        ...
