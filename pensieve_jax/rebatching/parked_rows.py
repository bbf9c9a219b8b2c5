"""Parked rows: prefilled rows that wait for a row of the ring, and suspended rows.

Owns: the location of each row (device, host, or on its way) within both budgets; the choice of rows that
leave the device, and of rows that are dropped if host memory is full.
Does not know: the ring, or why room is needed.

A row that leaves the device keeps its device memory until its copy is done. If the caller needs the memory at
once, it launches `Park` with `waits`, and the runner blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax.rebatching.launches import FreeRow, Launch, Park, Return
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.queue import rank
from pensieve_jax.rebatching.ring_shapes import RingShapes


class ParkedRows:
    """Parked rows of one engine.

    Attributes:
      sizes: bytes of every row, by its query.
      room_bytes: device memory available to parked rows.
      max_kv_bytes: peak device memory of parked rows and ring, also within a step.
    """

    def __init__(self, ring_shapes: RingShapes, host_bytes: int) -> None:
        """Start without rows. Until there is a ring, parked rows may use the whole budget."""
        self._ring_shapes, self._host_bytes = ring_shapes, host_bytes
        self.sizes: dict[Query, int] = {}
        self.room_bytes = ring_shapes.kv_bytes
        self.max_kv_bytes = 0

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def device_bytes(self) -> int:
        """Device memory of the parked rows."""
        return self._bytes(KVLocation.DEVICE, KVLocation.LEAVING)

    @property
    def host_bytes(self) -> int:
        """Host memory of the parked rows, including rows that are being copied there."""
        return self._bytes(KVLocation.HOST, KVLocation.LEAVING)

    @property
    def kv_bytes(self) -> int:
        """Device memory of the parked rows and the ring."""
        return self._ring_shapes.kv_bytes - self.room_bytes + self.device_bytes

    def note(self) -> None:
        """Update the peak memory after rows or ring have grown."""
        self.max_kv_bytes = max(self.max_kv_bytes, self.kv_bytes)
        assert self.kv_bytes <= self._ring_shapes.kv_bytes

    def put(self, query: Query, length: int) -> None:
        """Record a new row of `length` in device memory. There must be room."""
        query.location = KVLocation.DEVICE
        self.sizes[query] = self._ring_shapes.row_bytes(length)
        self.note()

    def take(self, query: Query) -> None:
        """Remove a row that was copied into the ring."""
        del self.sizes[query]

    def settle(self, has_left: Callable[[int], bool]) -> None:
        """Record which copies to host memory are done."""
        for query in self.sizes:
            if query.location is KVLocation.LEAVING and has_left(query.serial):
                query.location = KVLocation.HOST

    def make_room(
        self,
        num_bytes: int,
        launches: list[Launch],
        *,
        room_bytes: int | None = None,
        keep: Query | None = None,
    ) -> bool:
        """Free `num_bytes` of device memory by moving rows out; return False if that is impossible.

        Queries that are served last leave first.

        Args:
          num_bytes: bytes needed.
          launches: list that receives the launches.
          room_bytes: new total room, if it is about to change.
          keep: query whose row stays.
        """
        room = self.room_bytes if room_bytes is None else room_bytes
        stays = self.sizes[keep] if keep is not None and keep.location is KVLocation.LEAVING else 0
        here = [query for query in self.sizes if query.location is KVLocation.DEVICE and query is not keep]
        here.sort(key=rank)
        while self._bytes(KVLocation.DEVICE) + stays + num_bytes > room and here:
            self._leave(here.pop(), launches, keep)
        leaving = [
            query for query in self.sizes if query.location is KVLocation.LEAVING and query is not keep
        ]
        while self.device_bytes + num_bytes > room and leaving:
            query = leaving.pop(0)
            query.location = KVLocation.HOST
            launches.append(Park(query.serial, waits=True))
        return self.device_bytes + num_bytes <= room

    def begin_to_make_room(self, num_bytes: int, newcomer: Query, launches: list[Launch]) -> None:
        """Start to copy rows of queries that rank after `newcomer` to host memory, while it has room.

        No launch waits for the copies. Rows of queries that are served sooner stay, since they would have to
        come back at once.
        """
        behind = rank(newcomer)
        here = [one for one in self.sizes if one.location is KVLocation.DEVICE and rank(one) > behind]
        here.sort(key=rank)
        while here and self._bytes(KVLocation.DEVICE) + num_bytes > self.room_bytes:
            query = here.pop()
            if self.host_bytes + self.sizes[query] > self._host_bytes:
                return
            self._leave(query, launches, newcomer)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` of device memory are free now."""
        return self.device_bytes + num_bytes <= self.room_bytes

    def bring(self, query: Query, launches: list[Launch]) -> None:
        """Copy a row back from host memory. There must be room."""
        assert query.location is KVLocation.HOST
        query.location = KVLocation.DEVICE
        query.note_copied_back()
        launches.append(Return(query.serial))
        self.note()

    def drop(self, query: Query, launches: list[Launch]) -> None:
        """Drop a row, in device or host memory; its query is recomputed later."""
        del self.sizes[query]
        launches.append(FreeRow(query.serial))
        query.location = KVLocation.NOT_COMPUTED

    def _leave(self, query: Query, launches: list[Launch], keep: Query | None) -> None:
        """Copy a row to host memory. If that is full, drop rows there that are served later, or this one."""
        behind = rank(query)
        there = [
            one
            for one in self.sizes
            if one.location is KVLocation.HOST and one is not keep and rank(one) > behind
        ]
        num_over = self.host_bytes + self.sizes[query] - self._host_bytes
        if num_over > sum(self.sizes[one] for one in there):
            self.drop(query, launches)
            return
        there.sort(key=rank)
        while self.host_bytes + self.sizes[query] > self._host_bytes:
            self.drop(there.pop(), launches)
        query.location = KVLocation.LEAVING
        launches.append(Park(query.serial, waits=False))

    def _bytes(self, *places: KVLocation) -> int:
        return sum(size for query, size in self.sizes.items() if query.location in places)
