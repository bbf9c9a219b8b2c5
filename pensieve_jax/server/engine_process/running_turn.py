"""A turn in the engine's process, as whoever submitted it holds it.

Owns: what nobody has taken yet of a turn, how it ended, and waiting for either.
Does not know: the socket, frames, or what a prompt is.

A turn keeps what nobody took as one delta.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, cast

from pensieve_jax.core.outputs import Output, TokenLogprob, Usage
from pensieve_jax.server.async_engine import AsyncDelta


class Changes(Protocol):
    """Where a turn runs."""

    async def change_of(self, number: int) -> None:
        """Wait until a turn was accepted, said something or ended."""
        ...

    def cancel(self, *numbers: int) -> None:
        """Ask for the end of turns; their ends are told as any other."""
        ...


class RunningTurn:
    """A turn in the engine's process: an iterator of deltas. Dropping it before its end cancels it."""

    __slots__ = (
        "__weakref__",
        "_connection",
        "_error",
        "_ids",
        "_is_accepted",
        "_logprobs",
        "_num_chars",
        "_num_ids",
        "_output",
        "_texts",
        "_turn_id",
        "number",
    )

    def __init__(self, connection: Changes, number: int, turn_id: str, *, has_logprobs: bool) -> None:
        self.number = number
        self._connection = connection
        self._turn_id = turn_id
        self._is_accepted = False
        self._output: Output | None = None
        self._error: Exception | None = None
        # What was not taken, and how much came before and with it.
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if has_logprobs else None
        self._num_chars = self._num_ids = 0

    @property
    def turn_id(self) -> str:
        """Its id; for a turn without a node, one of this process only."""
        return self._turn_id

    @property
    def output(self) -> Output | None:
        """The result, once the turn has ended well."""
        return self._output

    @property
    def usage(self) -> Usage | None:
        """Where its tokens came from, once the turn has ended well."""
        return None if self._output is None else self._output.usage

    @property
    def done(self) -> bool:
        """It has an output, or failed."""
        return self._output is not None or self._error is not None

    async def accepted(self) -> None:
        """Wait until the engine has queued it; raises what it was refused with."""
        while not (self._is_accepted or self.done):
            await self._connection.change_of(self.number)
        if self._error is not None and not self._is_accepted:
            raise self._error

    def __aiter__(self) -> AsyncIterator[AsyncDelta]:
        return self

    async def __anext__(self) -> AsyncDelta:
        """What came since the last call; raises what the turn failed with, once all before it was taken."""
        while not self._ids and not self._texts:
            if self._error is not None:
                raise self._error
            if self._output is not None:
                raise StopAsyncIteration
            await self._connection.change_of(self.number)
        return self._take()

    async def result(self) -> Output:
        """Wait for the end, whatever of the deltas was taken; raises what the turn failed with."""
        while not self.done:
            await self._connection.change_of(self.number)
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    async def cancel(self) -> None:
        """End it as if it had never been sent, and wait for that; nothing happens to one that is done."""
        if not self.done:
            self._connection.cancel(self.number)
        while not self.done:
            await self._connection.change_of(self.number)

    # For the connection

    def add(self, text: str, ids: int | list[int], logprobs: list[TokenLogprob] | None) -> None:
        """What a step gave."""
        if text:
            self._texts.append(text)
            self._num_chars += len(text)
        if type(ids) is int:
            self._ids.append(ids)
            self._num_ids += 1
        else:
            more = cast(list[int], ids)
            self._ids += more
            self._num_ids += len(more)
        if logprobs is not None and self._logprobs is not None:
            self._logprobs += logprobs

    def accept(self) -> None:
        """The engine has queued it."""
        self._is_accepted = True

    def end(self, output: Output) -> None:
        """It ended; what no delta had is the last one."""
        rest = list(output.token_ids[self._num_ids :])
        logprobs = None if output.logprobs is None else list(output.logprobs[self._num_ids :])
        self.add(output.text[self._num_chars :], rest, logprobs)
        self._output = output

    def fail(self, error: Exception) -> None:
        """It was refused, or lost."""
        self._error = error

    def _take(self) -> AsyncDelta:
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        delta = AsyncDelta("".join(self._texts), tuple(self._ids), logprobs)
        self._texts, self._ids = [], []
        if self._logprobs is not None:
            self._logprobs = []
        return delta
