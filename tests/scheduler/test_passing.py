"""Requests that pass one which lacks pages: what may pass, what gives way, and that none is delayed by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.config import PROMPT_ORDERS
from pensieve_jax.scheduler import Request, RequestStatus, Scheduler
from pensieve_jax.scheduler.scheduler import MAX_PASSED
from tests.engine.mutations import later_arrivals_keep_their_pages
from tests.scheduler.helpers import CHUNK, SchedulerHarness
from tests.scheduler.test_two_tiers import returning


def name_of(request: Request) -> str:
    return request.conversation.conversation_id


def names(requests: Sequence[Request]) -> list[str]:
    return [name_of(request) for request in requests]


def crowded(num_pages: int = 10, **options) -> SchedulerHarness:
    """Return a harness where `first` decodes and leaves three pages, and `long` waits for six."""
    options = {"max_num_batched_tokens": 1000} | options
    harness = SchedulerHarness(num_pages, **options)
    harness.add("first", (num_pages - 3) * CHUNK - 8, max_tokens=8)
    harness.step()
    harness.add("long", 6 * CHUNK - 8, max_tokens=4)
    harness.step()
    assert names(harness.scheduler.running) == ["first"] and names(harness.scheduler.waiting) == ["long"]
    return harness


def test_a_request_that_fits_passes_one_that_does_not():
    harness = crowded()
    short = harness.add("short", 5, max_tokens=3)
    assert harness.step().admitted == (short,)
    assert names(harness.scheduler.running) == ["first", "short"]
    assert harness.steps[-1] == [("first", 105, 106, True), ("short", 0, 5, True)]
    assert names(harness.scheduler.waiting) == ["long"]


def test_several_requests_pass_by_arrival_as_far_as_they_fit():
    """Three pages are free: the second short one needs two, so the third has no room."""
    harness = crowded()
    for name, num_tokens in (("a", 5), ("b", CHUNK + 1), ("c", 5)):
        harness.add(name, num_tokens, max_tokens=2)
    assert names(harness.step().admitted) == ["a", "b"]
    assert names(harness.scheduler.waiting) == ["long", "c"]


def test_a_request_that_passes_leaves_the_reserve():
    harness = crowded(reserve_pages=2)
    harness.add("two", CHUNK + 1)
    one = harness.add("one", 5)
    assert harness.step().admitted == (one,), "three pages are free, and two must stay"


def test_the_long_request_starts_as_soon_as_without_those_that_passed():
    """It joins in the step in which the first one's pages are free; what it needs is taken back."""
    started = []
    for names_of_short in ((), ("a", "b", "c")):
        harness = crowded()
        short = [harness.add(name, CHUNK - 2, max_tokens=40) for name in names_of_short]
        while "long" not in names(harness.step().admitted):
            assert len(harness.steps) < 30
        started.append(len(harness.steps))
    assert started[0] == started[1]
    long, *running = harness.scheduler.running
    assert name_of(long) == "long" and running == short[: len(running)]
    assert all(request.status is RequestStatus.WAITING for request in short[len(running) :])


@pytest.mark.parametrize(("num_pages", "suspended"), [(9, ""), (8, "c"), (7, "cb"), (6, "cba")])
def test_the_latest_arrivals_give_way_and_only_as_many_as_needed(num_pages, suspended):
    """Three short ones have a page each when the long one takes six."""
    harness = crowded(num_pages, max_num_running=8)
    for name in "abc":
        harness.add(name, 6, max_tokens=40)
    assert names(harness.step().admitted) == ["a", "b", "c"]
    while not (output := harness.step()).admitted:
        assert output.suspended == ()
    assert names(output.admitted) == ["long"] and names(output.suspended) == list(suspended)
    assert names(harness.scheduler.running) == ["long", *"abc"[: 3 - len(suspended)]]
    assert names(harness.scheduler.waiting) == list(suspended[::-1])


def test_places_in_the_batch_give_way_too():
    """Both places of the first one and of `short` go to those that waited, though pages are there for all."""
    harness = SchedulerHarness(10, max_num_running=2, max_num_batched_tokens=1000)
    harness.add("first", 7 * CHUNK - 8, max_tokens=8)
    harness.step()
    long, second = harness.add("long", 5 * CHUNK - 4), harness.add("second", 4 * CHUNK - 4)
    short = harness.add("short", 2, max_tokens=60)
    assert harness.step().admitted == (short,)
    while not (output := harness.step()).admitted:
        assert output.suspended == ()
    assert output.admitted == (long, second) and output.suspended == (short,)
    assert short.sequence.num_resident == 1


