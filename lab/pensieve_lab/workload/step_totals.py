"""Number and total duration of steps by size.

Owns: when a step's time begins and ends, the sums, and the means that are reported.
Does not know: whether the steps were simulated or measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class StepTotals(NamedTuple):
    """Steps of one bucket: their number, total wall time in seconds, and total query tokens."""

    num_steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0

    def plus(self, other: StepTotals) -> StepTotals:
        """Return the sums of both totals."""
        return StepTotals(
            self.num_steps + other.num_steps,
            self.seconds + other.seconds,
            self.num_tokens + other.num_tokens,
        )

    def minus(self, other: StepTotals) -> StepTotals:
        """Return what these totals have more than `other`."""
        return StepTotals(
            self.num_steps - other.num_steps,
            self.seconds - other.seconds,
            self.num_tokens - other.num_tokens,
        )


type Steps = Mapping[int, StepTotals]
"""Totals by bucket (padded query tokens)."""


class _Launched(NamedTuple):
    """Step whose ids have not been fetched."""

    bucket: int
    num_tokens: int
    begun_s: float


class StepLog:
    """Log of steps as they are launched and fetched, in this order.

    A step's time runs from its launch, or from the end of the step before if that was later, until its ids
    are on the host.

    Attributes:
      totals: totals of fetched steps by bucket.
      fetched_s: time of the last fetch.
    """

    def __init__(self, buckets: Iterable[int], start_s: float = 0.0) -> None:
        """Start without steps; `start_s` counts as the end of the step before."""
        self.totals = {bucket: StepTotals() for bucket in buckets}
        self.fetched_s = start_s
        self._in_flight: deque[_Launched] = deque()

    @property
    def first_begun_s(self) -> float | None:
        """Launch of the oldest step that was not fetched; None if there is no such step."""
        return self._in_flight[0].begun_s if self._in_flight else None

    def launch(self, bucket: int, num_tokens: int, begun_s: float) -> None:
        """Record the launch of a step with `num_tokens` query tokens."""
        self._in_flight.append(_Launched(bucket, num_tokens, begun_s))

    def fetch(self, now_s: float) -> None:
        """Record that the ids of the oldest step are on the host."""
        step = self._in_flight.popleft()
        seconds = now_s - max(self.fetched_s, step.begun_s)
        self.totals[step.bucket] = self.totals[step.bucket].plus(StepTotals(1, seconds, step.num_tokens))
        self.fetched_s = now_s

    def forget(self) -> None:
        """Forget launched steps, which will never be fetched."""
        self._in_flight.clear()


def add_steps(steps: Steps, others: Steps) -> dict[int, StepTotals]:
    """Return the sums bucket by bucket."""
    none = StepTotals()
    buckets = sorted(steps.keys() | others.keys())
    return {bucket: steps.get(bucket, none).plus(others.get(bucket, none)) for bucket in buckets}


def subtract_steps(steps: Steps, earlier: Steps) -> dict[int, StepTotals]:
    """Return what `steps` has more than `earlier`, bucket by bucket."""
    none = StepTotals()
    buckets = sorted(steps.keys() | earlier.keys())
    return {bucket: steps.get(bucket, none).minus(earlier.get(bucket, none)) for bucket in buckets}


def step_figures(steps: Steps) -> dict[str, dict[str, float]]:
    """Return number of steps, mean wall seconds and mean query tokens by bucket, without empty buckets."""
    return {
        str(bucket): {
            "num_steps": total.num_steps,
            "mean_s": total.seconds / total.num_steps,
            "mean_tokens": total.num_tokens / total.num_steps,
        }
        for bucket, total in steps.items()
        if total.num_steps
    }
