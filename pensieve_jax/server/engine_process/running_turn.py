"""The caller's handle of a turn that runs in the engine's process.

Owns: a turn's unread output, its result or error, and waiting for both.
Does not know: the socket, frames, or what a prompt is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from pensieve_jax.core.outputs import Output, TokenLogprob, Usage
from pensieve_jax.server.async_engine import AsyncDelta
from pensieve_jax.server.engine_process.unread import UnreadOutput


class TurnConnection(Protocol):
    """Connection to the engine that runs a turn."""

    async def wait_for_change(self, number: int) -> None:
        """Wait until a turn is accepted, has a new delta, or ends."""
        ...

    def cancel(self, *numbers: int) -> None:
        """Ask the engine to cancel turns; it reports their ends like any other."""
        ...


class RunningTurn:
    """Turn in the engine's process and iterator of its deltas. Losing its last reference cancels it."""

    __slots__ = (
        "__weakref__",
        "_connection",
        "_error",
        "_is_accepted",
        "_num_chars",
        "_num_ids",
        "_output",
        "_turn_id",
        "_unread",
        "number",
    )

    def __init__(self, connection: TurnConnection, number: int, turn_id: str, *, has_logprobs: bool) -> None:
        self.number = number
        self._connection = connection
        self._turn_id = turn_id
        self._is_accepted = False
        self._output: Output | None = None
        self._error: Exception | None = None
        self._unread = UnreadOutput(has_logprobs=has_logprobs)
        self._num_chars = self._num_ids = 0  # received so far

    @property
    def turn_id(self) -> str:
        """Id of the turn. For a turn without a node, it is valid in this process only."""
        return self._turn_id

    @property
    def output(self) -> Output | None:
        """Result of the turn, or None until it ends successfully."""
        return self._output

    @property
    def usage(self) -> Usage | None:
        """Sources of the turn's tokens, or None until it ends successfully."""
        return None if self._output is None else self._output.usage

    @property
    def done(self) -> bool:
        """Whether the turn has an output or an error."""
        return self._output is not None or self._error is not None

    @property
    def num_unread_entries(self) -> int:
        """Number of log-probabilities, alternatives included, that have arrived and were not read."""
        return self._unread.num_entries

    async def accepted(self) -> None:
        """Wait until the engine has queued the turn; raises the error if the engine refuses it."""
        while not (self._is_accepted or self.done):
            await self._connection.wait_for_change(self.number)
        if self._error is not None and not self._is_accepted:
            raise self._error

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        return self

    async def __anext__(self) -> AsyncDelta:
        """Return the output since the last call; raises the turn's error once all earlier output was read."""
        unread = self._unread
        while not unread.steps:
            if self._error is not None:
                raise self._error
            if self._output is not None:
                raise StopAsyncIteration
            await self._connection.wait_for_change(self.number)
        return unread.take()

    async def result(self) -> Output:
        """Wait for the end, whether or not the deltas were read; raises the turn's error."""
        while not self.done:
            await self._connection.wait_for_change(self.number)
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    async def cancel(self) -> None:
        """End the turn as if never submitted, and wait for its end. A finished turn is unaffected."""
        if not self.done:
            self._connection.cancel(self.number)
        while not self.done:
            await self._connection.wait_for_change(self.number)

    # Called by the connection

    def add(self, text: str, ids: int | list[int], logprobs: list[TokenLogprob] | None) -> None:
        """Append the output of a step."""
        num_ids = 1 if isinstance(ids, int) else len(ids)
        if not text and not num_ids:
            return
        self._num_chars += len(text)
        self._num_ids += num_ids
        if logprobs:
            self._unread.add(text, ids, logprobs)
        else:
            self._unread.steps.append((text, ids, None))

    def accept(self) -> None:
        """Mark the turn as queued by the engine."""
        self._is_accepted = True

    def end(self, output: Output) -> None:
        """End the turn; output that no delta had becomes the last delta."""
        rest = list(output.token_ids[self._num_ids :])
        logprobs = None if output.logprobs is None else list(output.logprobs[self._num_ids :])
        self.add(output.text[self._num_chars :], rest, logprobs)
        self._output = output

    def fail(self, error: Exception) -> None:
        """End the turn with an error, because it was refused or failed."""
        self._error = error
