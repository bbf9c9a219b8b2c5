"""Bugs to plant around the counts of penalties, one per function; see `mutations`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pensieve_jax.decoding import adjustments
from pensieve_jax.engine.late_rows import LateRows
from pensieve_jax.scheduler.count_slots import CountSlots
from tests.engine.mutations import Mutation


def slots_outlive_a_failed_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CountSlots, "forget", lambda self: None)


def _with_seeds(change: Callable[..., dict[str, Any]]) -> Mutation:
    """Seed slots with other arguments; `change` gets those of `seeds` and returns the new ones."""
    seeds = adjustments.seeds

    def mutation(patch: pytest.MonkeyPatch) -> None:
        def seeded(slot, context_ids, reply_ids, *, clears):
            given = {"context_ids": context_ids, "reply_ids": reply_ids, "clears": clears}
            return seeds(slot, **(given | change(**given)))

        patch.setattr(adjustments, "seeds", seeded)

    return mutation


def id_in_flight_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = CountSlots.count

    def counting(self, requests, ends, counted):
        found = count(self, requests, ends, counted)
        counted[1] = -1
        return found

    patch.setattr(CountSlots, "count", counting)


def id_of_another_row_is_counted(patch: pytest.MonkeyPatch) -> None:
    count = CountSlots.count

    def counting(self, requests, ends, counted):
        found = count(self, requests, ends, counted)
        in_flight = counted[1] >= 0
        counted[1, in_flight] = counted[1, in_flight][::-1]
        return found

    patch.setattr(CountSlots, "count", counting)


def slot_of_a_row_of_the_step_is_taken(patch: pytest.MonkeyPatch) -> None:
    """Take the slot that was used last."""

    def take(self):
        if len(self._held) < self._num_slots:
            return len(self._held)
        return self._held.pop(next(reversed(self._held))).index

    patch.setattr(CountSlots, "_take", take)


def masks_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    words = LateRows.words

    def made(self, sampling, num_rows):
        found = words(self, sampling, num_rows)
        if found is not None:
            found[: len(sampling)] = found[: len(sampling)][::-1].copy()
        return found

    patch.setattr(LateRows, "words", made)


COUNT_MUTATIONS: dict[str, Mutation] = {
    "slots of counts outlive a failed step": slots_outlive_a_failed_step,
    "counts of another turn are not cleared": _with_seeds(lambda **given: {"clears": False}),
    "an id in flight is not counted": id_in_flight_is_not_counted,
    "an id of another row is counted": id_of_another_row_is_counted,
    "ids of a step that a turn sat out are not counted": _with_seeds(
        lambda clears, reply_ids, **_: {"reply_ids": reply_ids if clears else ()}
    ),
    "ids before a suspension are not counted": _with_seeds(
        lambda clears, reply_ids, **_: {"reply_ids": () if clears else reply_ids}
    ),
    "the context is not counted": _with_seeds(lambda **given: {"context_ids": ()}),
    "the slot of another row is taken": slot_of_a_row_of_the_step_is_taken,
    "the mask of another row": masks_of_other_rows,
}
# Scenarios rarely have more turns with penalties than slots; `tests.scheduler.test_count_slots` has them.
RARE_COUNT_MUTATIONS = frozenset(
    {"slots of counts outlive a failed step", "ids before a suspension are not counted"}
)
