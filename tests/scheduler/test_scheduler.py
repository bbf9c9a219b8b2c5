"""The tokens that each request gets in a step: order, budget, cuts, rows, suspension."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from pensieve_jax.scheduler import RequestStatus, Scheduler
from tests.scheduler.helpers import CHUNK, SchedulerHarness


def test_first_come_first_served_within_the_budget():
    harness = SchedulerHarness(max_num_batched_tokens=64)
    for name in "abc":
        harness.add(name, 30, max_tokens=1)
    assert [len(harness.step().admitted) for _ in range(3)] == [3, 0, 0]
    assert harness.steps == [
        [("a", 0, 30, True), ("b", 0, 30, True), ("c", 0, 4, False)],
        [("c", 4, 30, True)],
        [],
    ]


def test_one_decode_token_for_each_running_request_is_reserved():
    """A long prompt that arrived first leaves room for the decodes after it."""
    harness = SchedulerHarness(max_num_batched_tokens=40)
    harness.add("long", 100)
    harness.step()
    harness.cache.check()
    short = harness.add("short", 5)
    harness.step()
    harness.step()
    assert harness.steps[1:] == [[("long", 40, 80, False)], [("long", 80, 100, True), ("short", 0, 5, True)]]
    harness.conversation("back", 200, *range(10))
    late = harness.add("back", 3)
    harness.step()
    assert harness.steps[-1][:2] == [("long", 100, 101, True), ("short", 5, 6, True)]
    assert harness.steps[-1][2] == ("back", 0, 32, False), "38 tokens are left: two chunks"
    assert late.status is short.status is RequestStatus.RUNNING


def test_decodes_behind_many_holes_keep_their_rows():
    harness = SchedulerHarness(max_num_running=3, max_num_batched_tokens=100, max_num_rows=3)
    harness.add("a", 1, max_tokens=9)
    harness.step()
    harness.conversation("old", 161, 0, 2, 4, 6)
    harness.add("old", 4, max_tokens=9)
    harness.add("b", 1, max_tokens=9)
    for _ in range(4):
        harness.step()
    assert [len(step) for step in harness.steps[1:]] == [3, 3, 3, 3]
    assert all(step[0][0] == "a" for step in harness.steps)
    assert harness.steps[3] == [("a", 3, 4, True), ("old", 160, 165, True), ("b", 0, 1, True)]


def test_several_holes_in_ascending_order():
    """A later interval shares a step with an earlier one only if the earlier one ends in it."""
    harness = SchedulerHarness(max_num_batched_tokens=70)
    harness.conversation("a", 161, 0, 3, 4, 8)
    harness.add("a", 10, max_tokens=1)
    for _ in range(2):
        harness.step()
    assert harness.steps == [
        [("a", 0, 16, False), ("a", 48, 80, False), ("a", 128, 144, False), ("a", 160, 166, False)],
        [("a", 166, 171, True)],
    ]


def test_recompute_is_cut_on_chunk_boundaries_only():
    harness = SchedulerHarness(max_num_batched_tokens=47)
    harness.conversation("a", 161, *range(9))
    harness.add("a", 10, max_tokens=1)
    while not harness.steps or not harness.steps[-1] or not harness.steps[-1][-1][-1]:
        harness.step()
    grants = [grant for step in harness.steps for grant in step]
    history = [grant for grant in grants if grant[2] <= 144]
    assert all(end % CHUNK == 0 and start % CHUNK == 0 for _, start, end, _ in history)
    assert sum(end - start for _, start, end, _ in history) == 144
    assert [grant[3] for grant in grants] == [False] * (len(grants) - 1) + [True]


def test_large_steps_fill_a_bucket_and_leave_the_rest():
    """The rest goes with the next step; below 256 tokens a step takes everything."""
    harness = SchedulerHarness(80, max_num_batched_tokens=1024, token_buckets=(64, 256, 512, 1024))
    harness.add("a", 300, max_tokens=9)
    harness.add("b", 290, max_tokens=9)
    for _ in range(3):
        harness.step()
    assert harness.steps == [
        [("a", 0, 300, True), ("b", 0, 212, False)],
        [("a", 300, 301, True), ("b", 212, 290, True)],
        [("a", 301, 302, True), ("b", 290, 291, True)],
    ]


def test_a_bucket_that_decodes_fill_is_not_chosen():
    """The oldest recomputing request would get no chunk there, so the step uses the next bucket."""
    harness = SchedulerHarness(600, max_num_running=260, max_num_batched_tokens=512, token_buckets=(256, 512))
    for index in range(250):
        harness.add(f"decode{index}", 1, max_tokens=50)
    harness.step()
    harness.conversation("back", 322, *range(20))
    harness.add("back", 3)
    harness.step()
    assert harness.steps[-1][-1] == ("back", 0, 256, False), (
        "512 tokens: 250 decodes, and 262 in whole chunks"
    )


def test_rows_are_a_separate_limit():
    """Three rows per step: three holes, and the rest in the next one."""
    harness = SchedulerHarness(max_num_running=3, max_num_rows=3, max_num_batched_tokens=200)
    harness.conversation("a", 161, 0, 2, 4, 6)
    harness.add("a", 10, max_tokens=1)
    harness.add("b", 5, max_tokens=1)
    for _ in range(2):
        harness.step()
    assert harness.steps[0] == [("a", 0, 16, False), ("a", 32, 48, False), ("a", 64, 80, False)]
    assert harness.steps[1] == [("a", 96, 112, False), ("a", 160, 171, True), ("b", 0, 5, True)]


def test_the_number_of_running_requests_is_limited():
    harness = SchedulerHarness(max_num_running=2)
    requests = [harness.add(name, 3, max_tokens=2) for name in "abc"]
    harness.step()
    assert [request.status.value for request in requests] == ["running", "running", "waiting"]
    harness.step()
    harness.step()
    assert [request.status.value for request in requests] == ["finishing", "finishing", "running"]


def test_a_turn_samples_only_when_nothing_is_missing():
    harness = SchedulerHarness(max_num_batched_tokens=20)
    request = harness.add("a", 50, max_tokens=3)
    for _ in range(6):
        harness.step()
    assert [grant for step in harness.steps for grant in step] == [
        ("a", 0, 20, False),
        ("a", 20, 40, False),
        ("a", 40, 50, True),
        ("a", 50, 51, True),
        ("a", 51, 52, True),
    ]
    assert request.num_output_tokens == 3 and request.status is RequestStatus.FINISHING
    assert harness.steps[-1] == [], "a stop by length launches no extra step"


def test_the_latest_arrival_is_suspended():
    """Three requests of one page each in a pool of three: as they grow, the latest is suspended first."""
    harness = SchedulerHarness(3)
    requests = [harness.add(name, 15, max_tokens=20) for name in "abc"]
    suspended = [request for _ in range(4) for request in harness.step().suspended]
    assert suspended == [requests[2], requests[1]], "b takes the page of c, then a that of b"
    assert requests[0].status is RequestStatus.RUNNING and list(harness.scheduler.waiting) == requests[1:]
    assert [request.usage(0).num_suspensions for request in requests] == [0, 1, 1]


def test_the_latest_request_suspends_itself():
    harness = SchedulerHarness(3)
    first = harness.add("a", 30, max_tokens=2)
    last = harness.add("b", 16, max_tokens=9)
    assert harness.step().suspended == ()
    output = harness.step()
    assert output.suspended == (last,) and output.admitted == ()
    assert [grant.request for grant in output.grants] == [first]
    assert last.token_ids[-1] != -1, "the token in flight is kept"


@pytest.mark.parametrize(
    ("unified", "oldest_decodes", "others_run", "is_stuck"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (False, False, True, True),
        (False, True, False, True),
    ],
)
def test_a_step_that_skips_the_oldest_request_is_detected(
    monkeypatch, unified, oldest_decodes, others_run, is_stuck
):
    """A decode may pause for others if batches are not unified; nothing else is allowed."""
    harness = SchedulerHarness(unified=unified)
    harness.add("a", 5, max_tokens=9)
    if oldest_decodes:
        harness.step()
    if others_run:
        harness.add("b", 5, max_tokens=9)
    grant_running = Scheduler._grant_running

    def pass_over(scheduler, draft, *, with_decodes):
        running, scheduler.running = scheduler.running, scheduler.running[1:]
        step = grant_running(scheduler, draft, with_decodes=with_decodes)
        scheduler.running = running
        return step

    monkeypatch.setattr(Scheduler, "_grant_running", pass_over)
    with pytest.raises(AssertionError, match="oldest request is stuck") if is_stuck else nullcontext():
        harness.step()


def test_a_suspended_request_resumes_in_arrival_order():
    """It resumes before all later arrivals, and only with the reserve."""
    harness = SchedulerHarness(5, reserve_pages=1)
    first = harness.add("a", 60, max_tokens=3)
    second = harness.add("b", 1, max_tokens=30)
    third = harness.add("c", 1, max_tokens=30)
    harness.step()
    assert [request.status.value for request in (first, second, third)] == ["running", "waiting", "waiting"]
    for _ in range(3):
        output = harness.step()
    assert output.admitted == (second, third) and first.status is RequestStatus.FINISHING
    second_again = [request for _ in range(40) for request in harness.step().suspended]
    assert all(request is third for request in second_again)


def test_chunks_of_waiting_requests_give_way_to_running_ones():
    """Later arrivals cannot evict a queued conversation's chunks; earlier arrivals can."""
    harness = SchedulerHarness(6)
    harness.conversation("queued", 33)
    harness.add("first", 62, max_tokens=40)
    harness.step()
    waiting = harness.add("queued", 40)
    output = harness.step()
    assert output.admitted == () and waiting.status is RequestStatus.WAITING
    dropped = [(drop.conversation_id, drop.index) for _ in range(30) for drop in harness.step().drops]
    assert dropped[:2] == [("queued", 0), ("queued", 1)]


