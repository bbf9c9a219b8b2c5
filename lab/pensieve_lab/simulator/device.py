"""A device that computes nothing but takes time, and the host that feeds it.

Owns: how long a step keeps the host busy, when a dispatched step runs, and when its ids reach the host.
Does not know: what a step computes, or who waits for it.
"""

from __future__ import annotations

from pensieve_jax.scheduler import bucket_for
from pensieve_lab.simulator.clock import Timeline
from pensieve_lab.simulator.profile import DeviceProfile
from pensieve_lab.simulator.step_time import StepLoad, StepTime, ThermalModel
from pensieve_lab.simulator.transfers import SimulatedTransfers
from pensieve_lab.workload.step_totals import StepLog


class SimulatedDevice:
    """One device, or several that work as one, and its host.

    Attributes:
      busy_s: total time of steps.
      num_padded_tokens: padding tokens of steps.
      padding_s: part of `busy_s` that the padding took.
      host_s: host time for steps.
      steps: steps as a clock of the host would see them.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        buckets: tuple[int, ...],
        timeline: Timeline,
        transfers: SimulatedTransfers,
    ) -> None:
        """Start idle. `buckets`: the padded step sizes."""
        self._step_time = StepTime(profile.step, buckets)
        self._buckets = buckets
        self._host, self._fetch_s = profile.host, profile.fetch_s
        self._heat = ThermalModel(profile.step.hot_s)
        self._is_launching = profile.launches == "engine"
        self._num_turns = 0  # since the last step
        self._num_chunks = 0  # requested before the last step
        self._timeline = timeline
        self._transfers = transfers
        self.busy_s = 0.0
        self.num_padded_tokens = 0
        self.padding_s = self.host_s = 0.0
        self.steps = StepLog(buckets, timeline.now())

    def submit(self) -> None:
        """Count a new turn, which costs the host time with the next step."""
        self._num_turns += 1

    def dispatch(self, load: StepLoad) -> float:
        """Launch a step after everything dispatched before; return its end."""
        timeline, host = self._timeline, self._host
        self._transfers.before_dispatch()
        timeline.advance(self._work_s(load))
        bucket = bucket_for(self._buckets, load.num_tokens)
        self.steps.launch(bucket, load.num_tokens, timeline.now())
        self._heat.rest(timeline.now() - timeline.device_free_s)
        step_time = self._step_time
        attention_s = step_time.attention_s(load, bucket)
        rested_s = step_time.dense_and_rest_s(bucket, load.num_tokens, 0.0) + attention_s
        heat = self._heat.step(rested_s, is_heating=step_time.is_heating(bucket, load.num_tokens))
        seconds = step_time.dense_and_rest_s(bucket, load.num_tokens, heat) + attention_s
        self.busy_s += seconds
        self.num_padded_tokens += bucket - load.num_tokens
        self.padding_s += self._step_time.padding_s(load.num_tokens)
        # The device starts on launched kernels while the host launches the rest.
        launch_s = host.launch_beside_copies_s if self._transfers.is_moving() else host.launch_s
        begin_s = max(timeline.now(), timeline.device_free_s)
        end_s = max(begin_s + seconds, timeline.now() + launch_s)
        timeline.occupy_device(end_s)
        if self._is_launching:
            timeline.advance(launch_s)
            self.host_s += launch_s
        return end_s

    def _work_s(self, load: StepLoad) -> float:
        """Return the host time of a step before its launch."""
        host, num_chunks = self._host, self._transfers.num_chunks
        seconds = host.step_s + host.row_s * load.num_rows
        seconds += host.turn_s * self._num_turns + host.chunk_s * (num_chunks - self._num_chunks)
        self._num_turns, self._num_chunks = 0, num_chunks
        self.host_s += seconds
        return seconds

    def fetch(self, end_s: float) -> None:
        """Wait for the ids of a step that ends at `end_s`."""
        self._timeline.advance_to(end_s + self._fetch_s)
        self.steps.fetch(self._timeline.now())
