"""Transfers of chunks between the device's pools and pinned host memory, beside the steps.

Owns: the order of gathers, scatters and copies around the steps, the staging arrays of copies in flight, and
their count.
Does not know: whose chunks they are, or what a step computes.
Called by: the engine, through the `Transfers` protocol, and by `model_runner`, which lets rushed copies land.

Every copy is enqueued before a step is dispatched and runs beside it, because the runtime lets a copy into a
new buffer wait for whatever computation was dispatched before it; and the copy engines serve in order, so
what is small and urgent (a step's plan, page numbers) goes first. Out: pages are gathered into staging
arrays, in program order with the steps, and copied to the host from there. In: chunks are copied into staging
arrays beside one step and scattered into the pools before the next. Rushed copies are scattered before the
very next step, group by group of layers: the first computes while the next one's chunks arrive (the paper's
section 5, pipelined transfer). Copies that start together are one batched call, and arrive in no order.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from pensieve_jax.cache.copies import Copy
from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.engine.batched_copies import copy_arrays
from pensieve_jax.engine.device_pools import DevicePools
from pensieve_jax.engine.host_pool import HostPool
from pensieve_jax.engine.in_flight import InFlight, is_ready, part
from pensieve_jax.engine.kv_storage import KVStorage
from pensieve_jax.engine.page_copies import PageCopies, Targets

_MAX_HELD_STEPS = 4


class DeviceTransfers:
    """See `Transfers` for the protocol and the module for how it is kept.

    Attributes:
      retrieval_priority: as given; it may be changed between steps.
      staging_bytes: the most device memory, per device, that copies in flight take.
      num_preparations: parts of `prepare`, for whoever shows progress.
    """

    def __init__(
        self,
        storage: KVStorage,
        pools: DevicePools,
        *,
        cpu_pages: int,
        max_num_staged_pages: int,
        retrieval_priority: bool,
    ) -> None:
        """Take no memory yet.

        Args:
          storage: shape and placement of pages and chunks.
          pools: that chunks come from and go to.
          cpu_pages: host slots; without any nothing is compiled, and nothing may be copied.
          max_num_staged_pages: chunks that are in flight at once, each way.
          retrieval_priority: start no copy to the host while one from it is in flight, unless staging is
            full or it has waited for some steps (the paper's section 5, prioritized retrieval).

        Raises:
          ConfigError: the machine has less memory than that.
        """
        self._storage, self._num_groups = storage, len(storage.groups)
        self._max_num_staged, self.retrieval_priority = max_num_staged_pages, retrieval_priority
        # Where nothing else goes on, one half of staging is refilled at a time while the other half moves.
        self._window = max(max_num_staged_pages // 2, 1)
        self._host = HostPool(storage, cpu_pages, num_spare=min(max_num_staged_pages, cpu_pages))
        self._copies = PageCopies(storage, pools, max_num_staged_pages)
        is_used = cpu_pages > 0
        # In: what a step scatters is freed after it, and the next copies are started before it.
        self.staging_bytes = 3 * max_num_staged_pages * storage.page_bytes if is_used else 0
        self.num_preparations = self._host.num_pieces + self._copies.num_executables if is_used else 0
        self._num_steps = 0
        self._num_chunks_out, self._num_chunks_in = 0, 0
        self._dispatch_s, self._stall_s = 0.0, 0.0
        self._outgoing: deque[InFlight] = deque()  # in the order of their gathers
        self._queued: deque[InFlight] = deque()
        self._staged: deque[InFlight] = deque()  # started, to be scattered before a later step
        self._rushed: list[InFlight] = []  # started, to be scattered with the next step
        self._done: list[int] = []
        self._rushed_targets: Targets | None = None
        self._last_in: Any = None  # a piece of the copy from the host that ends last

    def prepare(self) -> Iterator[str]:
        """Take all host memory and compile all there is; yields the name of every part when it is done.

        Raises:
          ConfigError: the runtime does not get the host memory.
        """
        if not self._host.num_slots:
            return
        yield from self._host.grow()
        yield from self._copies.compile_all()
        for num_chunks in self._copies.sizes:  # a first run loads kernels; page 0 keeps its contents
            pages = [0] * num_chunks
            pieces = [piece for chunk in self._copies.gather(pages) for piece in chunk]
            pinned = copy_arrays(pieces, self._storage.host_sharding)
            staged = jax.block_until_ready(copy_arrays(pinned, self._storage.sharding))
            targets = self._copies.stage(pages)
            for group in range(self._num_groups):
                self._copies.scatter(group, staged[group :: self._num_groups], targets)

    def swap_out(self, copies: Sequence[Copy]) -> None:
        """Gather pages into staging, blocking where that is full, and copy them out; see `Transfers`."""
        assert not self._rushed, "no step was dispatched for rushed copies"
        rest = list(copies)
        while rest:
            self._make_room_out(min(len(rest), self._window))
            room = self._max_num_staged - len(self._outgoing)
            batch, rest = rest[:room], rest[room:]
            with self._dispatching():
                chunks = self._copies.gather([copy.page for copy in batch])
            for copy, chunk in zip(batch, chunks, strict=True):
                self._host.clear(copy.slot)
                self._outgoing.append(InFlight(copy, chunk, start_step=self._num_steps))
        if not (self.retrieval_priority and self._is_arriving()) or self._held_long():
            self._start_out()

    def swap_in(self, copies: Sequence[Copy]) -> None:
        """Queue copies, to be started right before the next step is dispatched; see `Transfers`."""
        self._queued.extend(InFlight(copy, self._host.get(copy.slot)) for copy in copies)

    def rush(self, copy_ids: Collection[int]) -> None:
        """Have the next step wait for these copies; see `Transfers`."""
        wanted = set(copy_ids)
        self._done = [copy_id for copy_id in self._done if copy_id not in wanted]

        def is_wanted(transfer: InFlight) -> bool:
            return transfer.copy.copy_id in wanted

        started, self._staged = part(self._staged, is_wanted)
        waiting, self._queued = part(self._queued, is_wanted)
        self._rushed += [*started, *waiting]
        assert len(self._staged) + len(self._rushed) <= self._max_num_staged
        if self._rushed:
            # Before the step is planned: it can begin no earlier, and its plan may well arrive after them.
            self._rushed_targets = self._copies.stage([transfer.copy.page for transfer in self._rushed])
            self._start_in(waiting, range(1))

    def start(self) -> None:
        """Let the first group of rushed copies land; start the others, and what is queued and has room.

        Called by the runner when the little that the step itself needs is on its way to the device: what is
        started later arrives later.

        Raises:
          StepFailedError: the copies could not be started, or rushed ones not be scattered.
        """
        if self._rushed:
            # Copies wait for computation that was dispatched before them, so those that start now wait for
            # this scatter. Started together, all groups would arrive together: copies take turns.
            self._scatter(self._rushed, self._rushed_targets, range(1))
            behind = [transfer for transfer in self._rushed if len(transfer.target) < self._num_groups]
            self._start_in(behind, range(1, self._num_groups))
        self._start_queued()

    def land(self, group: int) -> None:
        """Called by the runner right before it dispatches a step's `group` of layers, all groups in order.

        Raises:
          StepFailedError: rushed copies could not be scattered.
        """
        if self._rushed and group:
            self._scatter(self._rushed, self._rushed_targets, range(group, group + 1))
        if group == self._num_groups - 1:
            self._rushed, self._rushed_targets = [], None
            self._num_steps += 1

    def completed(self) -> list[int]:
        """Scatter what was copied beside the last step, and name it; see `Transfers`."""
        self._finish_out()

        def has_landed(transfer: InFlight) -> bool:
            # Beside a step a copy costs the next one only its rest; with none, the next need not wait.
            return transfer.start_step < self._num_steps or transfer.is_ready()

        landed, self._staged = part(self._staged, has_landed)
        self._check([transfer for transfer in landed if transfer.is_ready()])
        self._scatter(landed)
        self._done += [transfer.copy.copy_id for transfer in landed]
        done, self._done = self._done, []
        return done

    def wait(self) -> None:
        """Block until some copies have ended; see `Transfers`."""
        if self._done:
            return
        self._start_queued()
        if not self._staged:
            self._start_out()
        moving = self._staged or self._outgoing
        self._await(moving, min(len(moving), self._window))

    def reset(self) -> None:
        """Forget what is in flight; what slots hold stays good. The runner calls it, before new pools."""
        for queue in (self._outgoing, self._queued, self._staged):
            queue.clear()
        self._rushed, self._rushed_targets, self._done, self._last_in = [], None, [], None

    def stats(self) -> dict[str, int | float]:
        """See `Transfers`."""
        chunk_bytes = self._storage.chunk_bytes
        return {
            "swapped_out_bytes": self._num_chunks_out * chunk_bytes,
            "swapped_in_bytes": self._num_chunks_in * chunk_bytes,
            "num_swap_out_copies": self._num_chunks_out * self._num_groups,
            "num_swap_in_copies": self._num_chunks_in * self._num_groups,
            "swap_dispatch_s": self._dispatch_s,
            "transfer_stall_s": self._stall_s,
        }

    def _held_long(self) -> bool:
        """Whether a copy out has waited for retrieval so long that somebody may be waiting for it."""
        waiting = (transfer for transfer in self._outgoing if not transfer.target)
        return any(self._num_steps - transfer.start_step >= _MAX_HELD_STEPS for transfer in waiting)

    def _is_arriving(self) -> bool:
        if is_ready(self._last_in):
            self._last_in = None
        return bool(self._queued or self._staged or self._rushed) or self._last_in is not None

    def _room_in(self) -> int:
        return self._max_num_staged - len(self._staged) - len(self._rushed)

    def _make_room_out(self, num_chunks: int) -> None:
        """Block until `num_chunks` more can be staged on their way out."""
        self._finish_out()
        num_over = len(self._outgoing) + num_chunks - self._max_num_staged
        if num_over > 0:
            self._start_out()
            self._await(self._outgoing, num_over)
            self._finish_out()

    def _start_out(self) -> None:
        waiting = [transfer for transfer in self._outgoing if not transfer.target]
        self._start(waiting, self._storage.host_sharding, range(self._num_groups))
        self._num_chunks_out += len(waiting)

    def _start_queued(self) -> None:
        batch = [self._queued.popleft() for _ in range(min(self._room_in(), len(self._queued)))]
        self._start_in(batch, range(self._num_groups))
        self._staged.extend(batch)

    def _start_in(self, batch: Sequence[InFlight], groups: range) -> None:
        if batch and groups:
            self._start(batch, self._storage.sharding, groups)
            self._num_chunks_in += (
                len(batch) if groups.stop == self._num_groups else 0
            )  # by their last pieces
            self._last_in = batch[-1].target[-1]

    def _start(self, batch: Sequence[InFlight], sharding: jax.sharding.NamedSharding, groups: range) -> None:
        """Copy the pieces of `groups`, which are the next of all in `batch`, to `sharding` in one call."""
        if not batch:
            return
        sources = [transfer.source[group] for group in groups for transfer in batch]
        with self._dispatching():
            targets = copy_arrays(sources, sharding)
        for i, transfer in enumerate(batch):
            transfer.target += targets[i :: len(batch)]
            transfer.start_step = self._num_steps

    def _scatter(
        self,
        batch: Sequence[InFlight],
        targets: Targets | None = None,
        groups: range | None = None,
    ) -> None:
        """Write the pieces of `groups`, or of all, to their pages, which `targets` are if given."""
        if not batch:
            return
        with self._dispatching():
            if targets is None:
                targets = self._copies.stage([transfer.copy.page for transfer in batch])
            for group in range(self._num_groups) if groups is None else groups:
                self._copies.scatter(group, [transfer.target[group] for transfer in batch], targets)

    def _finish_out(self) -> None:
        """Let slots hold what has arrived in host memory, which may be in another order than it was sent."""
        ended, self._outgoing = part(self._outgoing, InFlight.is_ready)
        self._check(ended)
        for transfer in ended:
            self._host.put(transfer.copy.slot, transfer.target)
            self._done.append(transfer.copy.copy_id)

    def _check(self, ended: Sequence[InFlight]) -> None:
        """Raise StepFailedError if one of them ended badly."""
        try:
            jax.block_until_ready([transfer.target for transfer in ended])
        except jax.errors.JaxRuntimeError as error:
            raise StepFailedError(f"a copy between tiers failed on the device: {error}") from error

    def _await(self, moving: Collection[InFlight], count: int) -> None:
        """Block until `count` of them have ended, whichever; whether well is for `completed` to say."""
        start = time.perf_counter()
        while True:
            waiting = [transfer for transfer in moving if not transfer.is_ready()]
            if len(moving) - len(waiting) >= count:
                break
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                jax.block_until_ready(waiting[0].target)
        self._stall_s += time.perf_counter() - start

    @contextlib.contextmanager
    def _dispatching(self) -> Iterator[None]:
        """Count the host's time; a refusal of the device is a failed step."""
        start = time.perf_counter()
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise StepFailedError(f"a copy between tiers could not be started: {error}") from error
        finally:
            self._dispatch_s += time.perf_counter() - start
