"""When the ring grows and shrinks, what is prefilled ahead, and the counters of a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.rebatching.config import RebatchingConfig
from pensieve_jax.rebatching.query import KVLocation
from pensieve_jax.rebatching.ring import Ring
from pensieve_jax.rebatching.ring_shapes import RingShape, RingShapes, lengths_up_to
from pensieve_jax.rebatching.scheduler import RebatchingScheduler
from tests.rebatching.small_queries import ring_shapes_of
from tests.rebatching.test_methods import TOKEN_BYTES, Run, submit_three

ROW_BYTES = 32 * TOKEN_BYTES


def shape(run: Run) -> tuple[int, int]:
    assert run.ring.shape is not None
    return tuple(run.ring.shape)  # type: ignore[return-value]


def test_the_ring_becomes_longer_when_a_column_is_missing():
    """A row of 31 columns has room for the next step; the one after it takes a longer ring."""
    run = Run("Baton-PD")
    run.submit(30, 9)
    shapes = []
    for _ in range(4):
        run.step()
        shapes.append((run.ring.span, shape(run)))
    assert shapes == [(31, (2, 32)), (32, (2, 32)), (33, (2, 64)), (34, (2, 64))]
    assert run.loop.metrics.num_resizes == 2


@pytest.mark.parametrize(("urgent", "leaves"), [(3, 2), (2, 3), (0, 3)])
def test_a_longer_ring_may_be_narrower(urgent, leaves):
    """Four rows of 32 columns become three of 64: the last one of the lowest priority leaves."""
    run = Run("Baton-PD", max_batch=4, kv_bytes=8 * ROW_BYTES)
    assert [tuple(one) for one in run.ring_shapes.shapes] == [(4, 32), (3, 64), (1, 128)]
    for serial in range(4):
        run.submit(30, 9, priority=int(serial == urgent))
    run.step(2)
    assert shape(run) == (4, 32) and run.ring.num_held == 4
    run.step()
    assert shape(run) == (3, 64) and run.ring.num_held == 3
    assert [one.serial for one in run.queries if one.suspended] == [leaves]
    assert run.loop.metrics.num_suspensions == 1
    run.run()
    assert all(len(one.result().token_ids) == 9 for one in run.queries)


def test_ended_rows_of_a_batch_that_runs_to_its_end_make_way_for_running_ones():
    """An ended row is released before a running one is suspended."""
    run = Run("PD", max_batch=4, kv_bytes=8 * ROW_BYTES)
    run.submit(20, 2)
    for _ in range(3):
        run.submit(30, 9)
    run.run()
    assert run.loop.metrics.num_suspensions == 0
    assert all(len(one.result().token_ids) in (2, 9) for one in run.queries)


def sparse_steps(num_prompt: int) -> list[int]:
    """Return the ring's length in each step after the only long query has left."""
    run = Run("Baton-PD", lengths=(32, 64))
    run.submit(40, 2)
    lengths = []
    for step in range(60):
        if step % 5 == 0:
            run.submit(num_prompt, 10)
        run.step()
        lengths.append(shape(run)[1])
    return lengths


@pytest.mark.parametrize("num_prompt", [5, 13])
def test_a_ring_that_is_longer_than_needed_becomes_shorter(num_prompt):
    """This takes half its length in steps with less than a third of it used: at most 21 of 64 columns."""
    lengths = sparse_steps(num_prompt)
    num_long = lengths.index(32)
    assert num_long == 1 + 64 // 2 - 1
    assert set(lengths[num_long:]) == {32}


def test_a_ring_that_is_used_stays_long():
    """An occasional use of 22 of its 64 columns suffices: the count begins again."""
    assert set(sparse_steps(14)) == {64}


@pytest.mark.parametrize(("prefill_ahead", "num"), [(0, 0), (1, 1), (2, 2), (None, 2)])
def test_the_number_of_prefills_ahead_is_limited(prefill_ahead, num):
    """None means as many as the batch has rows; a program takes one prompt here."""
    run = Run("Baton-PD", prefill_ahead=prefill_ahead, prefill_batch=1)
    for _ in range(6):
        run.submit(10, 20)
    run.step(6)
    assert [one.location for one in run.queries[2:]].count(KVLocation.DEVICE) == num
    assert len(run.loop.scheduler.parked) == num