def test_the_reserve_may_be_pages_that_later_arrivals_hold():
    """One page of 16 stays available beside all three: the short one would give up two more."""
    harness = SchedulerHarness(16, reserve_pages=2, max_num_batched_tokens=1000)
    stays = harness.add("stays", CHUNK + 1, max_tokens=60)
    harness.add("first", 9 * CHUNK - 8, max_tokens=8)
    harness.step()
    long, short = harness.add("long", 11 * CHUNK - 2), harness.add("short", CHUNK + 2, max_tokens=60)
    assert harness.step().admitted == (short,)
    while not (output := harness.step()).admitted:
        pass
    assert output.admitted == (long,) and output.suspended == ()
    assert harness.scheduler.running == [stays, long, short]
    assert harness.cache.manager.num_available() == 1


def test_a_later_arrival_is_suspended_before_an_earlier_one_loses_its_pages():
    """The first one grows into the pages of the short one, not into those that `long` left behind."""
    harness = SchedulerHarness(8, max_num_batched_tokens=1000)
    harness.conversation("long", 3 * CHUNK)
    harness.add("first", 3 * CHUNK, max_tokens=60)
    harness.step()
    long = harness.add("long", 4 * CHUNK)
    short = harness.add("short", 2, max_tokens=60)
    assert harness.step().admitted == (short,)
    kept = [chunk.readable for chunk in long.sequence.chunks]
    while short.status is RequestStatus.RUNNING:
        assert [chunk.readable for chunk in long.sequence.chunks] == kept == [True] * 3
        output = harness.step()
    assert output.suspended == (short,) and output.drops == ()
    harness.step()
    assert [chunk.readable for chunk in long.sequence.chunks] == kept


def test_an_earlier_request_joins_in_a_step_that_suspends_later_ones():
    """The first one ends in the step in which a short one finds no page to grow; the oldest must advance."""
    harness = SchedulerHarness(4, max_num_batched_tokens=1000)
    first = harness.add("first", 2 * CHUNK, max_tokens=15)
    harness.step()
    long = harness.add("long", 3 * CHUNK)
    short = [harness.add(name, CHUNK, max_tokens=40) for name in ("a", "b")]
    outputs = [harness.step() for _ in range(16)]
    assert first.status is RequestStatus.FINISHING
    assert [names(output.admitted) for output in outputs if output.admitted][-1] == ["long"]
    assert long.status is RequestStatus.RUNNING and short[1].status is RequestStatus.WAITING


def test_nothing_later_is_admitted_in_a_step_that_suspends_a_request():
    """The suspended one frees the pages that it has not filled, and `late` would fit there at once."""
    harness = SchedulerHarness(12, max_num_batched_tokens=32)
    first = harness.add("first", 2 * CHUNK - 2, max_tokens=60)
    harness.step()
    second, late = harness.add("second", 10 * CHUNK, max_tokens=2), harness.add("late", 2)
    while not (output := harness.step()).suspended:
        assert late.status is RequestStatus.WAITING
    assert output.suspended == (second,) and output.admitted == ()
    assert harness.step().admitted == (late,) and harness.scheduler.running == [first, late]


def test_a_request_that_waits_for_a_copy_is_not_passed_and_suspends_none():
    """It has room, but a chunk of it is on its way to host memory."""
    harness = SchedulerHarness(12, 12, max_num_batched_tokens=1000)
    harness.conversation("back", 4 * CHUNK)
    harness.add("first", 3 * CHUNK, max_tokens=60)
    harness.step()
    sequence, cache = harness.sequences["back"][1], harness.cache
    cache.manager.push_out(sequence, 1)
    cache.begin()
    back, short = harness.add("back", 2), harness.add("short", 2)
    assert harness.step().admitted == ()
    cache.complete()
    assert harness.step().admitted == (back, short)


