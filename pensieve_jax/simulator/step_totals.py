"""How many steps there were of one size, and how long they took together.

Owns: the sums, and the means that are reported of them.
Does not know: whether the steps were simulated or measured. Called by: `device`, `simulation`, `figures`; the
serving benchmark counts its steps by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class StepTotals(NamedTuple):
    """Steps of one bucket: how many, their wall time in seconds, and their query tokens.

    A step's time runs from its launch, or from the end of the step before if that was later, until its ids
    are on the host.
    """

    num_steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0

    def plus(self, other: StepTotals, sign: int = 1) -> StepTotals:
        """Sums, or differences."""
        return StepTotals(
            self.num_steps + sign * other.num_steps,
            self.seconds + sign * other.seconds,
            self.num_tokens + sign * other.num_tokens,
        )


type Steps = Mapping[int, StepTotals]
"""By bucket: padded query tokens."""


def add_steps(steps: Steps, others: Steps, sign: int = 1) -> dict[int, StepTotals]:
    """Sums bucket by bucket, or differences."""
    none = StepTotals()
    buckets = sorted(steps.keys() | others.keys())
    return {bucket: steps.get(bucket, none).plus(others.get(bucket, none), sign) for bucket in buckets}


def step_figures(steps: Steps) -> dict[str, dict[str, float]]:
    """By bucket, of those that had any: steps, mean wall seconds and mean query tokens."""
    return {
        str(bucket): {
            "num_steps": total.num_steps,
            "mean_s": total.seconds / total.num_steps,
            "mean_tokens": total.num_tokens / total.num_steps,
        }
        for bucket, total in steps.items()
        if total.num_steps
    }
