"""Copies between tiers that take the profile's time, and complete when the engine's would.

Owns: when a copy starts, when it ends, and when the cache is notified.
Does not know: pages, slots, or why a chunk moves.

The rules: a copy waits for the computation dispatched before it, so it runs beside the next step. In each
direction copies run one after the other in order. A copy to the device is reported complete when the step
beside which it started has been dispatched; the step after that waits for the rest of it. A copy to the host
is reported when it has ended. Copies to the device have priority: while one is in flight, copies to the host
are held back, for some steps at most and until others need their staging room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from pensieve_jax.cache import ChunkCopy
from pensieve_jax.engine.transfers import MAX_HELD_STEPS, Ended, num_beside_step, window
from pensieve_lab.simulator.clock import Timeline
from pensieve_lab.simulator.profile import DeviceProfile, LinkCosts

_NOTHING = Ended([])


class _Moving:
    """Requested copy.

    Attributes:
      start_step: number of dispatched steps when it was started, or gathered.
      end_s: arrival of its last byte; infinity before it is started.
    """

    __slots__ = ("copy_id", "end_s", "start_step")

    def __init__(self, copy_id: int, start_step: int) -> None:
        self.copy_id = copy_id
        self.start_step = start_step
        self.end_s = math.inf


class _Link:
    """One direction of the link.

    Attributes:
      free_s: end of its last copy.
      num_copies: copies started so far.
    """

    def __init__(self, costs: LinkCosts, chunk_bytes: int, both_ways_share: float) -> None:
        self._latency_s = costs.latency_s
        self._chunk_s = chunk_bytes / costs.bytes_per_s
        self._shared_chunk_s = self._chunk_s / both_ways_share
        self.free_s = -math.inf
        self.num_copies = 0

    def carry(self, batch: Iterable[_Moving], ready_s: float, other: _Link) -> None:
        """Copy chunks in sequence from `ready_s` on, after those already on the link."""
        if ready_s > self.free_s:
            self.free_s = ready_s + self._latency_s
        for moving in batch:
            self.free_s += self._shared_chunk_s if self.free_s < other.free_s else self._chunk_s
            moving.end_s = self.free_s
            self.num_copies += 1


class SimulatedTransfers:
    """`Transfers` that move nothing but take time.

    Attributes:
      num_chunks: copies requested so far in both directions.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        timeline: Timeline,
        *,
        chunk_bytes: int,
        max_num_staged: int,
        retrieval_priority: bool,
    ) -> None:
        """Start with nothing in flight; at most `max_num_staged` chunks are staged in each direction.

        `chunk_bytes`: size of a chunk outside the device's pages.
        """
        self._timeline = timeline
        self._chunk_bytes = chunk_bytes
        self._max_num_staged = max_num_staged
        self._num_beside_step = num_beside_step(max_num_staged, chunk_bytes // profile.num_devices)
        self._window = window(max_num_staged)
        self._retrieval_priority = retrieval_priority
        self._in = _Link(profile.to_device, chunk_bytes, profile.both_ways_share)
        self._out = _Link(profile.to_host, chunk_bytes, profile.both_ways_share)
        page_bytes = chunk_bytes / profile.host_share / profile.num_devices  # all of it is read, or written
        self._page_copy_s = page_bytes * profile.page_copy_byte_s
        self.num_chunks = 0
        self._num_steps = 0
        self._stall_s = 0.0
        self._outgoing: deque[_Moving] = deque()  # in the order of gathering
        self._held: list[_Moving] = []  # part of `_outgoing` that is not started
        self._queued: deque[_Moving] = deque()
        self._staged: deque[_Moving] = deque()  # started; a later step reads them
        self._num_expedited = 0
        self._done: list[int] = []

    def swap_out(self, copies: Sequence[ChunkCopy]) -> None:
        """Gather copies to the host; the clock advances if staging is full."""
        self.num_chunks += len(copies)
        self._finish_out()
        fits = len(self._outgoing) + len(copies) <= self._max_num_staged
        size = max(len(copies), 1) if fits else self._window
        for start in range(0, len(copies), size):
            batch = [_Moving(copy.copy_id, self._num_steps) for copy in copies[start : start + size]]
            self._make_room_out(len(batch))
            self._use_device(len(batch))
            self._outgoing.extend(batch)
            self._held += batch
            if start + size < len(copies):
                self._start_out()

    def swap_in(self, copies: Sequence[ChunkCopy]) -> None:
        """Queue copies to the device; gathered copies to the host start now, unless they are held back."""
        self.num_chunks += len(copies)
        self._queued.extend(_Moving(copy.copy_id, self._num_steps) for copy in copies)
        if not self._held:
            return
        if not self._retrieval_priority or not self._is_arriving() or self._held_long():
            self._start_out()

    def expedite(self, copy_ids: Collection[int]) -> None:
        if not copy_ids:
            return
        wanted = set(copy_ids)
        waiting = [moving for moving in self._queued if moving.copy_id in wanted]
        started = [moving for moving in self._staged if moving.copy_id in wanted]
        self._queued = deque(moving for moving in self._queued if moving.copy_id not in wanted)
        self._staged = deque(moving for moving in self._staged if moving.copy_id not in wanted)
        self._start_in(waiting)
        self._num_expedited = len(waiting) + len(started)
        assert self._num_expedited == len(wanted), "an expedited copy is not in flight"
        self._await_on_device([*started, *waiting])

    def before_dispatch(self) -> None:
        """Start the requested copies, which run beside the step that is about to be dispatched."""
        if self._queued:
            self._start_queued()
        self._num_expedited = 0
        self._num_steps += 1

    def completed(self) -> Ended:
        """Report completed copies; every chunk can be packed."""
        if not self._outgoing and not self._staged and not self._done:
            return _NOTHING
        self._finish_out()
        done, self._done = self._done, []
        landed = []
        now_s, staged = self._timeline.now(), self._staged
        while staged and (staged[0].start_step < self._num_steps or staged[0].end_s <= now_s):
            landed.append(staged.popleft())
        self._await_on_device(landed)
        return Ended(done + [moving.copy_id for moving in landed])

    def is_moving(self) -> bool:
        """Return whether a copy is in flight, or starts after the work that was dispatched."""
        return max(self._in.free_s, self._out.free_s) > self._timeline.now()

    def wait(self) -> None:
        """Advance the clock until a copy is complete."""
        if self._done:
            return
        self._start_queued()
        if not self._staged:
            self._start_out()
        moving = self._staged or self._outgoing
        assert moving, "nothing in flight to wait for"
        self._stall_until(moving[min(len(moving), self._window) - 1].end_s)

    def stats(self) -> dict[str, int | float]:
        """Return the counters; the host's time for copies is part of `HostCosts`."""
        return {
            "swapped_out_bytes": self._out.num_copies * self._chunk_bytes,
            "swapped_in_bytes": self._in.num_copies * self._chunk_bytes,
            "num_swap_out_copies": self._out.num_copies,
            "num_swap_in_copies": self._in.num_copies,
            "swap_dispatch_s": 0.0,
            "transfer_stall_s": self._stall_s,
        }

    def _is_arriving(self) -> bool:
        return bool(self._queued or self._staged) or self._in.free_s > self._timeline.now()

    def _held_long(self) -> bool:
        return bool(self._held) and self._num_steps - self._held[0].start_step >= MAX_HELD_STEPS

    def _ready_s(self) -> float:
        """Return when a copy can begin: after the computation dispatched before it."""
        return max(self._timeline.now(), self._timeline.device_free_s)

    def _start_in(self, batch: Sequence[_Moving]) -> None:
        if batch:
            for moving in batch:
                moving.start_step = self._num_steps
            self._in.carry(batch, self._ready_s(), self._out)

    def _start_queued(self) -> None:
        room = min(self._num_beside_step, self._max_num_staged - self._num_expedited) - len(self._staged)
        batch = [self._queued.popleft() for _ in range(min(room, len(self._queued)))]
        self._start_in(batch)
        self._staged.extend(batch)

    def _start_out(self) -> None:
        if self._held:
            for moving in self._held:
                moving.start_step = self._num_steps
            self._out.carry(self._held, self._ready_s(), self._in)
            self._held = []

    def _make_room_out(self, num_chunks: int) -> None:
        """Block until `num_chunks` more can be staged."""
        num_over = len(self._outgoing) + num_chunks - self._max_num_staged
        if num_over > 0:
            self._start_out()
            self._stall_until(self._outgoing[num_over - 1].end_s)
            self._finish_out()

    def _finish_out(self) -> None:
        now_s, outgoing = self._timeline.now(), self._outgoing
        while outgoing and outgoing[0].end_s <= now_s:
            self._done.append(outgoing.popleft().copy_id)

    def _await_on_device(self, batch: Sequence[_Moving]) -> None:
        """Let later computation begin after these copies have arrived."""
        if batch:
            self._timeline.occupy_device(batch[-1].end_s)
            self._use_device(len(batch))

    def _use_device(self, num_chunks: int) -> None:
        """Run gathers or scatters on the device, in order with the steps."""
        if num_chunks and self._page_copy_s:
            self._timeline.use_device(num_chunks * self._page_copy_s)

    def _stall_until(self, time_s: float) -> None:
        before_s = self._timeline.now()
        self._timeline.advance_to(time_s)
        self._stall_s += self._timeline.now() - before_s
