"""Turns that run: one as an iterator of what it says, or several to their ends.

Owns: stepping the engine for whoever waits, and cancelling at once what nobody waits for any more. Where an
interrupt keeps that from being done, nobody holds the turns, and the engine cancels them at its next call.
Does not know: prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from tqdm import tqdm

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.core.outputs import Delta, Output, all_results
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn


def run_all(engine: Engine, specs: Sequence[TurnSpec], *, progress: bool) -> list[Output]:
    """Submit turns and step until all have ended.

    Raises what the first one that failed, failed with, or what kept the engine from a step; its `outputs` are
    those of the others.

    Whatever interrupts this cancels those that have not ended. `progress` shows a bar for several.
    """
    turns: list[Turn] = []
    try:
        turns = engine.submit(specs)
        unfinished = set(turns)
        with tqdm(total=len(turns), desc="turns", disable=not progress or len(turns) < 2) as bar:
            while unfinished and engine.has_unfinished:
                ended = unfinished.intersection(engine.step())
                unfinished -= ended
                bar.update(len(ended))
    except PensieveError as error:  # of a step itself, as where there is no memory for new pools
        if len(turns) > 1:
            error.outputs = [turn.output for turn in turns]
        raise
    finally:
        _cancel(engine, turns)
    return all_results(turns)


def _cancel(engine: Engine, turns: Sequence[Turn]) -> None:
    """Cancel those that are not done."""
    for turn in turns:
        if not turn.done:
            engine.cancel(turn)


class Stream(Iterator[Delta]):
    """A running turn as an iterator of deltas. Closing it, or dropping it, cancels the turn."""

    def __init__(self, engine: Engine, spec: TurnSpec) -> None:
        """Submit the turn; made by `LLM.stream`. Raises what `Engine.submit` does."""
        self._engine = engine
        self._closed = False
        (self._turn,) = engine.submit([spec])

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
                self._turn.result()
                raise StopIteration
            self._engine.step()
        raise StopIteration

    def close(self) -> None:
        """Cancel the turn, as if it had never been sent, unless it has ended; nothing comes after it."""
        self._closed = True
        _cancel(self._engine, [self._turn])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
