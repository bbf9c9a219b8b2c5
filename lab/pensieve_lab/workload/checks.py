"""Checks of the counts, times and factors of a workload.

Owns: the checks and their wording.
Does not know: where a value comes from. `rows` checks values from files, since it knows the line.
"""

from __future__ import annotations

import sys
from typing import Final, TypeGuard

from pensieve_lab.workload.errors import WorkloadError

_MAX: Final = sys.float_info.max


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite int or float, but not a bool."""
    # An int may be too large for a float, and comparisons with NaN are false.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MAX <= value <= _MAX


def is_count(value: object, at_least: int) -> TypeGuard[int]:
    """Return whether `value` is an int of at least `at_least`, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def check_count(field: str, value: object, at_least: int = 1) -> None:
    """Raise WorkloadError unless `value` is an int of at least `at_least`."""
    if not is_count(value, at_least):
        raise WorkloadError(field, value, f"an int of at least {at_least}")


def check_time(field: str, value: object) -> None:
    """Raise WorkloadError unless `value` is a finite number of seconds, 0 or more."""
    if not is_number(value) or value < 0:
        raise WorkloadError(field, value, "a finite number of seconds, 0 or more")


def check_positive(field: str, value: object) -> None:
    """Raise WorkloadError unless `value` is a finite number above 0."""
    if not is_number(value) or value <= 0:
        raise WorkloadError(field, value, "a finite number above 0")
