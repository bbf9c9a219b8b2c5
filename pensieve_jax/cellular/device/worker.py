"""Worker of one device: its rows of state, and its launches.

Owns: pools, weights on the device, launches in program order, and the detection of their completion.
Does not know: requests, or the meaning of a row.

In the thesis, a kernel after each task raises a counter in pinned memory, and a thread polls it (section
2.5). Here the last output of every program is a number, and JAX tells without waiting whether it is ready.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pensieve_jax.cellular.cells import CellType, CellTypes
from pensieve_jax.cellular.device.device_programs import DevicePrograms
from pensieve_jax.cellular.device.programs import (
    ROWS_READ,
    CellProgram,
    Pool,
    empty_pool,
    host_sharding,
    padded_rows,
    rows_reader,
    write_rows,
)
from pensieve_jax.cellular.launches import Done, Launch, Part


class _Flying(NamedTuple):
    launch: Launch
    emitted: list[Pool]
    states: list[list[Pool]]
    signal: Any  # array that is ready when the launch has finished (its type lacks `is_ready`); None: not run
    error: Exception | None
    begun_s: float
    has_lost_state: bool = False
    never_ran: bool = False
    sources: Sequence[tuple[DeviceWorker, int]] = ()


class DeviceWorker:
    """Worker of one device of an engine.

    Attributes:
      programs: its programs, and which of them are compiled.
      pools: the pool of every kind of state.
      num_losses: how often all pools were lost.
    """

    def __init__(
        self,
        types: CellTypes,
        cells: Sequence[CellProgram],
        programs: DevicePrograms,
        num_rows: int,
        device: jax.Device,
        peers: list[DeviceWorker],
    ) -> None:
        """Allocate the pools and copy the weights.

        Args:
          types: the cells.
          cells: the program of each type.
          programs: the programs of this device.
          num_rows: rows of each kind of state.
          device: the device.
          peers: all workers of the engine; this worker appends itself.
        """
        self._types, self._cells, self.programs = types, cells, programs
        self._num_rows, self._device, self._peers = num_rows, device, peers
        self._weights = [jax.device_put(cell.weights, device) for cell in cells]
        self._read_here = rows_reader(SingleDeviceSharding(device))
        self._read_for_host = rows_reader(host_sharding(device))
        self.pools = self._empty_pools()
        self._flying: deque[_Flying] = deque()
        self._lost: Exception | None = None
        self.num_losses = 0
        peers.append(self)

    @property
    def num_in_flight(self) -> int:
        """Launches that were begun and not yet reported by `poll`."""
        return len(self._flying)

    @property
    def has_ended(self) -> bool:
        """Whether the oldest launch has finished, so that `poll` reports it. There must be one."""
        return self._has_ended(self._flying[0])

    @property
    def begun_s(self) -> float:
        """Start of the oldest launch, on this process's monotonic clock. There must be one."""
        return self._flying[0].begun_s

    def restart(self) -> None:
        """Discard all launches and all rows."""
        self._flying.clear()
        self.pools, self._lost = self._empty_pools(), None

    def warm_up(self) -> None:
        """Compile the programs that read and write rows."""
        for kind, pool in enumerate(self.pools):
            for size in ROWS_READ:
                rows = np.full(size, self._num_rows, np.int32)
                self._read_for_host(pool, rows)
                if len(self._peers) > 1:
                    values = self._read_here(pool, rows)
                    nowhere = self._num_rows + 1 + np.arange(size, dtype=np.int32)
                    pool = write_rows(pool, nowhere, jax.device_put(values, self._device))
            self.pools[kind] = pool

    def prepare(self, launch: Launch) -> bool:
        """Return whether `launch` can begin a launch; otherwise its programs are being compiled."""
        return self.programs.prepare(launch.kind, launch.parts)

    def launch(self, launch: Launch) -> None:
        """Begin a launch after all others of this device. `prepare` must have returned True for it."""
        sources = [self._peers[move.source] for move in launch.moves]
        lost = self._lost or next((source.lost for source in sources if source.lost is not None), None)
        if lost is not None:  # rows moved from a device that lost its pools would be invalid, too
            self._lost = lost
            self._flying.append(_Flying(launch, [], [], None, lost, time.monotonic(), True, True))
            return
        unusable = self.programs.error_of(launch.kind, launch.parts)
        if unusable is not None:
            self._flying.append(_Flying(launch, [], [], None, unusable, time.monotonic()))
            return
        try:
            num_losses = [(source, source.num_losses) for source in sources]
            self._flying.append(self._begin(launch)._replace(sources=num_losses))
        except jax.errors.JaxRuntimeError as error:
            is_lost = self._has_lost_pools()
            self._flying.append(_Flying(launch, [], [], None, error, time.monotonic(), is_lost))
            if is_lost:
                self._lose(error)

    @property
    def lost(self) -> Exception | None:
        """Error that lost the rows, even before `poll` has reported it; None if the rows are valid."""
        for one in self._flying:
            if self._lost is not None or one.signal is None or not one.signal.is_ready():
                break
            try:
                one.signal.block_until_ready()
            except jax.errors.JaxRuntimeError as error:
                return error
        return self._lost

    def read(self, kind: int, rows: np.ndarray) -> Pool:
        """Read rows for a peer, after all launches so far. Their number must be one of `ROWS_READ`."""
        return self._read_here(self.pools[kind], rows)

    def run_part(self, kind: CellType, part: Part) -> tuple[Pool, jax.Array]:
        """Begin the tasks of a part; return what they emit, and a number that is ready when they have run."""
        run = self.programs.compiled[kind.index, part.num_tasks, part.batch_size]
        others = tuple(self.pools[one] for one in self._cells[kind.index].other_kinds)
        self.pools[kind.state_kind], told, signal = run(
            self.pools[kind.state_kind], others, self._weights[kind.index], part.words
        )
        return told, signal

    def poll(self) -> Iterator[Done]:
        """Yield the launches that have finished since the last call, in order."""
        while self._flying and self._has_ended(self._flying[0]):
            yield self._to_done(self._flying.popleft())
            if self._lost is not None and not self._flying:
                self.pools, self._lost = self._empty_pools(), None

    def wait(self) -> None:
        """Wait until the oldest launch has finished."""
        if self._flying and self._flying[0].signal is not None:
            try:
                self._flying[0].signal.block_until_ready()
            except jax.errors.JaxRuntimeError:
                return  # `poll` reports it

    def _begin(self, launch: Launch) -> _Flying:
        for move in launch.moves:
            source = self._peers[move.source]
            pairs = zip(
                padded_rows(move.rows, self._num_rows),
                padded_rows(move.to_rows, self._num_rows, writes=True),
                strict=True,
            )
            for rows, to_rows in pairs:
                values = jax.device_put(source.read(move.kind, rows), self._device)
                self.pools[move.kind] = write_rows(self.pools[move.kind], to_rows, values)
        emitted: list[Pool] = []
        signal: jax.Array | None = None
        for part in launch.parts:
            for piece in self.programs.pieces(launch.kind, part):
                told, signal = self.run_part(launch.kind, piece)
                emitted.append(told)
        states = []
        for read in launch.reads:
            pool = self.pools[read.kind]
            groups = [self._read_for_host(pool, rows) for rows in padded_rows(read.rows, self._num_rows)]
            signal = groups[-1][-1]
            states.append(groups)
        return _Flying(launch, emitted, states, signal, None, time.monotonic())

    def _has_ended(self, one: _Flying) -> bool:
        return one.signal is None or bool(one.signal.is_ready())

    def _to_done(self, one: _Flying) -> Done:
        launch = one.launch
        if one.error is not None:
            return Done(launch, error=one.error, has_lost_state=one.has_lost_state, never_ran=one.never_ran)
        try:
            emitted = [
                [np.asarray(emitted[place]) for emitted in one.emitted]
                for place in range(len(launch.kind.emits))
            ]
            states = [
                self._fields(read.kind, groups, len(read.rows))
                for read, groups in zip(launch.reads, one.states, strict=True)
            ]
            one.signal.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            never_ran = self._lost is not None or any(
                source.lost is not None or source.num_losses > before for source, before in one.sources
            )
            self._lose(error)
            return Done(launch, error=error, has_lost_state=True, never_ran=never_ran)
        return Done(launch, emitted, states)

    def _fields(self, kind: int, groups: list[Pool], num: int) -> dict[str, np.ndarray]:
        """Return an array [num, ...] for every field."""
        return {
            name: _joined([np.asarray(group[place]) for group in groups])[:num]
            for place, (name, _) in enumerate(self._types.kinds[kind])
        }

    def _lose(self, error: Exception) -> None:
        if self._lost is None:
            self._lost = error
            self.num_losses += 1

    def _has_lost_pools(self) -> bool:
        return any(array.is_deleted() for pool in self.pools for array in pool)

    def _empty_pools(self) -> list[Pool]:
        return [empty_pool(kind, self._num_rows, self._device) for kind in self._types.kinds]


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
