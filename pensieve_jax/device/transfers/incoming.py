"""Copies from the host: queued, copied into staging beside a step, and scattered before a later step.

Owns: the staging arrays of copies from the host, their maximum number, and the copies that the next step
waits for.
Does not know: copies to the host, or why a chunk is wanted.

Usually a chunk is copied beside one step and scattered into the pools before the next. An *expedited* chunk
is scattered before the very next step, group by group of layers: the first group computes while the pieces of
the other groups arrive (pipelined recovery, the paper's section 4.3.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.device.transfers.host_pool import HostPool
from pensieve_jax.device.transfers.in_flight import CopyDispatcher, InFlight, is_ready, partition
from pensieve_jax.device.transfers.page_copies import PageCopies, Targets
from pensieve_jax.device.transfers.plan_barrier import PlanBarrier
from pensieve_jax.engine.transfers import num_beside_step


class IncomingCopies:
    """Copies from host slots to pages.

    Attributes:
      staged: started copies, to be scattered before a later step.
      expedited: copies started in part or whole, to be scattered with the next step.
      barrier: makes the step's plan arrive before the chunks that are copied beside the step.
      num_chunks: number of chunks started so far.
    """

    def __init__(
        self,
        storage: KVStorage,
        host: HostPool,
        copies: PageCopies,
        dispatcher: CopyDispatcher,
        max_num_staged: int,
    ) -> None:
        """Start with no copies; at most `max_num_staged` chunks are on their way at a time."""
        self.barrier = PlanBarrier(storage.sharding)
        self._sharding, self._groups = storage.sharding, range(len(storage.groups))
        self._host, self._copies, self._dispatcher = host, copies, dispatcher
        self._max_num_staged = max_num_staged
        self._num_beside_step = num_beside_step(max_num_staged, storage.staged_bytes)
        self._queued: deque[InFlight] = deque()
        self._expedited_targets: Targets | None = None
        self._last: Any = None  # a piece of the copy that was started last
        self.staged: deque[InFlight] = deque()
        self.expedited: list[InFlight] = []
        self.num_chunks = 0

    def queue(self, copies: Sequence[ChunkCopy]) -> None:
        """Queue copies to start when there is room; their slots may be reused at once."""
        self._queued.extend(InFlight(copy, self._host.get(copy.slot)) for copy in copies)

    def expedite(self, copy_ids: Collection[int]) -> None:
        """Make the next step wait for these copies and start the first group of each.

        They start before the step is planned: the step cannot begin earlier, and its plan may arrive after
        them.

        Raises:
          StepFailedError: the copies could not be started.
        """

        def is_wanted(transfer: InFlight) -> bool:
            return transfer.copy.copy_id in copy_ids

        started, self.staged = partition(self.staged, is_wanted)
        waiting, self._queued = partition(self._queued, is_wanted)
        self.expedited += [*started, *waiting]
        assert len(self.staged) + len(self.expedited) <= self._max_num_staged
        if self.expedited:
            self._expedited_targets = self._stage(self.expedited)
            self._start(waiting, self._groups[:1])

    def land_first_group(self) -> None:
        """Scatter the first group's pieces of expedited copies, and start the other groups'.

        A copy waits for all computation dispatched before it. So copies started from here on wait for this
        scatter, and hence for the first group's pieces. If all groups were started together, they would
        arrive together, because the copy engine alternates between its streams.

        Raises:
          StepFailedError: the device refused.
        """
        if self.expedited:
            self._scatter(self.expedited, self._expedited_targets, self._groups[:1])
            behind = [transfer for transfer in self.expedited if len(transfer.target) < len(self._groups)]
            self._start(behind, self._groups[1:])

    def land(self, group: int) -> None:
        """Scatter a later group's pieces of expedited copies, right before its layers are dispatched."""
        if self.expedited and group:
            self._scatter(self.expedited, self._expedited_targets, self._groups[group : group + 1])
        if group == self._groups[-1]:
            self.expedited, self._expedited_targets = [], None

    def start_queued(self) -> None:
        """Start queued copies that have room, after everything sent before; raise StepFailedError."""
        room = min(self._num_beside_step, self._max_num_staged - len(self.expedited)) - len(self.staged)
        batch = [self._queued.popleft() for _ in range(min(room, len(self._queued)))]
        if batch:
            with self._dispatcher.dispatching():
                self.barrier.dispatch()
        self._start(batch, self._groups)
        self.staged.extend(batch)

    def completed(self) -> list[int]:
        """Scatter chunks copied beside the last step and return their ids. Raises StepFailedError."""
        landed, self.staged = partition(self.staged, self._may_land)
        self._dispatcher.check(transfer for transfer in landed if transfer.is_ready())
        if landed:
            self._scatter(landed, self._stage(landed), self._groups)
        return [transfer.copy.copy_id for transfer in landed]

    def is_arriving(self) -> bool:
        """Return whether a copy from the host is queued, in staging, or possibly still running.

        One piece of the copy that was started last stands for all running ones: they end at about that time.
        """
        if is_ready(self._last):
            self._last = None
        return bool(self._queued or self.staged or self.expedited) or self._last is not None

    def clear(self) -> None:
        """Forget all copies, queued and started."""
        self._queued.clear()
        self.staged.clear()
        self.expedited, self._expedited_targets, self._last = [], None, None

    def _may_land(self, transfer: InFlight) -> bool:
        # A copy that ran beside a step delays the next step only by its remainder. Without a step beside it,
        # the copy must have ended.
        return transfer.start_step < self._dispatcher.num_steps or transfer.is_ready()

    def _start(self, batch: Sequence[InFlight], groups: range) -> None:
        if batch and groups:
            self._dispatcher.start(batch, self._sharding, groups)
            self._last = batch[-1].target[-1]
        if groups.stop == self._groups.stop:
            self.num_chunks += len(batch)

    def _stage(self, batch: Sequence[InFlight]) -> Targets:
        """Send the copies' page numbers to the device for `_scatter`."""
        with self._dispatcher.dispatching():
            return self._copies.stage([transfer.copy.page for transfer in batch])

    def _scatter(self, batch: Sequence[InFlight], targets: Targets | None, groups: range) -> None:
        """Write the pieces of `groups` to their pages."""
        assert targets is not None
        with self._dispatcher.dispatching():
            for group in groups:
                self._copies.scatter(group, [transfer.target[group] for transfer in batch], targets)
