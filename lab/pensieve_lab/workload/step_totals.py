"""How many steps there were of one size, and how long they took together.

Owns: from when to when a step counts, the sums, and the means that are reported of them.
Does not know: whether the steps were simulated or measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class StepTotals(NamedTuple):
    """Steps of one bucket: how many, their wall time in seconds, and their query tokens."""

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


class _Launched(NamedTuple):
    """A step whose ids have not been fetched."""

    bucket: int
    num_tokens: int
    begun_s: float


class StepLog:
    """Steps as they are launched and fetched, in this order.

    A step's time runs from its launch, or from the end of the step before if that was later, until its ids
    are on the host.

    Attributes:
      totals: of fetched steps, by bucket.
      fetched_s: when the last one was fetched.
    """

    def __init__(self, buckets: Iterable[int], start_s: float = 0.0) -> None:
        """No steps; none is known to have ended after `start_s`."""
        self.totals = {bucket: StepTotals() for bucket in buckets}
        self.fetched_s = start_s
        self._in_flight: deque[_Launched] = deque()

    @property
    def first_begun_s(self) -> float | None:
        """When the oldest step that was not fetched was launched; None: there is none."""
        return self._in_flight[0].begun_s if self._in_flight else None

    def launch(self, bucket: int, num_tokens: int, begun_s: float) -> None:
        """A step of so many query tokens was launched."""
        self._in_flight.append(_Launched(bucket, num_tokens, begun_s))

    def fetch(self, now_s: float) -> None:
        """The ids of the oldest one are on the host."""
        step = self._in_flight.popleft()
        seconds = now_s - max(self.fetched_s, step.begun_s)
        self.totals[step.bucket] = self.totals[step.bucket].plus(StepTotals(1, seconds, step.num_tokens))
        self.fetched_s = now_s

    def forget(self) -> None:
        """What was launched and not fetched never will be."""
        self._in_flight.clear()


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
