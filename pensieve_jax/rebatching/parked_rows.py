"""Rows beside the ring: prefilled ones that wait for a row of it, and suspended ones.

Owns: which of them are in device memory, in host memory, or on their way, within both budgets; who has to
leave the device, and who is given up where host memory is full.
Does not know: the ring, or why room is needed.

What leaves the device keeps its memory there until its copy is done. Whoever cannot wait for that says so,
and the runner waits.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve_jax.rebatching.lattice import Lattice
from pensieve_jax.rebatching.launches import FreeRow, Launch, Park, Return
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.queue import rank


class ParkedRows:
    """Of one engine.

    Attributes:
      sizes: bytes of every row, by whose it is.
      room_bytes: of device memory that rows may take.
      max_kv_bytes: the most that rows and ring took together, within a step as well.
    """

    def __init__(self, lattice: Lattice, host_bytes: int) -> None:
        """Empty; the ring is not there yet, so it may take all of the budget."""
        self._lattice, self._host_bytes = lattice, host_bytes
        self.sizes: dict[Query, int] = {}
        self.room_bytes = lattice.kv_bytes
        self.max_kv_bytes = 0

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def device_bytes(self) -> int:
        """What rows take of the device's memory."""
        return self._bytes(KVLocation.DEVICE, KVLocation.LEAVING)

    @property
    def host_bytes(self) -> int:
        """What rows take, or are about to take, of the host's memory."""
        return self._bytes(KVLocation.HOST, KVLocation.LEAVING)

    @property
    def kv_bytes(self) -> int:
        """What rows and ring take of the device's memory."""
        return self._lattice.kv_bytes - self.room_bytes + self.device_bytes

    def note(self) -> None:
        """Rows or ring take more than before."""
        self.max_kv_bytes = max(self.max_kv_bytes, self.kv_bytes)
        assert self.kv_bytes <= self._lattice.kv_bytes

    def put(self, query: Query, length: int) -> None:
        """It has a row of this length in device memory now; there must be room."""
        query.place = KVLocation.DEVICE
        self.sizes[query] = self._lattice.row_bytes(length)
        self.note()

    def take(self, query: Query) -> None:
        """Its row is used up."""
        del self.sizes[query]

    def settle(self, has_left: Callable[[int], bool]) -> None:
        """Note whose copy to host memory is done."""
        for query in self.sizes:
            if query.place is KVLocation.LEAVING and has_left(query.serial):
                query.place = KVLocation.HOST

    def make_room(
        self,
        num_bytes: int,
        launches: list[Launch],
        *,
        room_bytes: int | None = None,
        keep: Query | None = None,
    ) -> bool:
        """Have so much of the room free, whoever has to leave; False if that cannot be.

        Those that are served last leave first. What is launched for it goes to `launches`.

        Args:
          num_bytes: that are needed.
          launches: what the runner is told.
          room_bytes: all of the room, if it is about to change.
          keep: stays.
        """
        room = self.room_bytes if room_bytes is None else room_bytes
        stays = self.sizes[keep] if keep is not None and keep.place is KVLocation.LEAVING else 0
        here = [query for query in self.sizes if query.place is KVLocation.DEVICE and query is not keep]
        here.sort(key=rank)
        while self._bytes(KVLocation.DEVICE) + stays + num_bytes > room and here:
            self._leave(here.pop(), launches, keep)
        leaving = [query for query in self.sizes if query.place is KVLocation.LEAVING and query is not keep]
        while self.device_bytes + num_bytes > room and leaving:
            query = leaving.pop(0)
            query.place = KVLocation.HOST
            launches.append(Park(query.serial, waits=True))
        return self.device_bytes + num_bytes <= room

    def begin_to_make_room(self, num_bytes: int, newcomer: Query, launches: list[Launch]) -> None:
        """Have those that are served after `newcomer` leave for host memory, as far as there is room there.

        Nobody waits for that, and nobody leaves who is served sooner: he would have to come back at once.
        """
        behind = rank(newcomer)
        here = [one for one in self.sizes if one.place is KVLocation.DEVICE and rank(one) > behind]
        here.sort(key=rank)
        while here and self._bytes(KVLocation.DEVICE) + num_bytes > self.room_bytes:
            query = here.pop()
            if self.host_bytes + self.sizes[query] > self._host_bytes:
                return
            self._leave(query, launches, newcomer)

    def has_room(self, num_bytes: int) -> bool:
        """So much is free, and nobody has to leave for it."""
        return self.device_bytes + num_bytes <= self.room_bytes

    def bring(self, query: Query, launches: list[Launch]) -> None:
        """Copy a row back from host memory; there must be room."""
        assert query.place is KVLocation.HOST
        query.place = KVLocation.DEVICE
        query.note_copied_back()
        launches.append(Return(query.serial))
        self.note()

    def drop(self, query: Query, launches: list[Launch]) -> None:
        """Give up its row, wherever it is."""
        del self.sizes[query]
        launches.append(FreeRow(query.serial))
        query.place = KVLocation.NOWHERE

    def _leave(self, query: Query, launches: list[Launch], keep: Query | None) -> None:
        """To host memory; where that is full, those there that are served later are given up, or this one."""
        behind = rank(query)
        there = [
            one
            for one in self.sizes
            if one.place is KVLocation.HOST and one is not keep and rank(one) > behind
        ]
        num_over = self.host_bytes + self.sizes[query] - self._host_bytes
        if num_over > sum(self.sizes[one] for one in there):
            self.drop(query, launches)
            return
        there.sort(key=rank)
        while self.host_bytes + self.sizes[query] > self._host_bytes:
            self.drop(there.pop(), launches)
        query.place = KVLocation.LEAVING
        launches.append(Park(query.serial, waits=False))

    def _bytes(self, *places: KVLocation) -> int:
        return sum(size for query, size in self.sizes.items() if query.place in places)
