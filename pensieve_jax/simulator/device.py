"""A device that computes nothing and takes its time.

Owns: when a step that was dispatched runs, and when its ids are on the host.
Does not know: what a step computes, or who waits for it.
Called by: `replica`, as the engine calls its runner: step N+1 is dispatched before step N is fetched.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pensieve_jax.scheduler import bucket_for
from pensieve_jax.simulator.clock import Timeline
from pensieve_jax.simulator.profile import DeviceProfile
from pensieve_jax.simulator.step_time import StepLoad, StepTime
from pensieve_jax.simulator.step_totals import StepTotals
from pensieve_jax.simulator.transfers import SimulatedTransfers


class _InFlight(NamedTuple):
    """A step whose ids have not been fetched: its bucket and tokens, and when it was launched."""

    bucket: int
    num_tokens: int
    begun_s: float


class SimulatedDevice:
    """One device (or several that work as one), and the host that feeds it.

    Attributes:
      busy_s: time that steps took, so far.
      num_padded_tokens: query tokens that steps were padded with.
      padding_s: time of `busy_s` that they took.
      totals: of fetched steps, by bucket, as a clock of the host would see them.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        buckets: tuple[int, ...],
        timeline: Timeline,
        transfers: SimulatedTransfers,
    ) -> None:
        """Idle. `buckets`: the padded step sizes."""
        self._step_time = StepTime(profile.step, buckets)
        self._buckets = buckets
        self._host_step_s, self._fetch_s = profile.host_step_s, profile.fetch_s
        self._timeline = timeline
        self._transfers = transfers
        self.busy_s = 0.0
        self.num_padded_tokens = 0
        self.padding_s = 0.0
        self.totals = {bucket: StepTotals() for bucket in buckets}
        self._in_flight: deque[_InFlight] = deque()
        self._fetched_s = timeline.now()

    def dispatch(self, load: StepLoad) -> float:
        """Launch a step behind everything that was dispatched; returns when it will have ended."""
        timeline = self._timeline
        self._transfers.before_dispatch()
        timeline.advance(self._host_step_s)
        bucket = bucket_for(self._buckets, load.num_tokens)
        self._in_flight.append(_InFlight(bucket, load.num_tokens, timeline.now()))
        seconds = self._step_time.seconds(load)
        self.busy_s += seconds
        self.num_padded_tokens += self._step_time.num_padded_tokens(load.num_tokens)
        self.padding_s += self._step_time.padding_s(load.num_tokens)
        end_s = max(timeline.now(), timeline.device_free_s) + seconds
        timeline.occupy_device(end_s)
        return end_s

    def fetch(self, end_s: float) -> None:
        """Wait for the ids of a step that ends at `end_s`."""
        self._timeline.advance_to(end_s + self._fetch_s)
        step, now_s = self._in_flight.popleft(), self._timeline.now()
        seconds = now_s - max(self._fetched_s, step.begun_s)
        self.totals[step.bucket] = self.totals[step.bucket].plus(StepTotals(1, seconds, step.num_tokens))
        self._fetched_s = now_s
