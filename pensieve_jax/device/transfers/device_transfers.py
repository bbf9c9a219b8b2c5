"""Transfers of chunks between the device's pools and pinned host memory, concurrent with the steps.

Owns: the order of gathers, scatters and copies relative to the steps, and which direction may copy.
Does not know: whose chunks they are, or what a step computes.

Every copy is enqueued before a step is dispatched and runs beside it, because the runtime makes a copy into a
new buffer wait for all computation dispatched before it. Small, urgent data (a step's plan, page numbers) is
sent first. `outgoing` and `incoming` are the two directions. Copies that start together are one batched call
and arrive in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import jax

from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.device.kv_storage import DevicePools, KVStorage
from pensieve_jax.device.page_budget import staging_bytes
from pensieve_jax.device.transfers.copy_batches import copy_arrays
from pensieve_jax.device.transfers.host_pool import HostPool
from pensieve_jax.device.transfers.in_flight import CopyDispatcher
from pensieve_jax.device.transfers.incoming import IncomingCopies
from pensieve_jax.device.transfers.outgoing import OutgoingCopies
from pensieve_jax.device.transfers.page_copies import PageCopies
from pensieve_jax.engine.transfers import MAX_HELD_STEPS, Ended, window
from pensieve_jax.runtime.compilation import CompilationJob


class DeviceTransfers:
    """Transfers of one runner; see `Transfers` for the protocol, and the module for its implementation.

    Attributes:
      retrieval_priority: see `__init__`; it may be changed between steps.
      staging_bytes: the most device memory, per device, that copies in flight take.
      num_preparations: number of pieces of `grow` and of `jobs`, for a progress display.
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
        """Allocate nothing yet.

        Args:
          storage: shape and placement of pages and chunks.
          pools: the pools that chunks are copied from and to.
          cpu_pages: number of host slots; with 0 nothing is compiled, and nothing may be copied.
          max_num_staged_pages: maximum number of chunks in flight at once, in each direction.
          retrieval_priority: start no copy to the host while one from it is in flight, unless its room in
            staging is needed or it has waited for some steps (the paper's section 5, prioritized retrieval).
          cpu_bytes: the size that `cpu_pages` was derived from, if any; error messages name it.

        Raises:
          ConfigError: the machine has less memory than `cpu_pages` need.
        """
        self._storage, self._num_groups = storage, len(storage.groups)
        self._window = window(max_num_staged_pages)
        self.retrieval_priority = retrieval_priority
        self._host = HostPool(storage, cpu_pages, min(max_num_staged_pages, cpu_pages), cpu_bytes)
        self._copies = PageCopies(storage, pools, max_num_staged_pages)
        self._dispatcher = CopyDispatcher()
        parts = storage, self._host, self._copies, self._dispatcher, max_num_staged_pages
        self._outgoing, self._incoming = OutgoingCopies(*parts), IncomingCopies(*parts)
        self.staging_bytes = staging_bytes(cpu_pages, max_num_staged_pages, storage.staged_bytes)
        self.num_preparations = self._host.num_pieces + self._copies.num_executables + 1 if cpu_pages else 0

    def grow(self) -> Iterator[str]:
        """Allocate all host memory; yield after every piece.

        Raises:
          ConfigError: the runtime cannot allocate it.
        """
        yield from self._host.grow()

    def jobs(self) -> Iterator[CompilationJob]:
        """Yield the compilations that must end before anything moves."""
        if self._host.num_slots:
            yield self._incoming.barrier.job()
            yield from self._copies.jobs()

    def rehearse(self) -> None:
        """Run every executable once to load its kernels; page 0 keeps its contents."""
        if not self._host.num_slots:
            return
        self._incoming.barrier.dispatch()
        for num_chunks in self._copies.sizes:
            pages = [0] * num_chunks
            chunks = self._copies.gather(pages)
            _ = chunks[0].is_lost  # loads the kernel; the value is irrelevant, as page 0 may hold anything
            pieces = [piece for chunk in chunks for piece in chunk.pieces]
            pinned = copy_arrays(pieces, self._storage.host_sharding)
            staged = jax.block_until_ready(copy_arrays(pinned, self._storage.sharding))
            targets = self._copies.stage(pages)
            for group in range(self._num_groups):
                self._copies.scatter(group, staged[group :: self._num_groups], targets)

    @property
    def temp_bytes(self) -> int:
        """Bytes per device that moving pages takes temporarily, beside staging memory."""
        return self._copies.temp_bytes

    def swap_out(self, copies: Sequence[ChunkCopy]) -> None:
        """Gather pages into staging memory, blocking while that is full; see `Transfers`."""
        assert not self._incoming.expedited, "no step was dispatched for expedited copies"
        self._outgoing.gather(copies)

    def swap_in(self, copies: Sequence[ChunkCopy]) -> None:
        """Queue copies to start right before the next step is dispatched; see `Transfers`.

        Gathered chunks are copied to the host here, once it is known whether any chunk is coming in.
        """
        self._incoming.queue(copies)
        is_held = self.retrieval_priority and self._incoming.is_arriving()
        # A request may wait for the chunks held back while other chunks keep coming in.
        if not is_held or self._outgoing.num_held_steps() >= MAX_HELD_STEPS:
            self._outgoing.start()

    def expedite(self, copy_ids: Collection[int]) -> None:
        """Make the next step wait for these copies; see `Transfers`."""
        self._incoming.expedite(set(copy_ids))

    def start(self) -> None:
        """Scatter the first group of expedited copies; start the others, and queued copies that have room.

        The runner calls this once the step's own small inputs are on their way to the device, because
        what starts later arrives later.

        Raises:
          StepFailedError: the device refused.
        """
        self._incoming.land_first_group()
        self._incoming.start_queued()

    def land(self, group: int) -> None:
        """Scatter expedited copies of one `group` of layers.

        The runner calls this right before it dispatches that group of a step, for all groups in order.

        Raises:
          StepFailedError: expedited copies could not be scattered.
        """
        self._incoming.land(group)
        if group == self._num_groups - 1:
            self._dispatcher.num_steps += 1

    def completed(self) -> Ended:
        """Scatter what was copied beside the last step and return all ended copies; see `Transfers`."""
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
        self._dispatcher.wait_for(moving, min(len(moving), self._window))

    def reset(self) -> None:
        """Forget the copies in flight; slots stay valid. The runner calls this before it makes new pools."""
        self._outgoing.clear()
        self._incoming.clear()

    def stats(self) -> dict[str, int | float]:
        num_out, num_in = self._outgoing.num_chunks, self._incoming.num_chunks
        return {
            "swapped_out_bytes": num_out * self._storage.slot_bytes,
            "swapped_in_bytes": num_in * self._storage.slot_bytes,
            "num_swap_out_copies": num_out * self._num_groups,
            "num_swap_in_copies": num_in * self._num_groups,
            "swap_dispatch_s": self._dispatcher.dispatch_s,
            "transfer_stall_s": self._dispatcher.stall_s,
        }
