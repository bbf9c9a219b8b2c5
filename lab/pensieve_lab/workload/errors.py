"""What a caller of the workload package can do wrong, and what a trace file can have wrong with it.

Owns: the two error classes of this package.
Does not know: any format.
"""

from __future__ import annotations

from pathlib import Path

from pensieve_jax.core.errors import InvalidFieldError, PensieveError


class WorkloadError(InvalidFieldError):
    """A length, time, rate or option that cannot be part of a workload."""


class TraceError(PensieveError, ValueError):
    """A file that is not a trace of the format it was read as.

    Attributes:
      path: the file.
      line: where in it, from 1; None where the file as a whole is at fault.
      reason: what is wrong there: the field, its value and what it must be.
    """

    def __init__(self, path: str | Path, line: int | None, reason: str) -> None:
        """`reason` is a clause without a full stop."""
        self.path = Path(path)
        self.line = line
        self.reason = reason
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {reason}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (self.path, self.line, self.reason)
