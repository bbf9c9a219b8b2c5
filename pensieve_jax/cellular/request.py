"""Request handle of the caller, and the output of a request.

Owns: the handle and the output.
Does not know: the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CellOutput:
    """Result of a request.

    Attributes:
      states: fields of every node that the graph returns, in that order.
      emitted: by field, the values of all nodes that emit it, in the order in which they were added.
    """

    states: Sequence[Mapping[str, np.ndarray]]
    emitted: Mapping[str, np.ndarray]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Values of the emitted field "token".

        Raises:
          KeyError: no cell of the request emits it.
        """
        return tuple(self.emitted["token"].tolist())


_NOTHING_YET: tuple[Mapping[str, np.ndarray], int] = {}, 0


class CellRequest:
    """Submitted request.

    Attributes:
      done: whether there is a result or an error.
      error: the failure; None while the request runs, and if it succeeded.
      num_wasted: cells that ran after the one that ended their chain.
      serial: number of the request since the start of the engine.
      request_id: index in the tables, for the engine only. It is reused when the request is done.
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
        """Store a returned state: row `row` of fields [n, ...] is result number `place`."""
        self._rows[place] = fields, row

    def finish(self, emitted: Mapping[str, np.ndarray]) -> None:
        """Finish the request with its emitted fields, after all returned states were stored."""
        self._emitted, self.done = emitted, True

    def fail(self, error: Exception) -> None:
        """Finish the request with an error."""
        self.error, self.done = error, True

    def result(self) -> CellOutput:
        """Return the output.

        Raises:
          RequestCancelledError, LaunchFailedError: the request failed.
          RuntimeError: the request has not finished yet; step the engine until it is done.
        """
        if self.error is not None:
            raise self.error
        if self._emitted is None:
            raise RuntimeError("The request has not finished. Call step() until it is done.")
        if self._output is None:  # copy the rows, so that the arrays they were read with can be freed
            states = [
                {name: np.array(values[row]) for name, values in fields.items()} for fields, row in self._rows
            ]
            self._output, self._rows = CellOutput(states, self._emitted), []
        return self._output
