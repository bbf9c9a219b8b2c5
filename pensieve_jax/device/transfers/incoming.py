"""Chunks on their way from the host: queued, copied into staging beside a step, scattered before a later one.

Owns: the staging arrays of copies from the host, their bound, and those that the next step waits for.
Does not know: copies the other way, or why a chunk is wanted.

Usually a chunk is copied beside one step and scattered into the pools before the next. A *expedited* one is
scattered before the very next step, group by group of layers: the first group computes while the others'
pieces arrive (pipelined recovery, the paper's section 4.3.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from pensieve_jax.cache.drops import Copy
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.device.transfers.arrival_mark import ArrivalMark
from pensieve_jax.device.transfers.host_pool import HostPool
from pensieve_jax.device.transfers.in_flight import InFlight, Mover, is_ready, part
from pensieve_jax.device.transfers.page_copies import PageCopies, Targets
from pensieve_jax.engine.transfers import num_beside_step


class IncomingCopies:
    """Copies from host slots to pages.

    Attributes:
      staged: started, to be scattered before a later step.
      expedited: started in part or whole, to be scattered with the next step.
      mark: has the step's plan arrive before the chunks that are copied beside it.
      num_chunks: started so far.
    """

    def __init__(
        self, storage: KVStorage, host: HostPool, copies: PageCopies, mover: Mover, max_num_staged: int
    ) -> None:
        """Nothing on its way; at most `max_num_staged` chunks will be at a time."""
        self.mark = ArrivalMark(storage.sharding)
        self._sharding, self._groups = storage.sharding, range(len(storage.groups))
        self._host, self._copies, self._mover = host, copies, mover
        self._max_num_staged = max_num_staged
        self._num_beside_step = num_beside_step(max_num_staged, storage.staged_bytes)
        self._queued: deque[InFlight] = deque()
        self._expedited_targets: Targets | None = None
        self._last: Any = None  # a piece of what was started last
        self.staged: deque[InFlight] = deque()
        self.expedited: list[InFlight] = []
        self.num_chunks = 0

    def queue(self, copies: Sequence[Copy]) -> None:
        """Copies to start when there is room; their slots may be given away at once."""
        self._queued.extend(InFlight(copy, self._host.get(copy.slot)) for copy in copies)

    def expedite(self, copy_ids: Collection[int]) -> None:
        """Have the next step wait for these copies; the first group of each starts here.

        That is before the step is planned: it can begin no earlier, and its plan may well arrive after them.

        Raises:
          StepFailedError: the copies could not be started.
        """

        def is_wanted(transfer: InFlight) -> bool:
            return transfer.copy.copy_id in copy_ids

        started, self.staged = part(self.staged, is_wanted)
        waiting, self._queued = part(self._queued, is_wanted)
        self.expedited += [*started, *waiting]
        assert len(self.staged) + len(self.expedited) <= self._max_num_staged
        if self.expedited:
            self._expedited_targets = self._stage(self.expedited)
            self._start(waiting, self._groups[:1])

    def land_first_group(self) -> None:
        """Scatter the first group's pieces of expedited copies, and start the other groups'.

        Copies wait for computation that was dispatched before them, so what is started from here on waits
        for this scatter, and so for the first group. Started together, all groups would arrive together:
        the copy engine takes turns between its streams.

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
        """Copy what is queued and has room, behind what was sent before; raises StepFailedError."""
        room = min(self._num_beside_step, self._max_num_staged - len(self.expedited)) - len(self.staged)
        batch = [self._queued.popleft() for _ in range(min(room, len(self._queued)))]
        if batch:
            with self._mover.dispatching():
                self.mark.place()
        self._start(batch, self._groups)
        self.staged.extend(batch)

    def completed(self) -> list[int]:
        """Scatter what was copied beside the last step; ids since the last call. Raises StepFailedError."""
        landed, self.staged = part(self.staged, self._may_land)
        self._mover.check(transfer for transfer in landed if transfer.is_ready())
        if landed:
            self._scatter(landed, self._stage(landed), self._groups)
        return [transfer.copy.copy_id for transfer in landed]

    def is_arriving(self) -> bool:
        """Whether a chunk waits to be copied from the host, or is in staging, or may still be on its way.

        The last is told by one piece of what was started last: the others arrive at about that time.
        """
        if is_ready(self._last):
            self._last = None
        return bool(self._queued or self.staged or self.expedited) or self._last is not None

    def clear(self) -> None:
        """Forget all of it."""
        self._queued.clear()
        self.staged.clear()
        self.expedited, self._expedited_targets, self._last = [], None, None

    def _may_land(self, transfer: InFlight) -> bool:
        # Beside a step a copy costs the next one only its rest; with none, the next need not wait.
        return transfer.start_step < self._mover.num_steps or transfer.is_ready()

    def _start(self, batch: Sequence[InFlight], groups: range) -> None:
        if batch and groups:
            self._mover.start(batch, self._sharding, groups)
            self._last = batch[-1].target[-1]
        if groups.stop == self._groups.stop:
            self.num_chunks += len(batch)

    def _stage(self, batch: Sequence[InFlight]) -> Targets:
        """Their pages, for `_scatter`."""
        with self._mover.dispatching():
            return self._copies.stage([transfer.copy.page for transfer in batch])

    def _scatter(self, batch: Sequence[InFlight], targets: Targets | None, groups: range) -> None:
        """Write the pieces of `groups` to their pages."""
        assert targets is not None
        with self._mover.dispatching():
            for group in groups:
                self._copies.scatter(group, [transfer.target[group] for transfer in batch], targets)