def test_requests_can_be_removed_in_any_state():
    harness = SchedulerHarness(max_num_running=2)
    requests = [harness.add(name, 20, max_tokens=1 if name == "a" else 5) for name in "abcd"]
    harness.step()
    harness.step()
    statuses = [request.status.value for request in requests]
    assert statuses == ["finishing", "running", "running", "waiting"]
    for request in requests:
        harness.cache.manager.truncate(request.sequence, 0)
        harness.scheduler.remove(request)
        harness.cache.check()
        harness.scheduler.check_integrity()
        assert request.status is RequestStatus.FINISHED
    assert harness.cache.pool.num_free == 40 and harness.step().grants == ()


def test_usage_counts_lost_tokens():
    harness = SchedulerHarness()
    harness.conversation("a", 100, 0, 1)
    request = harness.add("a", 7)
    harness.step()
    usage = request.usage(num_output_tokens=4)
    assert (usage.reused_gpu_tokens, usage.recomputed_tokens, usage.prefilled_tokens) == (67, 32, 8)
    assert usage.prompt_tokens == 7 and usage.output_tokens == 4
    assert usage.num_suspensions == usage.resume_recomputed_tokens == usage.resume_swapped_in_tokens == 0


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_turn_at_the_context_limit_is_exhausted(max_tokens):
    harness = SchedulerHarness()
    request = harness.add("a", 9, max_tokens=max_tokens)
    request.max_total_tokens = 10
    harness.step()
    assert request.exhausted and request.num_output_tokens == 1


