"""A request as its sender holds it, and what it becomes.

Owns: the handle and the output.
Does not know: the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CellOutput:
    """What a request's cells computed.

    Attributes:
      states: of every node that the graph returns, in that order, its fields.
      emitted: by field, a value of every node of a cell that emits it, in the order in which the graph added
        them.
    """

    states: Sequence[Mapping[str, np.ndarray]]
    emitted: Mapping[str, np.ndarray]

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was emitted as "token".

        Raises:
          KeyError: no cell of the request emits it.
        """
        return tuple(self.emitted["token"].tolist())


_NOTHING_YET: tuple[Mapping[str, np.ndarray], int] = {}, 0


class CellRequest:
    """A request that was submitted.

    Attributes:
      done: whether there is a result, or an error.
      error: why there is none; None if there is one, or may be.
      num_wasted: cells that ran after the one that ended their chain.
      serial: its number among all that ever came.
      request_id: for the engine alone: where it is in the tables; another's, once this one is done.
    """

    __slots__ = ("_emitted", "_output", "_rows", "done", "error", "num_wasted", "request_id", "serial")

    def __init__(self, request_id: int, serial: int, num_returned: int) -> None:
        self.done = False
        self.error: Exception | None = None
        self.num_wasted = 0
        self.request_id, self.serial = request_id, serial
        self._rows: list[tuple[Mapping[str, np.ndarray], int]] = [_NOTHING_YET] * num_returned
        self._emitted: Mapping[str, np.ndarray] | None = None
        self._output: CellOutput | None = None

    def keep(self, place: int, fields: Mapping[str, np.ndarray], row: int) -> None:
        """A row of these fields [n, ...] is what it returns in this place."""
        self._rows[place] = fields, row

    def finish(self, emitted: Mapping[str, np.ndarray]) -> None:
        """All that it returns was kept, and this was emitted."""
        self._emitted, self.done = emitted, True

    def fail(self, error: Exception) -> None:
        """There will be no result."""
        self.error, self.done = error, True

    def result(self) -> CellOutput:
        """What its cells computed.

        Raises:
          RequestCancelledError, LaunchFailedError: there is nothing.
          RuntimeError: it has not ended yet; whoever steps the engine will see it end.
        """
        if self.error is not None:
            raise self.error
        if self._emitted is None:
            raise RuntimeError("the request has not ended: call step() until it is done")
        if self._output is None:  # a copy, so that what was read with it need not be kept
            states = [
                {name: np.array(values[row]) for name, values in fields.items()} for fields, row in self._rows
            ]
            self._output, self._rows = CellOutput(states, self._emitted), []
        return self._output
