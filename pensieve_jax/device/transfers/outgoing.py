"""Copies to the host: gathered from pages, held back or copied, then stored in slots.

Owns: the staging arrays of copies to the host, and their maximum number.
Does not know: copies from the host, or which direction may copy now.

Pages are gathered in program order with the steps, so the next user of a page may write it at once. The
copies that follow end in any order, because the copy engine alternates between its streams. A chunk that
could not be packed is copied like the others, since the host learns of it too late; its slot stays empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pensieve_jax.cache.drops import ChunkCopy
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.device.transfers.host_pool import HostPool
from pensieve_jax.device.transfers.in_flight import CopyDispatcher, InFlight, partition
from pensieve_jax.device.transfers.page_copies import PageCopies
from pensieve_jax.engine.transfers import Ended, window


class OutgoingCopies:
    """Copies from pages to host slots.

    Attributes:
      in_flight: copies in the order of their gathers, started or not.
      done: ids of successful copies that `completed` has not returned yet; their slots hold the chunks.
      lost: ids of incomplete copies that `completed` has not returned yet.
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
        self._host_sharding, self._groups = storage.host_sharding, range(len(storage.groups))
        self._host, self._copies, self._dispatcher = host, copies, dispatcher
        self._max_num_staged = max_num_staged
        self.in_flight: deque[InFlight] = deque()
        self.done: list[int] = []
        self.lost: list[int] = []
        self.num_chunks = 0

    def gather(self, copies: Sequence[ChunkCopy]) -> None:
        """Read the pages in program order. Without room, start earlier copies and block.

        Raises:
          StepFailedError: the device refused, or an earlier copy has failed.
        """
        self._finish()
        fits = len(self.in_flight) + len(copies) <= self._max_num_staged
        size = max(len(copies), 1) if fits else window(self._max_num_staged)
        for start in range(0, len(copies), size):
            batch = copies[start : start + size]
            self._make_room(len(batch))
            with self._dispatcher.dispatching():
                chunks = self._copies.gather([copy.page for copy in batch])
            for copy, chunk in zip(batch, chunks, strict=True):
                self._host.clear(copy.slot)
                transfer = InFlight(copy, chunk.pieces, start_step=self._dispatcher.num_steps, gathered=chunk)
                self.in_flight.append(transfer)
            if start + size < len(copies):
                self.start()

    def start(self) -> None:
        """Copy the chunks that are held back; raise StepFailedError."""
        held = [transfer for transfer in self.in_flight if not transfer.target]
        self._dispatcher.start(held, self._host_sharding, self._groups)
        self.num_chunks += len(held)

    def num_held_steps(self) -> int:
        """Return the number of steps dispatched since the oldest chunk held back was gathered."""
        now = self._dispatcher.num_steps
        return now - min((one.start_step for one in self.in_flight if not one.target), default=now)

    def completed(self) -> Ended:
        """Store arrived chunks in their slots; return ids since the last call. Raises StepFailedError."""
        self._finish()
        ended = Ended(self.done, self.lost)
        self.done, self.lost = [], []
        return ended

    def clear(self) -> None:
        """Forget all copies, held back and started."""
        self.in_flight.clear()
        self.done.clear()
        self.lost.clear()

    def _make_room(self, num_chunks: int) -> None:
        """Block until `num_chunks` more can be staged."""
        num_over = len(self.in_flight) + num_chunks - self._max_num_staged
        if num_over > 0:
            self.start()
            self._dispatcher.wait_for(self.in_flight, num_over)
            self._finish()

    def _finish(self) -> None:
        ended, self.in_flight = partition(self.in_flight, InFlight.is_ready)
        self._dispatcher.check(ended)
        for transfer in ended:
            if self._dispatcher.is_lost(transfer):
                self.lost.append(transfer.copy.copy_id)
            else:
                self._host.put(transfer.copy.slot, transfer.target)
                self.done.append(transfer.copy.copy_id)
