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
from pensieve_jax.text.replies import divided_output, has_parts, new_parser
from pensieve_jax.text.reply_events import parsed_reply


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
            error.outputs = _divided([turn.output for turn in turns], specs)
        raise
    finally:
        _cancel(engine, turns)
    try:
        outputs = all_results(turns)
    except PensieveError as error:
        error.outputs = _divided(error.outputs or (), specs)
        raise
    return [divided_output(one, spec.template_input) for one, spec in zip(outputs, specs, strict=True)]


def _divided(outputs: Sequence[Output | None], specs: Sequence[TurnSpec]) -> list[Output | None]:
    return [
        None if output is None else divided_output(output, spec.template_input)
        for output, spec in zip(outputs, specs, strict=False)
    ]


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
        self._template = spec.template_input
        self._parser = new_parser(self._template) if has_parts(self._template) else None
        (self._turn,) = engine.submit([spec])

    @property
    def output(self) -> Output | None:
        """Result of the turn, after it ended."""
        output = self._turn.output
        return None if output is None else divided_output(output, self._template)

    def __next__(self) -> Delta:
        """Step until the reply grows; raises the turn's error."""
        while not self._closed:
            delta = self._turn.take_delta()
            if delta is not None:
                return self._divided(delta)
            if self._turn.done:
                self._turn.result()
                rest = self._rest()
                if rest is None:
                    raise StopIteration
                return rest
            self._engine.step()
        raise StopIteration

    def _divided(self, delta: Delta) -> Delta:
        if self._parser is None:
            return delta
        parts = parsed_reply(self._parser.feed(delta.text), calls=False)
        return Delta(parts.content, delta.token_ids, parts.reasoning)

    def _rest(self) -> Delta | None:
        """Return what the parser held back until the turn's end; None if that is nothing."""
        if self._parser is None:
            return None
        parts = parsed_reply(self._parser.end(), calls=False)
        self._parser = None
        return Delta(parts.content, (), parts.reasoning) if parts.content or parts.reasoning else None

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