def decoding_harness(num_decodes: int, **config) -> SchedulerHarness:
    """Return a harness with `num_decodes` requests that decode, and room to run more."""
    harness = SchedulerHarness(100, max_num_running=8, **config)
    for index in range(num_decodes):
        harness.add(f"decode{index}", 1, max_tokens=50)
    harness.step()
    return harness


@pytest.mark.parametrize(("num_missing", "is_admitted"), [(60, True), (61, False)])
def test_admission_counts_the_tokens_of_decodes(num_missing, is_admitted):
    """Three decodes and the rest of a prompt fill the step of 64 tokens, or leave one."""
    harness = decoding_harness(3)
    harness.add("long", 61 + num_missing, max_tokens=1)
    harness.step()
    assert harness.steps[-1][-1] == ("long", 0, 61, False)
    late = harness.add("late", 1)
    assert harness.step().admitted == ((late,) if is_admitted else ())


@pytest.mark.parametrize(("num_missing", "is_admitted"), [(63, True), (64, False)])
def test_admission_counts_the_tokens_of_those_admitted_before_in_the_same_step(num_missing, is_admitted):
    harness = SchedulerHarness(100)
    long, late = harness.add("long", num_missing), harness.add("late", 1)
    assert harness.step().admitted == ((long, late) if is_admitted else (long,))


@pytest.mark.parametrize(("holes", "is_admitted"), [((0, 2, 4), True), ((0, 2, 4, 6), False)])
def test_admission_counts_the_rows_of_decodes(holes, is_admitted):
    """Three decodes, the holes, and the prompt behind them take all eight rows, or leave one."""
    harness = decoding_harness(3, max_num_rows=8, max_num_batched_tokens=200)
    harness.conversation("back", 161, *holes)
    back, late = harness.add("back", 3), harness.add("late", 1)
    assert harness.step().admitted == ((back, late) if is_admitted else (back,))


def test_the_cache_is_asked_only_for_requests_that_have_room(monkeypatch):
    """Pages of earlier requests are counted without a look at every chunk of those that wait."""
    harness = SchedulerHarness(5)
    harness.add("a", 40, max_tokens=9)
    harness.step()
    harness.add("large", 40)
    small = harness.add("small", 1)
    asked, try_admit = [], harness.cache.manager.try_admit

    def noted(sequence, *args, **options):
        asked.append(sequence)
        return try_admit(sequence, *args, **options)

    monkeypatch.setattr(harness.cache.manager, "try_admit", noted)
    assert harness.step().admitted == (small,)
    assert asked == [small.sequence]
    assert [r.conversation.conversation_id for r in harness.scheduler.waiting] == ["large"]


def test_a_request_decodes_from_its_first_sampled_token_until_it_is_suspended():
    harness = SchedulerHarness(2, max_num_batched_tokens=20)
    first = harness.add("a", 15, max_tokens=9)
    second = harness.add("b", 15, max_tokens=9)
    harness.step()
    assert (first.is_decoding, second.is_decoding) == (True, False), "the second lacks 10 tokens"
    harness.step()
    assert (first.is_decoding, second.is_decoding) == (True, True)
    while not harness.step().suspended:
        pass
    assert (first.is_decoding, second.is_decoding) == (True, False)
