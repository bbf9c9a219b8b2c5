"""Bugs, planted one at a time: each is a plausible error in a change of the policy.

Owns the bugs, by name. Does not know which tests detect them. Called by `test_scenarios`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pensieve_jax.rebatching import (
    fitting,
    launches,
    loop,
    parked_rows,
    prefilling,
    query,
    queue,
    ring,
    scheduler,
)
from pensieve_jax.rebatching.query import KVLocation
from tests.rebatching import fake_runner

type Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[function.__name__.replace("_", " ")] = function
    return function


@mutation
def a_position_is_a_column(patch: Patch) -> None:
    add = launches.PackedStep.add

    def by_column(self: Any, row: int, who: Any, position: int, *counts: int) -> None:
        add(self, row, who, int(self.words[0]) if self.words[0] else position, *counts)

    patch.setattr(launches.PackedStep, "add", by_column)


@mutation
def a_stale_row_is_not_wholly_overwritten(patch: Patch) -> None:
    insert = fake_runner.FakeRunner._insert

    def partly(self: Any, launch: Any) -> None:
        before = self.ring[:, launch.row, launch.place].copy()
        insert(self, launch)
        self.ring[:, launch.row, launch.place] = before

    patch.setattr(fake_runner.FakeRunner, "_insert", partly)


@mutation
def a_start_is_off_by_one(patch: Patch) -> None:
    insert = ring.Ring.insert
    patch.setattr(ring.Ring, "insert", lambda self, owner, num: insert(self, owner, max(num - 1, 0)))


@mutation
def the_token_of_a_padded_query_is_taken(patch: Patch) -> None:
    step = fake_runner.FakeRunner._step

    def padded(self: Any, words: Any, token_ids: Any) -> Any:
        if token_ids is not None and words.num_new < len(token_ids):
            words.num_new += 1
        return step(self, words, token_ids)

    patch.setattr(fake_runner.FakeRunner, "_step", padded)


@mutation
def a_longer_ring_is_filled_without_wrapping(patch: Patch) -> None:
    resize = ring.Ring.resize

    def unwrapped(self: Any, shape: Any) -> Any:
        found = resize(self, shape)
        if found is not None:
            there = found.columns >= 0
            found.columns[there] = np.flatnonzero(there)[: there.sum()] % max(found.columns.max() + 1, 1)
        return found

    patch.setattr(ring.Ring, "resize", unwrapped)


@mutation
def rows_keep_their_numbers_in_another_shape(patch: Patch) -> None:
    resize = ring.Ring.resize

    def in_place(self: Any, shape: Any) -> Any:
        found = resize(self, shape)
        if found is not None:
            found.rows[:] = np.arange(len(found.rows))
        return found

    patch.setattr(ring.Ring, "resize", in_place)


@mutation
def holes_are_not_left_out_of_a_suspended_row(patch: Patch) -> None:
    def places(self: Any, index: int) -> np.ndarray:
        row = self._row(index)
        num_holes = sum(end - begin for begin, end in row.holes)
        return (np.arange(row.start + num_holes, self.cursor) % self.shape.length).astype(np.int32)

    patch.setattr(ring.Ring, "places", places)


@mutation
def others_get_no_holes(patch: Patch) -> None:
    def advance(self: Any, num_columns: int = 1, filled_row: int | None = None) -> None:
        self.cursor += num_columns

    patch.setattr(ring.Ring, "advance", advance)


@mutation
def equals_are_preempted(patch: Patch) -> None:
    def victims(self: Any, who: Any) -> Any:
        held = [one for _, one in self._ring.held if one.priority <= who.priority and not who.suspended]
        for num in range(1, len(held) + 1):
            if self._config.preemptive and self.shape_with(who, held[:num]) is not None:
                return held[:num]
        return None

    patch.setattr(fitting.Fitting, "victims_for", victims)


@mutation
def the_urgent_wait(patch: Patch) -> None:
    rank = lambda one: (0, not one.suspended, one.serial)  # noqa: E731
    for module in (queue, parked_rows):
        patch.setattr(module, "rank", rank)


@mutation
def equals_are_suspended_for_room_and_come_back_first(patch: Patch) -> None:
    """Suspend a query for an equal and let it come back first, without its holes."""
    admit = scheduler.RebatchingScheduler._admit

    def compact(self: Any) -> None:
        for _, one in self.ring.held:
            if self._config.preemptive and len(self.queue) and one.priority == self.queue.head.priority:
                self._suspend(one)
                break
        admit(self)

    patch.setattr(scheduler.RebatchingScheduler, "_admit", compact)


@mutation
def prompts_pass_suspended_queries(patch: Patch) -> None:
    """Serve a query without a row before one that has its row beside the ring."""

    def head(self: Any) -> Any:
        return next((one for one in self if one.location is KVLocation.NOT_COMPUTED), self.window(1)[0])

    patch.setattr(queue.QueryQueue, "head", property(head))


@mutation
def queries_join_in_every_other_step(patch: Patch) -> None:
    admit = scheduler.RebatchingScheduler._admit

    def rarely(self: Any) -> None:
        if not self.ring.num_held or self.ring.cursor % 2:
            admit(self)

    patch.setattr(scheduler.RebatchingScheduler, "_admit", rarely)


@mutation
def rows_that_leave_take_no_memory(patch: Patch) -> None:
    patch.setattr(
        parked_rows.ParkedRows, "device_bytes", property(lambda self: self._bytes(KVLocation.DEVICE))
    )


@mutation
def a_short_ring_is_not_made_longer(patch: Patch) -> None:
    patch.setattr(scheduler.RebatchingScheduler, "_keep_in_length", lambda self: None)


@mutation
def a_row_is_computed_before_its_tokens_have_come(patch: Patch) -> None:
    ready = lambda one: one.location is KVLocation.NOT_COMPUTED  # noqa: E731
    for module in (scheduler, prefilling, fitting):
        patch.setattr(module, "is_ready", ready)


@mutation
def tokens_in_flight_are_lost_with_a_failed_step(patch: Patch) -> None:
    lose = scheduler.RebatchingScheduler.lose_device
    patch.setattr(
        scheduler.RebatchingScheduler, "lose_device", lambda self, flying, left: lose(self, (), left)
    )


@mutation
def a_suspended_query_forgets_a_token(patch: Patch) -> None:
    note = query.Query.note_suspended

    def forget(self: Any) -> None:
        note(self)
        self.num_sampled -= 1

    patch.setattr(query.Query, "note_suspended", forget)


@mutation
def who_ended_keeps_its_row(patch: Patch) -> None:
    remove = scheduler.RebatchingScheduler.remove

    def keep(self: Any, who: Any) -> None:
        if who.location is not KVLocation.RING:
            remove(self, who)

    patch.setattr(scheduler.RebatchingScheduler, "remove", keep)


@mutation
def all_that_is_lost_is_to_blame(patch: Patch) -> None:
    held = lambda self: {one for _, one in self.scheduler.ring.held}  # noqa: E731
    patch.setattr(
        loop.RebatchingLoop, "_in", lambda self, failed, scheduled: held(self) | loop._sampled_by(scheduled)
    )
