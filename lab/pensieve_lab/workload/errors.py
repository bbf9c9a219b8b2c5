"""Errors of the workload package: wrong arguments, and faults in a trace file.

Owns: the two error classes of this package.
Does not know: any format.
"""

from __future__ import annotations

from pathlib import Path

from pensieve_jax.core.errors import InvalidFieldError, PensieveError


class WorkloadError(InvalidFieldError):
    """Length, time, rate or option that cannot be part of a workload."""


class TraceError(PensieveError, ValueError):
    """File that does not have the expected trace format.

    Attributes:
      path: the file.
      line: line of the fault, from 1; None if it concerns the whole file.
      reason: description of the fault: the field, its value and what it must be.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str) -> None:
        """Make the message; `reason` is a clause without a full stop."""
        self.path = Path(path)
        self.line = line
        self.reason = reason
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {reason}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (self.path, self.line, self.reason)
