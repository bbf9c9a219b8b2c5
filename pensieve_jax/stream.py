"""Execution of turns: one as an iterator of its reply, or several until all have ended.

Owns: stepping the engine for a waiting caller, and cancelling turns immediately when the caller stops
waiting. If an interrupt prevents that, the turns lose their last reference, and the engine cancels them at
its next call.
Does not know: prompts.
Called by `LLM`.
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

    Raises the error of the first failed turn, or of a failed step; its `outputs` has the results of the other
    turns. Any exception cancels the turns that have not ended. `progress` shows a bar for several turns.
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
    except PensieveError as error:  # raised by a step itself, for example without memory for new pools
        if len(turns) > 1:
            error.outputs = [turn.output for turn in turns]
        raise
    finally:
        _cancel(engine, turns)
    return all_results(turns)


def _cancel(engine: Engine, turns: Sequence[Turn]) -> None:
    """Cancel the turns that are not done."""
    for turn in turns:
        if not turn.done:
            engine.cancel(turn)


class Stream(Iterator[Delta]):
    """A running turn as an iterator of deltas; closing or dropping it cancels the turn."""

    def __init__(self, engine: Engine, spec: TurnSpec) -> None:
        """Submit the turn; raises the errors of `Engine.submit`. Use `LLM.stream` to make a stream."""
        self._engine = engine
        self._closed = False
        (self._turn,) = engine.submit([spec])

    @property
    def output(self) -> Output | None:
        """Result of the turn, after it ended."""
        return self._turn.output

    def __next__(self) -> Delta:
        """Step until the reply grows; raises the turn's error."""
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
        """Cancel the turn as if it had never been sent, unless it has ended, and end the iteration."""
        self._closed = True
        _cancel(self._engine, [self._turn])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