def test_one_program_of_prompts_per_step_while_others_decode():
    run = Run("Baton-PD", prefill_batch=1, max_batch=4)
    run.submit(10, 20)
    run.step(2)
    for _ in range(3):
        run.submit(10, 20)
    run.step(3)
    assert [step.count("prefill") for step in run.steps] == [1, 0, 1, 1, 1]
    assert run.ring.num_held == 4


def test_an_empty_batch_is_filled_at_once():
    """The limit of one program a step protects decoding queries, and there are none yet."""
    run = Run("Baton-PD", prefill_batch=1, max_batch=4)
    for _ in range(4):
        run.submit(10, 20)
    run.step()
    assert run.steps[0].count("prefill") == 4 and run.ring.num_held == 4


def test_a_reply_of_one_token_needs_no_row_of_the_ring():
    run = Run("Baton-PD")
    run.submit(10, 1)
    assert run.run() == ["prefill:0x32 freerow:0", ""]
    assert run.loop.metrics.num_insertions == 0 and not len(run.loop.scheduler.parked)


def test_an_urgent_query_takes_a_row_and_the_other_resumes_later():
    """Section 4.3: the row is taken out, stored, and inserted again."""
    run = Run("Baton-PD", max_batch=1, preemptive=True)
    run.submit(10, 6)
    run.step(2)
    run.submit(10, 3, priority=1)
    assert run.run() == [
        "prefill:0x32 insert:0 decode:0",
        "decode:0",
        "suspend:0 prefill:1x32 insert:1 decode:1",
        "decode:1",
        "insert:0 decode:0",
        "decode:0",
        "decode:0",
        "",
    ]
    usage = run.queries[0].result().usage
    assert usage.num_suspensions == 1 and usage.resume_recomputed_tokens == 0


# Counters.


def test_counts_of_a_run_to_the_end():
    """The rows of 64 columns run for five steps, those of 32 for two."""
    run = Run("Benchmark")
    submit_three(run)
    run.run()
    counted = run.loop.metrics.as_dict()
    expected = {
        "num_steps": 7,
        "num_shaped_steps": 0,
        "row_steps": 14,
        "read_columns": 5 * 2 * 64 + 2 * 2 * 32,
        "live_columns": (11 + 41) + (12 + 42) + 43 + 44 + 45 + 21 + 22,
        "computed_tokens": 14,
        "idle_tail": 2,
        "idle_waiting": 3,
        "idle_late": 0,
        "num_prefills": 2,
        "prefill_tokens": 70,
        "padded_prefill_tokens": 2 * 64 + 32,
        "num_insertions": 3,
        "num_suspensions": 0,
        "num_parked": 0,
        "num_returned": 0,
        "num_resizes": 2,
        "num_logits_errors": 0,
        "num_failed_steps": 0,
        "max_kv_bytes": (2 * 64 + 2 * 64) * TOKEN_BYTES,
        "idle_row_share": 5 / 14,
    }
    assert counted == expected


def test_counts_of_shaped_steps():
    """A shaped step computes all its columns in every row."""
    run = Run("Baton")
    run.submit(10, 4)
    run.step()
    run.submit(40, 2)
    run.run()
    counted = run.loop.metrics
    assert (counted.num_steps, counted.num_shaped_steps) == (3, 1)
    assert counted.computed_tokens == 2 * (1 + 40 + 1)
    assert (counted.idle_tail, counted.idle_waiting) == (1, 0)


def test_a_token_of_a_cancelled_query_is_counted():
    """A step's token of a ring row is counted; a prefill has no row."""
    run = Run("Baton-PD")
    one = run.submit(10, 9)
    run.step()
    assert run.loop.cancel(one)
    run.step()
    assert run.loop.metrics.idle_late == 1
    assert run.loop.metrics.as_dict()["idle_row_share"] == (1 + 1) / 2


def test_without_steps_there_is_no_idle_time():
    assert Run("Baton").loop.metrics.as_dict()["idle_row_share"] == 0.0
    assert set(Run("Baton").loop.metrics.as_dict().values()) == {0}


# Ring shapes and the ring.