def test_later_arrivals_keep_running_while_an_earlier_one_waits_for_a_copy():
    """The first one ends, so `back` has room beside none; its chunk is still being copied out."""
    harness = SchedulerHarness(8, 8, max_num_batched_tokens=1000)
    harness.conversation("back", 4 * CHUNK)
    harness.add("first", 4 * CHUNK - 2, max_tokens=3)
    harness.step()
    cache = harness.cache
    back = harness.add("back", 2 * CHUNK)
    short = harness.add("short", 2, max_tokens=60)
    sequence = back.sequence
    index = sequence.indices_of(sequence.chunks[0].eviction_class)[0]
    cache.manager._store.swap_out(sequence, index, cache.slots.allocate())
    cache.manager._store.give_page(sequence, index)
    cache.begin()
    assert harness.step().admitted == (short,)
    outputs = [harness.step() for _ in range(4)]
    assert all(output.admitted == output.suspended == () for output in outputs)
    assert short.status is RequestStatus.RUNNING and back.status is RequestStatus.WAITING
    cache.complete()
    assert harness.step().admitted == (back,)


def test_a_request_waits_for_pages_that_are_being_copied_to():
    """They will be its own, so nothing passes it; later arrivals give way at once."""
    harness = SchedulerHarness(8, 8, max_num_batched_tokens=1000, max_num_copies=8)
    returning(harness, "gone", 2 * CHUNK + 1)
    harness.add("first", 5 * CHUNK - 2, max_tokens=2)
    harness.step()
    gone = harness.add("gone", 1)
    copying = harness.step()
    assert copying.admitted == (gone,) and len(copying.swap_ins) == 2
    harness.cache.manager.truncate(gone.sequence, 0)
    harness.scheduler.remove(gone)
    long, short = harness.add("long", 7 * CHUNK), harness.add("short", 1, max_tokens=9)
    outputs = [harness.step() for _ in range(3)]
    assert long.status is short.status is RequestStatus.WAITING
    assert all(output.admitted == () for output in outputs)
    harness.cache.complete(*[copy.copy_id for copy in copying.swap_ins])
    assert harness.step().admitted == (long, short)


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_request_passes_a_limited_number(num_more):
    harness = crowded()
    for index in range(MAX_PASSED - 1 + num_more):
        harness.add(f"also long {index}", 6 * CHUNK)
    short = harness.add("short", 2, max_tokens=1)
    assert harness.step().admitted == (() if num_more else (short,))


def test_pages_that_running_requests_share_count_once():
    """Three requests begin with a prefix of four pages; the long one between them has no room."""
    harness = SchedulerHarness(10, max_num_batched_tokens=1000)
    manager = harness.cache.manager
    prefix = manager.open_prefix("prefix", 4 * CHUNK)

    def begins_with_prefix(name):
        harness.add(name, 0)
        request = harness.scheduler.waiting.pop()
        manager.release(request.sequence)
        manager.share(request.sequence, prefix)
        request.token_ids += range(4 * CHUNK + 3)
        request.num_prompt_end, request.max_total_tokens = 4 * CHUNK + 3, 4 * CHUNK + 30
        harness.scheduler.add(request)
        return request

    first = begins_with_prefix("first")
    harness.step()
    long = harness.add("long", 6 * CHUNK)
    shared = [begins_with_prefix(name) for name in ("a", "b")]
    assert harness.step().admitted == tuple(shared)
    assert first.status is RequestStatus.RUNNING and long.status is RequestStatus.WAITING
    assert harness.cache.pool.num_free == 10 - 4 - 3


# No later arrival delays a request.


@dataclass(frozen=True)
class Arrival:
    """A turn that arrives `gap` steps after the one before it, unless its conversation has one then."""

    gap: int
    conversation: int
    prompt_len: int
    max_tokens: int


@dataclass(frozen=True)
class Pool:
    """Sizes of a scheduler and its cache; every turn fits `num_pages` alone."""

    num_pages: int
    reserve_pages: int
    max_num_running: int


