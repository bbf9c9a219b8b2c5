"""Progress of requests: dependencies between subgraphs, completion, failure and cancellation.

Owns: the updates of the tables when a launch completes or fails, and the handles of requests.
Does not know: how requests are admitted, which type runs next, devices, or time.

This is the request processor of the thesis, section 2.4.2. It tracks the progress of every request, and
releases subgraphs to the scheduler when their inputs are available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pensieve_jax.cellular.admission import Admission, Unfold, Unfolded, UnfoldMany
from pensieve_jax.cellular.cells import CellTypes
from pensieve_jax.cellular.config import CellularConfig
from pensieve_jax.cellular.errors import LaunchFailedError, RequestCancelledError
from pensieve_jax.cellular.formation import Formation
from pensieve_jax.cellular.graph_columns import NO_STOP
from pensieve_jax.cellular.launches import Done, Launch
from pensieve_jax.cellular.request import CellRequest
from pensieve_jax.cellular.rows import num_rows_for
from pensieve_jax.cellular.scheduler import CellScheduler, LaunchScheduler
from pensieve_jax.cellular.tables import (
    COMPLETED,
    DROPPED,
    SUBMITTED,
    WAITING,
    Tables,
    all_values,
    distinct,
)

type MakeScheduler = Callable[[CellTypes, Tables, Formation, CellularConfig], LaunchScheduler]


class RequestProcessor:
    """Request processor of one engine.

    Attributes:
      types: the cells.
      nodes, subgraphs, requests: the tables.
      formation, scheduler: form launches.
      admission: waiting requests and promised rows.
      handles: handles of unfinished requests, by id.
      num_answered, num_failed, num_cancelled: finished requests by outcome.
      restarting: requests that begin again after their obsolete nodes in flight have completed.
    """

    def __init__(
        self, types: CellTypes, config: CellularConfig, make_scheduler: MakeScheduler = CellScheduler
    ) -> None:
        """Start without requests. Baselines of cellular batching are other schedulers."""
        self.types = types
        num_rows = num_rows_for(config.num_rows, types.row_bytes)
        tables = Tables(types, num_rows)
        self.nodes, self.subgraphs, self.requests = tables.nodes, tables.subgraphs, tables.requests
        self.formation = Formation(
            types, self.nodes, self.subgraphs, num_rows=num_rows, num_workers=config.num_devices
        )
        self.scheduler = make_scheduler(types, tables, self.formation, config)
        self.admission = Admission(types, tables, config, num_rows)
        self.handles: dict[int, CellRequest] = {}
        self.num_answered = self.num_failed = self.num_cancelled = 0
        self._leaving: set[int] = set()
        self.restarting: set[int] = set()
        self._num_released = 0
        self._releases_at_once = config.release == "submission"
        self._emitting = _emitting(types)

    def submit_many(
        self, requests: Sequence[Any], unfold: Unfold, unfold_many: UnfoldMany | None = None
    ) -> list[CellRequest]:
        """Unfold and queue requests, and admit those that fit. On an error, none is queued.

        Raises:
          GraphError: a graph cannot be computed.
          CapacityError: a graph is too large or too deep, needs more rows than exist, or too many requests
            wait.
        """
        return self.enter(self.read(requests, unfold, unfold_many)) if requests else []

    def read(
        self,
        requests: Sequence[Any],
        unfold: Unfold,
        unfold_many: UnfoldMany | None,
        *,
        is_limited: bool = True,
    ) -> Unfolded:
        """Unfold and check requests: the first half of `submit_many`, which changes no state."""
        check = self.scheduler.check
        return self.admission.read(requests, unfold, unfold_many, check, is_limited=is_limited)

    def enter(self, unfolded: Unfolded) -> list[CellRequest]:
        """Queue and admit requests: the second half of `submit_many`, which cannot fail."""
        ids, nums_returned = self.admission.enter(unfolded)
        serials = self.requests.serial[ids.start : ids.stop].tolist()
        handles = [CellRequest(*one) for one in zip(ids, serials, nums_returned, strict=True)]
        self.handles.update(zip(ids, handles, strict=True))
        self._admit()
        return handles

    def launched(self, launch: Launch) -> None:
        """Process a launch that is about to begin; with release "submission", release dependent subgraphs."""
        if self._releases_at_once:
            touched = distinct(launch.subs, self.subgraphs.mark)
            self._release_behind(touched[self.subgraphs.unsubmitted[touched] == 0])

    def completed(self, done: Done) -> list[CellRequest]:
        """Process a finished launch; return the requests that are done by it."""
        launch = done.launch
        self.scheduler.completed(launch)
        taken = np.concatenate(launch.tasks)
        state, subgraphs = self.nodes.state, self.subgraphs
        np.subtract.at(subgraphs.in_flight, launch.subs, launch.counts)
        is_waste = state[taken] == DROPPED
        if is_waste.any():
            np.subtract.at(subgraphs.waste, self.nodes.sub[taken[is_waste]], 1)
            taken = taken[~is_waste]
        state[taken] = COMPLETED
        touched = distinct(launch.subs, subgraphs.mark)
        subgraphs.pinned[touched[subgraphs.in_flight[touched] == 0]] = -1
        ended: list[CellRequest] = []
        if done.error is not None:
            ended += self._failed(done)
        else:
            self._store(done, taken)
            ended += self._advance(touched)
        self._retire_some(touched)
        self._admit()
        return ended

    def cancel(self, handle: CellRequest) -> bool:
        """Cancel a request; return False if it is done, or belongs to another engine."""
        if handle.done or self.handles.get(handle.request_id) is not handle:
            return False
        self._end(handle.request_id, RequestCancelledError("The request was cancelled."))
        self._admit()
        return True

    def _admit(self) -> None:
        """Admit waiting requests, in order, and release their first subgraphs."""
        admitted = self.admission.admit()
        if not len(admitted):
            return
        starts, ends = self.requests.sub_start[admitted], self.requests.sub_end[admitted]
        subs = _ranges(starts, ends)
        self._release(subs[self.subgraphs.waits[subs] == 0])

    def _release(self, subs: np.ndarray) -> None:
        """Release subgraphs to the scheduler, in this order."""
        if not len(subs):
            return
        table = self.subgraphs
        table.seq[subs] = np.arange(self._num_released, self._num_released + len(subs))
        self._num_released += len(subs)
        kinds = table.kind[subs]
        table.begin_irregular(subs)
        for kind in np.unique(kinds).tolist():
            mine = subs[kinds == kind]
            self.scheduler.release(kind, all_values(mine, table.first, table.firsts))

    def _release_behind(self, subs: np.ndarray) -> None:
        """Release the subgraphs that waited only for `subs`, whose states are or will be available."""
        table = self.subgraphs
        subs = subs[~table.has_released[subs]]
        table.has_released[subs] = True
        behind = all_values(subs, table.consumer, table.consumers)
        behind = behind[behind >= 0]
        np.subtract.at(table.waits, behind, 1)
        ready = behind[(table.waits[behind] == 0) & ~table.is_done[behind]]
        self._release(distinct(ready, table.mark))

    def _store(self, done: Done, completed: np.ndarray) -> None:
        """Store the results of a launch, and stop chains that emitted their end value."""
        launch, nodes = done.launch, self.nodes
        for place, by_part in enumerate(done.emitted):
            tasks = iter(launch.tasks)
            for part in by_part:
                for row in part:
                    task = next(tasks)
                    nodes.emitted[place, task] = row[: len(task)].view(np.int32)
        for read, fields in zip(launch.reads, done.states, strict=True):
            wanted = zip(nodes.request[read.nodes].tolist(), nodes.returned[read.nodes].tolist(), strict=True)
            for row, (request, place) in enumerate(wanted):
                handle = self.handles.get(request)
                if handle is not None:
                    handle.keep(place, fields, row)
        if launch.kind.emits:
            stops = nodes.stop[completed]
            ends = completed[(stops != NO_STOP) & (nodes.emitted[0, completed] == stops)]
            if len(ends):
                self._stop(ends)

    def _stop(self, ends: np.ndarray) -> None:
        """End each chain at its first node in `ends`; count the later nodes that were submitted as wasted."""
        nodes = self.nodes
        ends = np.sort(ends)
        lasts = ends[np.diff(nodes.chain_end[ends], prepend=-1) != 0]
        rest = _ranges(lasts + 1, nodes.chain_end[lasts])
        in_vain = rest[(nodes.state[rest] == SUBMITTED) | (nodes.state[rest] == COMPLETED)]
        requests, counts = np.unique(nodes.request[in_vain], return_counts=True)
        for request, count in zip(requests.tolist(), counts.tolist(), strict=True):
            self.handles[request].num_wasted += count
        self._drop(rest)

    def _drop(self, dropped: np.ndarray) -> None:
        """Drop nodes whose results are no longer needed."""
        nodes, subgraphs = self.nodes, self.subgraphs
        state = nodes.state[dropped]
        unsubmitted, flying = dropped[state == WAITING], dropped[state == SUBMITTED]
        nodes.state[dropped] = DROPPED
        np.add.at(subgraphs.waste, nodes.sub[flying], 1)
        if len(unsubmitted):
            np.subtract.at(subgraphs.unsubmitted, nodes.sub[unsubmitted], 1)
            self.formation.undo_reads(nodes.inputs[:, unsubmitted].ravel())
            self.formation.release_freed()
            for kind in np.unique(nodes.kind[unsubmitted[nodes.waits[unsubmitted] == 0]]).tolist():
                self.scheduler.remove_dropped(kind)

    def _advance(self, touched: np.ndarray) -> list[CellRequest]:
        """Process completed nodes of subgraphs: release dependent ones; return the finished requests."""
        table = self.subgraphs
        is_over = (table.unsubmitted[touched] == 0) & (table.in_flight[touched] == table.waste[touched])
        over = touched[is_over & ~table.is_done[touched]]
        if not len(over):
            return []
        table.end(over)
        self._release_behind(over)
        owners = table.request[over]
        np.subtract.at(self.requests.subs_left, owners, 1)
        ended = distinct(owners[self.requests.subs_left[owners] == 0], self.requests.mark)
        finished = [self._finish(request) for request in ended.tolist()]
        self._retire(ended)
        return finished

    def _finish(self, request: int) -> CellRequest:
        """Finish a request with its result."""
        handle = self.handles[request]
        handle.finish(self._emitted(request))
        del self.handles[request]
        self.num_answered += 1
        return handle

    def _emitted(self, request: int) -> dict[str, np.ndarray]:
        """Return the values that the request's nodes emitted, by field."""
        if not self._emitting:
            return {}
        mine = slice(int(self.requests.start[request]), int(self.requests.end[request]))
        kinds, is_wanted = self.nodes.kind[mine], self.nodes.state[mine] == COMPLETED
        found: dict[str, np.ndarray] = {}
        for name, dtype, places in self._emitting:
            values = [self.nodes.emitted[place, mine] for place in places.values()]
            is_here = [is_wanted & (kinds == kind) for kind in places]
            merged = np.select(is_here, values) if len(values) > 1 else values[0]
            chosen = np.logical_or.reduce(is_here)
            if chosen.any():
                found[name] = merged[chosen].view(dtype)
        return found

    def _end(self, request: int, error: Exception) -> CellRequest:
        """Finish a request with an error."""
        handle = self.handles[request]
        handle.fail(error)
        del self.handles[request]
        self.num_failed += not isinstance(error, RequestCancelledError)
        self.num_cancelled += isinstance(error, RequestCancelledError)
        self.restarting.discard(request)
        self._take_out(request)
        return handle

    def _take_out(self, request: int) -> None:
        """Drop all nodes of a request. It leaves, or begins again, when none of them is in flight."""
        if not self.admission.withdraw(request):
            self._drop(np.arange(self.requests.start[request], self.requests.end[request]))
        subs = np.arange(self.requests.sub_start[request], self.requests.sub_end[request])
        self.subgraphs.end(subs[~self.subgraphs.is_done[subs]])
        self._retire(np.array([request]))

    def _failed(self, done: Done) -> list[CellRequest]:
        """Process a failed launch; return its requests, which fail.

        Other requests that lost state, or whose launch did not run because of an earlier loss, begin again.
        """
        requests = np.unique(self.subgraphs.request[done.launch.subs]).tolist()
        mine = [request for request in requests if request in self.handles]
        ended = []
        error = LaunchFailedError(
            f"{done.launch.num_nodes} cells of {done.launch.kind.name} did not run: {done.error}"
        )
        error.__cause__ = done.error
        for request in mine:
            ended += self._restart(request, error) if done.never_ran else [self._end(request, error)]
        if done.has_lost_state:
            is_lost = (self.nodes.row >= 0) & (self.nodes.worker == done.launch.worker)
            for request in np.unique(self.nodes.request[is_lost]).tolist():
                if request in self.handles:
                    ended += self._restart(request, error)
        return ended

    def _restart(self, request: int, error: Exception) -> list[CellRequest]:
        """Restart a request when no node of it is in flight. If the scheduler cannot, fail and return it."""
        if not self.scheduler.restarts:
            return [self._end(request, error)]
        self.restarting.add(request)
        self._take_out(request)
        return []

    def _begin_again(self, request: int) -> None:
        nodes, subgraphs, requests = self.nodes, self.subgraphs, self.requests
        handle = self.handles[request]
        handle.num_wasted = 0
        start, end = int(requests.start[request]), int(requests.end[request])
        nodes.reset(start, end)
        subs = np.arange(requests.sub_start[request], requests.sub_end[request])
        requests.subs_left[request] = len(subs)
        subgraphs.reset(subs, nodes, start, end)
        self._release(subs[subgraphs.waits[subs] == 0])

    def _retire_some(self, touched: np.ndarray) -> None:
        """Retire the finished requests of subgraphs whose nodes have completed."""
        if self._leaving:
            leaving = self._leaving.intersection(self.subgraphs.request[touched].tolist())
            self._retire(np.array(sorted(leaving), np.int64))

    def _retire(self, requests: np.ndarray) -> None:
        """Remove finished requests from the tables when none of their nodes is in flight."""
        if not len(requests):
            return
        table = self.requests
        starts, ends = table.sub_start[requests], table.sub_end[requests]
        flying = np.add.reduceat(
            self.subgraphs.in_flight[_ranges(starts, ends)], np.cumsum(ends - starts) - (ends - starts)
        )
        self._leaving.update(requests[flying > 0].tolist())
        gone = requests[flying == 0]
        self._leaving.difference_update(gone.tolist())
        if self.restarting:
            for request in self.restarting.intersection(gone.tolist()):
                self.restarting.discard(request)
                self._begin_again(request)
                gone = gone[gone != request]
        self.admission.leave(gone)


def _emitting(types: CellTypes) -> list[tuple[str, str, dict[int, int]]]:
    """Return each emitted field with its dtype and its index in every type that emits it."""
    found: dict[str, tuple[str, dict[int, int]]] = {}
    for one in types.types:
        for place, (name, dtype) in enumerate(one.emits):
            found.setdefault(name, (dtype, {}))[1][one.index] = place
    return [(name, dtype, places) for name, (dtype, places) in found.items()]


def _ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Concatenate the integers of several ranges."""
    sizes = ends - starts
    offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(starts, sizes) + offsets