def test_shapes_at_their_bounds():
    _, ring_shapes = ring_shapes_of(8)
    assert [tuple(one) for one in ring_shapes.shapes] == [(4, 32), (3, 64), (1, 128)]
    assert [ring_shapes.shape_for(num) for num in (0, 32, 33, 64, 128, 129)] == [
        (4, 32),
        (4, 32),
        (3, 64),
        (3, 64),
        (1, 128),
        None,
    ]
    assert [ring_shapes.length_for(num) for num in (1, 32, 33, 128)] == [32, 32, 64, 128]
    assert ring_shapes.max_context_tokens == 129 and ring_shapes.unused_lengths == ()
    assert ring_shapes.room_bytes(RingShape(3, 64)) == 2 * ROW_BYTES
    assert lengths_up_to(ring_shapes.shapes, 64) == [32, 64]


def test_a_length_without_room_for_a_second_row_is_unused():
    _, ring_shapes = ring_shapes_of(7)
    assert [tuple(one) for one in ring_shapes.shapes] == [(4, 32), (2, 64)]
    assert ring_shapes.unused_lengths == (128,) and ring_shapes.max_context_tokens == 65


@pytest.mark.parametrize(
    ("max_tokens", "lengths"),
    [
        (2048, [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]),
        (2049, [512, 768, 1024, 1536, 2048]),
        (2050, [512, 768, 1024, 1536, 2048, 2080]),
        (33, [32]),
        (34, [64]),
        (98, [64, 96, 128]),
    ],
)
def test_lengths_that_follow_from_the_context(max_tokens, lengths):
    """1 and 1.5 times powers of two; the last token needs no column."""
    ring_shapes = RingShapes(RebatchingConfig(max_batch=1), 1, max_tokens)
    assert [one.length for one in ring_shapes.shapes] == lengths


def test_rows_of_a_ring():
    ring: Ring[str] = Ring()
    ring.resize(RingShape(3, 8))
    assert [ring.insert(name, 2) for name in "abc"] == [0, 1, 2]
    ring.advance()
    ring.release(1)
    assert ring.held == [(0, "a"), (2, "c")] and ring.insert("d", 1) == 1
    assert [ring.row_span(row) for row in range(3)] == [3, 1, 3] and ring.span == 3
    assert ring.places(0).tolist() == [6, 7, 0] and ring.place(9) == 1
    moved = ring.resize(RingShape(4, 4))
    assert moved is not None and moved.rows.tolist() == [0, 1, 2, 0]
    assert moved.columns.tolist() == [0, 5, 6, 7]
    assert ring.insert("e", 0) == 3
    for row in range(4):
        assert ring.cursor == 1
        ring.release(row)
    assert ring.cursor == 0 and ring.resize(RingShape(1, 4)) is None
    ring.clear()
    assert ring.shape is None and not ring.num_held and ring.span == 0


def test_a_ring_has_no_more_rows_than_its_shape():
    """This also holds after a change of the shape."""
    ring: Ring[str] = Ring()
    for batch in (1, 2, 3):
        ring.resize(RingShape(batch, 8))
        ring.insert("x", 1)
        with pytest.raises(ValueError, match="None"):
            ring.insert("y", 1)


def test_other_rows_get_holes_behind_their_tokens():
    ring: Ring[str] = Ring()
    ring.resize(RingShape(2, 16))
    ring.insert("a", 2)
    for _ in range(2):
        row = ring.insert("b", 0)
        ring.advance(3, filled_row=row)
        ring.release(row)
    ring.advance()
    assert ring.places(0).tolist() == [14, 15, 0, 3, 6] and ring.row_span(0) == 9
    assert len(ring._row(0).holes) == 2, "a step of one token leaves no hole"


def test_a_resize_that_changes_nothing_is_not_launched():
    run = Run("Baton-PD")
    run.submit(10, 5)
    run.submit(10, 5)
    run.run()
    assert run.loop.metrics.num_resizes == 1


# Losses with a device.


def test_queries_in_the_ring_are_lost_with_it_and_those_in_host_memory_are_not():
    """They wait again, with the tokens that have arrived."""
    run = Run("Baton-PD", preemptive=True, prefill_batch=1)
    for _ in range(4):
        run.submit(10, 20)
    run.step(4)
    scheduler = run.loop.scheduler
    first, second, third, fourth = run.queries
    assert [one.location for one in run.queries] == [
        KVLocation.RING,
        KVLocation.RING,
        KVLocation.DEVICE,
        KVLocation.DEVICE,
    ]
    third.location = KVLocation.HOST
    lost = scheduler.lose_device((), lambda serial: serial == third.serial)
    assert lost == [first, second, fourth]
    assert all(
        one.location is KVLocation.NOT_COMPUTED and one.num_sampled == len(one.token_ids) for one in lost
    )
    assert list(scheduler.queue) == [first, second, third, fourth] and third.location is KVLocation.HOST
    assert set(scheduler.parked.sizes) == {third} and not run.ring.num_held
    assert scheduler.parked.room_bytes == run.ring_shapes.kv_bytes