def run_turns(pool: Pool, arrivals: Sequence[Arrival], **options) -> dict[int, list[tuple[int | str, ...]]]:
    """Serve the arrivals; return by index of each served one what happened to it in which steps.

    A step takes one unit of time and holds all tokens that are missing, so that only pages and places are
    scarce.
    """
    options = {"max_num_batched_tokens": 8192, "token_buckets": (8192,), "max_num_rows": 1024} | options
    harness = SchedulerHarness(
        pool.num_pages,
        reserve_pages=pool.reserve_pages,
        max_num_running=pool.max_num_running,
        **options,
    )
    events: dict[int, list[tuple[int | str, ...]]] = {}
    requests: dict[Request, int] = {}
    due_step, step = 0, 0
    todo = list(enumerate(arrivals))
    while todo or requests:
        while todo and due_step + todo[0][1].gap <= step:
            index, arrival = todo.pop(0)
            due_step = step
            name = f"c{arrival.conversation}"
            conversation = harness.sequences[name][0] if name in harness.sequences else None
            history = len(conversation.token_ids) if conversation else 0
            is_busy = any(name_of(request) == name for request in requests)
            if is_busy or history + arrival.prompt_len + arrival.max_tokens > pool.num_pages * CHUNK:
                continue
            request = harness.add(name, arrival.prompt_len, arrival.max_tokens)
            harness.sequences[name] = request.conversation, request.sequence
            requests[request] = index
            events[index] = []
        last = [request for request in requests if request.status is RequestStatus.FINISHING]
        output = harness.step()
        for kind, found in (("admitted", output.admitted), ("suspended", output.suspended)):
            for request in found:
                events[requests[request]].append((step, kind))
        for request, start, end, *_ in output.grants:
            events[requests[request]].append((step, start, end))
        for request in last:  # its last token is known now
            request.conversation.commit()
            harness.cache.manager.truncate(request.sequence, request.conversation.num_computed_tokens)
            harness.scheduler.remove(request)
            del requests[request]
        step += 1
        assert step < 5000, "a request starves"
    return events


pools = st.builds(Pool, st.integers(4, 16), st.integers(0, 2), st.integers(1, 5))
turns = st.lists(
    st.builds(
        Arrival,
        st.sampled_from((0, 0, 0, 1, 2, 9)),
        st.integers(0, 5),
        st.sampled_from((1, 5, 20, 40, 70, 120)),
        st.sampled_from((1, 3, 10, 40)),
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=150, print_blob=True)
@given(pools, turns)
def test_no_later_arrival_changes_what_happens_to_a_request(pool: Pool, arrivals: list[Arrival]):
    """Every request is admitted, computed and suspended in the same steps as without all later ones."""
    everything = run_turns(pool, arrivals)
    for number in range(1, len(arrivals)):
        fewer = run_turns(pool, arrivals[:number])
        assert fewer == {index: everything[index] for index in fewer}


@pytest.mark.parametrize("order", PROMPT_ORDERS)
@settings(max_examples=100, print_blob=True, deadline=None)
@given(pools, turns, st.sampled_from((0, 3, 40)), st.booleans())
def test_no_request_starves_where_tokens_are_scarce(order, pool, arrivals, extra_tokens, unified):
    """Every turn ends, and the scheduler asserts in every step who advances; pages are scarce, too."""
    num_tokens = pool.max_num_running + CHUNK + extra_tokens
    run_turns(
        pool,
        arrivals,
        max_num_batched_tokens=num_tokens,
        token_buckets=(num_tokens,),
        max_num_rows=None,
        unified=unified,
        prompt_order=order,
    )


def steps_until_admitted(num_short: int) -> int | None:
    """Return when a long request joins beside a stream of short ones; None for not within 300 steps."""
    harness = SchedulerHarness(10, max_num_running=16, max_num_batched_tokens=1000)
    harness.add("first", 7 * CHUNK - 8, max_tokens=8)
    harness.step()
    harness.add("long", 8 * CHUNK - 8)
    for number in range(300):
        if number < num_short:
            harness.add(f"short {number}", 6, max_tokens=8)
        if "long" in names(harness.step().admitted):
            return number
    return None


def test_a_stream_of_short_requests_does_not_delay_a_long_one():
    assert steps_until_admitted(0) == steps_until_admitted(300) is not None


def test_passing_without_the_bound_starves_a_long_request(monkeypatch):
    """This shows that the test before can fail."""
    later_arrivals_keep_their_pages(monkeypatch)
    monkeypatch.setattr("tests.scheduler.helpers.check_priority", lambda *_: None)
    monkeypatch.setattr(Scheduler, "_check_liveness", lambda *_: None)
    assert steps_until_admitted(0) is not None
    assert steps_until_admitted(300) is None
