"""The ring's shape for a new query, to the exact column, and the victims of a more urgent one."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve_jax.rebatching.fitting import Fitting, num_tokens
from pensieve_jax.rebatching.query import KVLocation, Query
from pensieve_jax.rebatching.ring import Ring
from pensieve_jax.rebatching.ring_shapes import RingShape
from tests.rebatching.small_queries import query, ring_shapes_of


def fitting_of(
    shape: tuple[int, int] | None, *held: tuple[Query, int], num_rows: int = 40, **config: Any
) -> Fitting:
    """Make a ring of this shape. `held` gives the queries in it and their numbers of columns."""
    made, ring_shapes = ring_shapes_of(num_rows, **config)
    ring: Ring[Query] = Ring()
    if shape is not None:
        ring.resize(RingShape(*shape))
    for one, num in held:
        ring.insert(one, num)
        one.location = KVLocation.RING
    return Fitting(made, ring_shapes, ring)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "length"),
    [(31, 2, 32), (32, 2, 64), (32, 1, 32), (33, 1, 64), (127, 2, 128), (128, 1, 128)],
)
def test_a_query_needs_one_column_more_if_it_continues(num_prompt, max_tokens, length):
    """The step after its prefill writes one; a reply of one token ends with the prefill."""
    newcomer = query(1, num_prompt, max_tokens=max_tokens)
    found = fitting_of(None).shape_with(newcomer)
    assert (None if found is None else found.length) == length


def test_a_query_that_has_its_row_needs_one_column_more():
    """Its last sampled token has none yet."""
    newcomer = query(1, 30)
    newcomer.num_sampled = 2
    assert num_tokens(newcomer) == 32
    newcomer.location = KVLocation.DEVICE
    assert num_tokens(newcomer) == 31
    assert fitting_of(None).num_columns(newcomer) == 32
    newcomer.num_sampled = newcomer.max_num_tokens - 1
    assert fitting_of(None).num_columns(newcomer) == num_tokens(newcomer) + 1


@pytest.mark.parametrize(("num_held", "length"), [(31, 32), (32, 64), (63, 64), (64, 128)])
def test_the_next_step_writes_a_column_behind_the_longest_row(num_held, length):
    """That column must exist when a query joins."""
    fitting = fitting_of((4, 32 if num_held <= 32 else 64), (query(1), num_held))
    assert fitting.shape_with(query(2)) == (4, length)


def test_a_ring_with_a_free_row_keeps_its_shape():
    """It does although a shorter one would suffice."""
    assert fitting_of((2, 128), (query(1), 20)).shape_with(query(2)) == (2, 128)


def test_an_empty_ring_takes_the_required_shape():
    assert fitting_of((4, 128)).shape_with(query(2)) == (4, 32)


def test_a_longer_query_makes_the_ring_longer():
    fitting = fitting_of((4, 32), (query(1), 20))
    assert fitting.shape_with(query(2, 32)) == (4, 64)


def test_a_full_ring_that_cannot_be_wider_is_full():
    held = [(query(serial), 20) for serial in range(4)]
    assert fitting_of((4, 32), *held).shape_with(query(9)) is None
    assert fitting_of((4, 128), *held).shape_with(query(9)) is None


@pytest.mark.parametrize(("span", "is_shorter"), [(47, True), (48, False)])
def test_a_full_ring_becomes_shorter_and_wider_with_a_quarter_to_spare(span, is_shorter):
    """Of 64 columns 48 may be needed, one of them by the next step; otherwise it would soon be too short."""
    fitting = fitting_of((1, 128), (query(1), span), num_rows=6)
    assert [tuple(one) for one in ring_shapes_of(6)[1].shapes] == [(4, 32), (2, 64)]
    fitting = fitting_of((1, 128), (query(1), span), num_rows=8)
    assert [tuple(one) for one in ring_shapes_of(8)[1].shapes] == [(4, 32), (3, 64), (1, 128)]
    assert fitting.shape_with(query(2)) == ((3, 64) if is_shorter else None)


def test_a_longer_ring_may_be_too_narrow():
    """Three rows of 64 columns fit the budget, one of 128."""
    fitting = fitting_of((3, 64), (query(1), 20), num_rows=8)
    assert fitting.shape_with(query(2, 64)) is None


@pytest.mark.parametrize(("num_prompt", "fits"), [(44, True), (45, False)])
def test_a_shaped_prompt_comes_behind_the_existing_columns(num_prompt, fits):
    fitting = fitting_of((2, 64), (query(1), 20), insertion="shape", lengths=(64,))
    assert (fitting.shape_with(query(2, num_prompt)) is not None) == fits


def test_which_queries_are_shaped():
    """A query is shaped if it has no row yet, and others are there to be padded to it."""
    newcomer = query(2)
    assert fitting_of((2, 64), (query(1), 20), insertion="shape").is_shaped(newcomer)
    assert not fitting_of((2, 64), insertion="shape").is_shaped(newcomer)
    assert not fitting_of((2, 64), (query(1), 20)).is_shaped(newcomer)
    newcomer.location = KVLocation.DEVICE
    assert not fitting_of((2, 64), (query(1), 20), insertion="shape").is_shaped(newcomer)


@pytest.mark.parametrize(("priority", "is_urgent"), [(0, False), (1, False), (2, True)])
def test_a_query_takes_the_row_of_a_less_urgent_one_alone(priority, is_urgent):
    held = query(1, priority=1)
    fitting = fitting_of((1, 32), (held, 20), max_batch=1, preemptive=True)
    assert fitting.victims_for(query(2, priority=priority)) == ([held] if is_urgent else None)


def test_without_preemption_no_query_leaves():
    fitting = fitting_of((1, 32), (query(1), 20), max_batch=1, preemptive=False)
    assert fitting.victims_for(query(2, priority=5)) is None


def test_the_latest_of_the_least_urgent_leaves():
    held = [query(1, priority=1), query(2), query(3), query(4, priority=2)]
    fitting = fitting_of((4, 32), *((one, 20) for one in held), preemptive=True)
    assert fitting.victims_for(query(9, priority=5)) == [held[2]]


def test_no_query_leaves_if_that_would_not_suffice():
    """The new query needs more room than all less urgent ones have."""
    held = [query(1, priority=9), query(2)]
    fitting = fitting_of((3, 64), *((one, 60) for one in held), num_rows=8, preemptive=True)
    assert fitting.victims_for(query(3, 100, priority=5)) is None


def ready(*lengths: int) -> list[Query]:
    return [query(serial, length) for serial, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "num", "shape"),
    [
        ((20, 20, 20, 20, 20), 4, (4, 32)),
        ((20, 40, 20, 20), 3, (3, 64)),
        ((20, 20, 20, 40), 3, (4, 32)),
        ((100, 20), 1, (1, 128)),
        ((20, 200), 1, (4, 32)),
        ((200,), 0, None),
        ((), 0, None),
    ],
)
def test_a_batch_is_the_first_queries_that_fit_together(lengths, num, shape):
    """A query that does not fit ends the batch: none behind it in the queue may pass it."""
    waiting = ready(*lengths)
    assert fitting_of(None, num_rows=8).batch_of(waiting) == (waiting[:num], shape)


def test_a_batch_ends_before_a_query_whose_tokens_have_not_arrived():
    waiting = ready(20, 20, 20)
    waiting[1].num_sampled = 1
    assert fitting_of(None).batch_of(waiting)[0] == waiting[:1]
    waiting[1].location = KVLocation.HOST
    assert fitting_of(None).batch_of(waiting)[0] == waiting
