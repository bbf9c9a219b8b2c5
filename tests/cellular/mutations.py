"""Bugs, planted one at a time: each is a plausible error in a change of the policy.

Owns the bugs, by name. Does not know which tests detect them. Called by `test_scenarios`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pensieve_jax.cellular import chains, formation, many, ready_queue, request_processor, rows, scheduler
from pensieve_jax.cellular.tables import COMPLETED

type Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[function.__name__.replace("_", " ")] = function
    return function


def after(patch: Patch, owner: Any, name: str, then: Callable[..., Any]) -> None:
    """Replace a method's result by `then(result, self, *args)`."""
    method = getattr(owner, name)
    patch.setattr(
        owner,
        name,
        lambda self, *args, **options: then(method(self, *args, **options), self, *args, **options),
    )


@mutation
def pins_are_not_looked_at(patch: Patch) -> None:
    everyone = lambda self, worker: np.ones(len(self._front), bool)  # noqa: E731
    patch.setattr(ready_queue.ReadyQueue, "_is_free_for", everyone)


@mutation
def a_pin_is_dropped_with_the_first_launch(patch: Patch) -> None:
    def unpin(result: Any, self: Any, done: Any) -> Any:
        self.subgraphs.pinned[self.nodes.sub[np.concatenate(done.launch.tasks)]] = -1
        return result

    after(patch, request_processor.RequestProcessor, "completed", unpin)


@mutation
def a_node_is_ready_after_its_first_input(patch: Patch) -> None:
    def ready(self: Any, taken: np.ndarray) -> np.ndarray:
        behind = self._nodes.consumer[taken]
        behind = np.unique(behind[behind >= 0])
        self._nodes.waits[behind] = 0
        return behind

    patch.setattr(formation.Formation, "_ready_behind", ready)


@mutation
def subgraphs_begin_before_all_that_they_read(patch: Patch) -> None:
    def advance(result: Any, self: Any, touched: np.ndarray) -> Any:
        behind = self.subgraphs.consumer[touched]
        behind = np.unique(behind[behind >= 0])
        early = behind[(self.subgraphs.seq[behind] < 0) & (self.subgraphs.waits[behind] == 1)]
        self.subgraphs.waits[early] = 0
        self._release(early)
        return result

    after(patch, request_processor.RequestProcessor, "_advance", advance)


@mutation
def a_row_is_never_given_back(patch: Patch) -> None:
    free = rows.StateRows.free
    patch.setattr(rows.StateRows, "free", lambda self, some: free(self, some[1:] if len(some) > 2 else some))


@mutation
def a_row_is_free_before_what_reads_it_is_launched(patch: Patch) -> None:
    after(patch, formation.Formation, "_free", lambda result, self, nodes: self.release_freed())


@mutation
def a_row_is_taken_over_that_another_node_reads(patch: Patch) -> None:
    source = formation.Formation._write

    def write(
        self: Any, kind: Any, worker: int, taken: np.ndarray, sources: np.ndarray, read: np.ndarray
    ) -> Any:
        shared = sources[(self._nodes.uses[sources] == 2) & (sources != 0)]
        self._nodes.uses[shared] = 1
        return source(self, kind, worker, taken, sources, read)

    patch.setattr(formation.Formation, "_write", write)


@mutation
def a_type_is_starved(patch: Patch) -> None:
    """Starve the type of leaf cells."""
    schedule = scheduler.CellScheduler.schedule

    def starve(self: Any, worker: int) -> Any:
        queue = self.queues[2]
        count, queue.count = queue.count, lambda worker: 0
        found = schedule(self, worker)
        queue.count = count
        return found

    patch.setattr(scheduler.CellScheduler, "schedule", starve)


@mutation
def nothing_that_was_cancelled_leaves_the_queue(patch: Patch) -> None:
    patch.setattr(ready_queue.ReadyQueue, "remove_dropped", lambda self: None)


@mutation
def a_chain_goes_on_behind_its_end(patch: Patch) -> None:
    patch.setattr(request_processor.RequestProcessor, "_stop", lambda self, ends: None)


@mutation
def a_chain_has_the_last_of_two_ends(patch: Patch) -> None:
    stop = request_processor.RequestProcessor._stop

    def last(self: Any, ends: np.ndarray) -> None:
        ends = np.sort(ends)
        stop(self, ends[np.diff(self.nodes.chain_end[ends], append=-1) != 0])

    patch.setattr(request_processor.RequestProcessor, "_stop", last)


@mutation
def cells_in_vain_are_told(patch: Patch) -> None:
    def stop(result: Any, self: Any, ends: np.ndarray) -> Any:
        behind = ends + 1
        self.nodes.state[behind[behind < self.nodes.chain_end[ends]]] = COMPLETED
        return result

    after(patch, request_processor.RequestProcessor, "_stop", stop)


@mutation
def a_promise_outlives_its_request(patch: Patch) -> None:
    patch.setattr(rows.RowBudget, "end", lambda self, needed: None)


@mutation
def rows_stay_where_they_were(patch: Patch) -> None:
    patch.setattr(formation.Formation, "_fetch", lambda self, kind, worker, sources: None)


@mutation
def who_lost_state_goes_on_without(patch: Patch) -> None:
    patch.setattr(request_processor.RequestProcessor, "_restart", lambda self, request, error: [])


@mutation
def rows_are_promised_to_half_of_what_is_needed(patch: Patch) -> None:
    admit = rows.RowBudget.admit
    patch.setattr(rows.RowBudget, "admit", lambda self, needed: admit(self, (needed + 1) // 2))


@mutation
def a_head_is_a_lane(patch: Patch) -> None:
    source = chains.partition

    def straight(graph: Any, *, max_depth: int) -> Any:
        found = source(graph, max_depth=max_depth)
        return found and dataclasses.replace(found, is_irregular=np.zeros(len(found.is_irregular), bool))

    patch.setattr(chains, "partition", straight)


@mutation
def a_lane_takes_over_a_row_that_another_one_reads(patch: Patch) -> None:
    lanes = formation.Formation._add_lanes

    def take_over(self: Any, kind: Any, worker: int, first: np.ndarray, *args: Any) -> None:
        sources = self._nodes.inputs[0, first]
        self._nodes.uses[sources[sources != 0]] = 1
        lanes(self, kind, worker, first, *args)

    patch.setattr(formation.Formation, "_add_lanes", take_over)


@mutation
def a_lane_joins_with_the_first_task(patch: Patch) -> None:
    lanes = formation.Formation._add_lanes
    patch.setattr(
        formation.Formation,
        "_add_lanes",
        lambda self, kind, worker, first, subs, joins, counts: lanes(
            self, kind, worker, first, subs, np.zeros_like(joins), counts
        ),
    )


@mutation
def a_lane_leaves_out_where_it_goes_on(patch: Patch) -> None:
    patch.setattr(ready_queue.ReadyQueue, "go_on", _one_less(ready_queue.ReadyQueue.go_on))


@mutation
def words_of_sentences_are_moved_by_one(patch: Patch) -> None:
    joined = many._joined

    def roll(words: Any) -> Any:
        flat, lengths = joined(words)
        return (flat if flat is None or len(words) == 1 else np.roll(flat, 1)), lengths

    patch.setattr(many, "_joined", roll)


@mutation
def trees_forget_what_came_before(patch: Patch) -> None:
    add = many._add_pieces
    patch.setattr(
        many, "_add_pieces", lambda pieces, *args: add(pieces, *args[:-1], args[-1] - pieces.num_nodes)
    )


def _one_less(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, nodes: method(self, nodes[:-1] if len(nodes) > 1 else nodes)
