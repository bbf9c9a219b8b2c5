"""Transfers of chunks between the device's pools and pinned host memory, beside the steps.

Owns: the order of gathers, scatters and copies around the steps, and whose turn it is.
Does not know: whose chunks they are, or what a step computes.

Every copy is enqueued before a step is dispatched and runs beside it, because the runtime lets a copy into a
new buffer wait for whatever computation was dispatched before it. What is small and urgent (a step's plan,
page numbers) goes first. `outgoing` and `incoming` are the two ways. Copies that start together are one
batched call, and arrive in no order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import jax

from pensieve_jax.cache.drops import Copy
from pensieve_jax.device.kv_storage import DevicePools, KVStorage
from pensieve_jax.device.page_budget import staging_bytes
from pensieve_jax.device.transfers.copy_batches import copy_arrays
from pensieve_jax.device.transfers.host_pool import HostPool
from pensieve_jax.device.transfers.in_flight import Mover
from pensieve_jax.device.transfers.incoming import IncomingCopies
from pensieve_jax.device.transfers.outgoing import OutgoingCopies
from pensieve_jax.device.transfers.page_copies import PageCopies
from pensieve_jax.engine.transfers import MAX_HELD_STEPS, Ended, window
from pensieve_jax.runtime.compilation import CompilationJob


class DeviceTransfers:
    """See `Transfers` for the protocol and the module for how it is kept.

    Attributes:
      retrieval_priority: as given; it may be changed between steps.
      staging_bytes: the most device memory, per device, that copies in flight take.
      num_preparations: parts of `grow`, and `jobs`, for whoever shows progress.
    """

    def __init__(
        self,
        storage: KVStorage,
        pools: DevicePools,
        *,
        cpu_pages: int,
        max_num_staged_pages: int,
        retrieval_priority: bool,
        cpu_bytes: int | None = None,
    ) -> None:
        """Take no memory yet.

        Args:
          storage: shape and placement of pages and chunks.
          pools: that chunks come from and go to.
          cpu_pages: host slots; without any nothing is compiled, and nothing may be copied.
          max_num_staged_pages: chunks that are in flight at once, each way.
          retrieval_priority: start no copy to the host while one from it is in flight, unless others need
            its room in staging or it has waited for some steps (the paper's section 5, prioritized
            retrieval).
          cpu_bytes: what `cpu_pages` were made of, if they were: refusals name it.

        Raises:
          ConfigError: the machine has less memory than that.
        """
        self._storage, self._num_groups = storage, len(storage.groups)
        self._window = window(max_num_staged_pages)
        self.retrieval_priority = retrieval_priority
        self._host = HostPool(storage, cpu_pages, min(max_num_staged_pages, cpu_pages), cpu_bytes)
        self._copies = PageCopies(storage, pools, max_num_staged_pages)
        self._mover = Mover()
        parts = storage, self._host, self._copies, self._mover, max_num_staged_pages
        self._outgoing, self._incoming = OutgoingCopies(*parts), IncomingCopies(*parts)
        self.staging_bytes = staging_bytes(cpu_pages, max_num_staged_pages, storage.staged_bytes)
        self.num_preparations = self._host.num_pieces + self._copies.num_executables + 1 if cpu_pages else 0

    def grow(self) -> Iterator[str]:
        """Take all host memory; yields after every part of it.

        Raises:
          ConfigError: the runtime does not get it.
        """
        yield from self._host.grow()

    def jobs(self) -> Iterator[CompilationJob]:
        """What is to be compiled before anything moves."""
        if self._host.num_slots:
            yield self._incoming.mark.job()
            yield from self._copies.jobs()

    def rehearse(self) -> None:
        """Run every executable once, which loads its kernels; page 0 keeps its contents."""
        if not self._host.num_slots:
            return
        self._incoming.mark.place()
        for num_chunks in self._copies.sizes:
            pages = [0] * num_chunks
            chunks = self._copies.gather(pages)
            _ = chunks[0].is_lost  # page 0 may hold anything: asking only loads what answers
            pieces = [piece for chunk in chunks for piece in chunk.pieces]
            pinned = copy_arrays(pieces, self._storage.host_sharding)
            staged = jax.block_until_ready(copy_arrays(pinned, self._storage.sharding))
            targets = self._copies.stage(pages)
            for group in range(self._num_groups):
                self._copies.scatter(group, staged[group :: self._num_groups], targets)

    @property
    def temp_bytes(self) -> int:
        """Bytes per device that moving pages takes for a moment, beside what is staged."""
        return self._copies.temp_bytes

    def swap_out(self, copies: Sequence[Copy]) -> None:
        """Gather pages into staging, blocking where that is full; see `Transfers`."""
        assert not self._incoming.expedited, "no step was dispatched for expedited copies"
        self._outgoing.gather(copies)

    def swap_in(self, copies: Sequence[Copy]) -> None:
        """Queue copies, to be started right before the next step is dispatched; see `Transfers`.

        What was gathered is copied out now that it is known whether anything is on its way in.
        """
        self._incoming.queue(copies)
        is_held = self.retrieval_priority and self._incoming.is_arriving()
        # Somebody may wait for what is held back, while others are fetched all the time.
        if not is_held or self._outgoing.num_held_steps() >= MAX_HELD_STEPS:
            self._outgoing.start()

    def expedite(self, copy_ids: Collection[int]) -> None:
        """Have the next step wait for these copies; see `Transfers`."""
        self._incoming.expedite(set(copy_ids))

    def start(self) -> None:
        """Let the first group of expedited copies land; start the others, and what is queued and has room.

        Called by the runner when the little that the step itself needs is on its way to the device: what is
        started later arrives later.

        Raises:
          StepFailedError: the device refused.
        """
        self._incoming.land_first_group()
        self._incoming.start_queued()

    def land(self, group: int) -> None:
        """Called by the runner right before it dispatches a step's `group` of layers, all groups in order.

        Raises:
          StepFailedError: expedited copies could not be scattered.
        """
        self._incoming.land(group)
        if group == self._num_groups - 1:
            self._mover.num_steps += 1

    def completed(self) -> Ended:
        """Scatter what was copied beside the last step, and name it; see `Transfers`."""
        arrived, lost = self._outgoing.completed()
        return Ended([*arrived, *self._incoming.completed()], lost)

    def wait(self) -> None:
        """Block until some copies have ended; see `Transfers`."""
        if self._outgoing.done or self._outgoing.lost:
            return
        self._incoming.start_queued()
        if not self._incoming.staged:
            self._outgoing.start()
        moving = self._incoming.staged or self._outgoing.in_flight
        self._mover.wait_for(moving, min(len(moving), self._window))

    def reset(self) -> None:
        """Forget what is in flight; what slots hold stays good. The runner calls it, before new pools."""
        self._outgoing.clear()
        self._incoming.clear()

    def stats(self) -> dict[str, int | float]:
        num_out, num_in = self._outgoing.num_chunks, self._incoming.num_chunks
        return {
            "swapped_out_bytes": num_out * self._storage.slot_bytes,
            "swapped_in_bytes": num_in * self._storage.slot_bytes,
            "num_swap_out_copies": num_out * self._num_groups,
            "num_swap_in_copies": num_in * self._num_groups,
            "swap_dispatch_s": self._mover.dispatch_s,
            "transfer_stall_s": self._mover.stall_s,
        }
