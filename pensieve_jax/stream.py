"""A running turn as an iterator of what it says.

Owns: stepping the engine until there is something to say, and cancelling a turn that nobody listens to.
Does not know: prompts, or how a turn came about. Made by `LLM`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from pensieve_jax.core.outputs import Delta, Output
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn


def result_of(turn: Turn) -> Output:
    """The output of a turn that is done; raises what it failed with."""
    if turn.error is not None:
        raise turn.error
    assert turn.output is not None
    return turn.output


class Stream(Iterator[Delta]):
    """A running turn as an iterator of deltas. Closing it, or dropping it, cancels the turn."""

    def __init__(self, engine: Engine, turn: Turn) -> None:
        """Made by `LLM.stream`; the turn has been submitted."""
        self._engine = engine
        self._turn = turn
        self._closed = False

    @property
    def output(self) -> Output | None:
        """The result, once the turn has ended."""
        return self._turn.output

    def __next__(self) -> Delta:
        """Step until the turn says something; raises what the turn failed with."""
        while not self._closed:
            delta = self._turn.take_delta()
            if delta is not None:
                return delta
            if self._turn.done:
                result_of(self._turn)
                raise StopIteration
            self._engine.step()
        raise StopIteration

    def close(self) -> None:
        """Cancel the turn, as if it had never been sent, unless it has ended; nothing comes after it."""
        self._closed = True
        if not self._turn.done:
            self._engine.cancel(self._turn)

    def __enter__(self) -> Self:
        """The stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def __del__(self) -> None:
        """A dropped stream must not leave its conversation busy.

        The collector may come in the middle of a step, so this only asks the engine to cancel.
        """
        if not self._turn.done and not self._engine.closed:
            self._engine.abandon(self._turn)