def test_ended_queries_are_not_lost():
    """Neither are those whose last token was launched, unless it was lost in flight."""
    run = Run("Benchmark")
    run.submit(10, 2)
    run.submit(10, 9)
    run.step(3)
    first, second = run.queries
    assert first.done and run.ring.num_held == 2
    assert run.loop.scheduler.lose_device([first, second], lambda serial: True) == [second]


def test_an_incomplete_copy_to_host_memory_is_lost():
    run = Run("Baton-PD", prefill_batch=1)
    for _ in range(3):
        run.submit(10, 20)
    run.step(3)
    third = run.queries[2]
    third.location = KVLocation.HOST
    assert third in run.loop.scheduler.lose_device((), lambda serial: False)


@pytest.mark.parametrize("method", ["Baton", "Baton-PD"])
def test_a_cancelled_query_leaves_the_ring(method):
    run = Run(method)
    one, other = run.submit(10, 9), run.submit(10, 9)
    run.step(2)
    run.loop.cancel(one)
    assert [owner for _, owner in run.ring.held] == [other]


def test_a_cancelled_query_keeps_the_row_of_a_batch_that_runs_to_its_end():
    run = Run("PD")
    one, other = run.submit(10, 9), run.submit(10, 9)
    run.step(2)
    run.loop.cancel(one)
    assert [owner for _, owner in run.ring.held] == [one, other] and one.location is KVLocation.RELEASED
    assert run.loop.cancel(other) and not run.loop.cancel(other)


def test_a_row_beside_the_ring_is_dropped_with_its_query():
    run = Run("Baton-PD", prefill_batch=1)
    for _ in range(3):
        run.submit(10, 20)
    run.step(3)
    assert len(run.loop.scheduler.parked) == 1
    run.loop.cancel(run.queries[2])
    assert not len(run.loop.scheduler.parked) and not len(run.loop.scheduler.queue)
    assert run.loop.scheduler.take_drops() == []


def test_a_row_comes_back_from_host_memory_before_it_is_needed():
    """Only the first in the queue comes back, once there is room."""
    run = Run("Baton-PD", prefill_batch=1)
    for _ in range(4):
        run.submit(10, 20)
    run.step(4)
    runner, third, fourth = run.loop._runner, *run.queries[2:]
    for one in (third, fourth):
        one.location, runner.rows[one.serial].where = KVLocation.HOST, "host"  # type: ignore[attr-defined]
    run.step()
    assert run.steps[-1] == "decode:0,1 return:2"
    assert (third.location, fourth.location) == (KVLocation.DEVICE, KVLocation.HOST)


def test_after_an_interrupt_all_running_and_waiting_queries_fail():
    """The loop then begins with an empty batch."""
    run = Run("Baton-PD")
    for _ in range(3):
        run.submit(10, 20)
    run.step(2)
    run.loop.lose_everything(RuntimeError("planted"))
    for query in run.queries:
        with pytest.raises(StepFailedError, match="planted"):
            query.result()
    assert not run.loop.queries and not run.loop.scheduler.ring.num_held and not len(run.loop.scheduler.queue)
    run.ring = run.loop.scheduler.ring
    again = run.submit(10, 2)
    run.run()
    assert len(again.result().token_ids) == 2


@pytest.mark.parametrize(("span", "expected"), [(41, 64), (42, 64), (43, 128), (44, 128)])
def test_a_shorter_ring_leaves_half_the_span_and_one_column(span, expected):
    """Of 43 columns the half is 21, so with one more they need 65."""
    config, ring_shapes = ring_shapes_of(64, max_batch=1, lengths=(32, 64, 128, 256))
    scheduler, resized = RebatchingScheduler(config, ring_shapes), []
    shape = RingShape(1, 256)
    scheduler.ring = SimpleNamespace(shape=shape, span=span)  # type: ignore[assignment]
    scheduler._resize = resized.append  # type: ignore[assignment,method-assign]
    for _ in range(shape.length // 2):
        assert resized == []
        scheduler._shrink_if_sparse()
    assert [one.length for one in resized] == [expected]
