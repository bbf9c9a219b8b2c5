"""The order of prompts by work left: who goes first, who may join, and that no prompt starves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from pensieve_jax.config import PROMPT_ORDERS
from pensieve_jax.scheduler import Request, RequestStatus, Scheduler, prompt_order
from pensieve_jax.scheduler.prompt_order import AGE_SHARE, MAX_NUM_PROMPTS
from pensieve_jax.scheduler.prompt_work import PromptWork
from tests.scheduler.helpers import CHUNK, COSTS, SchedulerHarness
from tests.scheduler.test_passing import Arrival, Pool, pools, run_turns, turns
from tests.scheduler.test_two_tiers import returning
from tests.seeds import new_seed

WORK = PromptWork(COSTS, CHUNK)
WIDE = {"max_num_running": 64, "max_num_batched_tokens": 128, "token_buckets": (128,)}


def harness_of(**options) -> SchedulerHarness:
    """Return a harness in the order by work left, with room for 600 tokens per request."""
    return SchedulerHarness(**{"num_pages": 800, "prompt_order": "work_left"} | WIDE | options)


def served(harness: SchedulerHarness) -> list[tuple[str, int, int]]:
    """Return who got which tokens in the last step."""
    return [(name, start, end) for name, start, end, _ in harness.steps[-1]]


def test_work_is_that_of_the_cost_model():
    """The fit gives the cost of each chunk, for tokens at any place."""
    assert WORK.token_s == pytest.approx(1.0, rel=0.1) and WORK.pair_s == pytest.approx(0.01)
    for start in (0, 160, 4000):
        assert WORK.of_interval(start, start + CHUNK) == pytest.approx(COSTS.chunk_cost_s(start + CHUNK))
    whole = WORK.of_interval(0, 640)
    assert whole == pytest.approx(sum(WORK.of_interval(i, i + CHUNK) for i in range(0, 640, CHUNK)))
    new, length = 100, 640
    expected = WORK.token_s * new + WORK.pair_s * new * (length - new / 2)
    assert WORK.of_interval(length - new, length) == pytest.approx(expected)


def test_the_shortest_prompt_goes_first_and_decodes_before_it():
    harness = harness_of()
    harness.add("decodes", 5, max_tokens=50)
    harness.step()
    harness.add("long", 400)
    harness.step()
    harness.add("middle", 150)
    harness.add("short", 40)
    harness.step()
    assert served(harness) == [("decodes", 6, 7), ("middle", 0, 87), ("short", 0, 40)]
    harness.step()
    assert served(harness)[:2] == [("decodes", 7, 8), ("long", 127, 190)], (
        "after what is left of the middle one"
    )


def test_rows_stand_by_arrival():
    harness = harness_of()
    harness.add("long", 100)
    harness.add("short", 20)
    harness.step()
    assert served(harness) == [("long", 0, 100), ("short", 0, 20)]


@pytest.mark.parametrize("is_later", [False, True])
def test_waiting_outweighs_a_quarter_of_the_work(is_later):
    """The difference in work over `AGE_SHARE` decides: just before, the short one goes first."""
    harness = harness_of()
    long = harness.add("long", 300)
    work_s = WORK.of_interval(0, 300) - WORK.of_interval(0, 200)
    harness.cache.clock.advance(work_s / AGE_SHARE + (1 if is_later else -1))
    short = harness.add("short", 200)
    output = harness.step()
    assert [grant.request for grant in output.grants] == [long if is_later else short]


def test_chunks_on_their_way_count_as_computed():
    """The returning one has 800 tokens of history in host memory, and less to compute than the new one."""
    harness = harness_of(cpu_pages=100)
    returning(harness, "back", 801)
    new, back = harness.add("new", 60), harness.add("back", 5)
    assert harness.step().admitted == (new, back)
    assert WORK.left(back) < WORK.left(new) + WORK.of_interval(0, 60)
    assert back.sequence.first_arriving == 0 and WORK.left(back) == pytest.approx(WORK.of_interval(800, 806))


def test_holes_count_where_they_are():
    harness = harness_of()
    harness.conversation("back", 401, 0, 1, 9)
    back = harness.add("back", 4)
    harness.add("first", 120, max_tokens=1)
    harness.step()
    expected = [(0, 32), (144, 160), (400, 405)]
    assert served(harness)[0][0] == "back" and back.is_decoding
    assert [grant[1:] for grant in served(harness) if grant[0] == "back"] == expected


def test_admission_goes_by_arrival_up_to_a_number_of_prompts():
    harness = harness_of()
    requests = [harness.add(f"{index}", 400 - 10 * index) for index in range(MAX_NUM_PROMPTS + 2)]
    assert list(harness.step().admitted) == requests[:MAX_NUM_PROMPTS]
    first_done = requests[MAX_NUM_PROMPTS - 1]
    while not first_done.is_decoding:
        assert harness.step().admitted == ()
    assert harness.step().admitted == (requests[MAX_NUM_PROMPTS],)


def test_by_arrival_a_full_step_lets_no_other_join():
    harness = harness_of(prompt_order="arrival")
    first, second = harness.add("first", 400), harness.add("second", 10)
    assert harness.step().admitted == (first,)
    assert second.status is RequestStatus.WAITING


def test_a_short_request_passes_one_without_room_and_is_computed_first():
    """Admission passes the long one that lacks pages, and the order passes the long one that runs."""
    harness = harness_of(num_pages=40)
    running = harness.add("running", 34 * CHUNK)
    harness.step()
    waiting, short = harness.add("waiting", 20 * CHUNK), harness.add("short", 20)
    assert harness.step().admitted == (short,)
    assert served(harness) == [("running", 128, 236), ("short", 0, 20)]
    assert waiting.status is RequestStatus.WAITING and not running.is_decoding


def test_the_latest_arrival_is_suspended_even_if_it_has_less_left():
    harness = harness_of(num_pages=32, max_num_batched_tokens=80, token_buckets=(80,))
    decodes = harness.add("decodes", 4 * CHUNK, max_tokens=60)
    harness.step()
    long = harness.add("long", 26 * CHUNK)
    short = harness.add("short", CHUNK)
    suspended: list[Request] = []
    while not suspended:
        suspended += harness.step().suspended
    assert suspended[0] is short and decodes.status is long.status is RequestStatus.RUNNING


def test_copies_of_the_first_prompt_are_expedited():
    """All wait for copies; the second one has less left."""
    harness = harness_of(cpu_pages=100)
    returning(harness, "a", 49)
    returning(harness, "b", 49)
    harness.add("a", 50)
    second = harness.add("b", 5)
    output = harness.step()
    assert output.expedited == tuple(copy.copy_id for copy in output.swap_ins[3:])
    assert [grant.request for grant in output.grants] == [second]


def test_a_skipped_first_prompt_is_detected(monkeypatch):
    grant_missing = Scheduler._grant_missing

    def skip(self, step, request):
        if request is not step.first:
            grant_missing(self, step, request)

    monkeypatch.setattr(Scheduler, "_grant_missing", skip)
    harness = harness_of()
    harness.add("a", 300)
    harness.add("b", 20)
    with pytest.raises(AssertionError, match="first prompt is stuck"):
        harness.step()


def test_passing_the_oldest_against_the_order_is_detected(monkeypatch):
    """The longest goes first, which no order allows that the oldest one precedes."""
    harness = harness_of()
    harness.add("oldest", 150)
    harness.add("long", 400)
    arrange = prompt_order.ByWorkLeft.arrange
    calls: list[int] = []

    def wrong_once(self, prompts):
        calls.append(len(prompts))
        return arrange(self, prompts)[:: -1 if len(calls) == 1 else 1]

    monkeypatch.setattr(prompt_order.ByWorkLeft, "arrange", wrong_once)
    with pytest.raises(AssertionError, match="oldest request is stuck"):
        harness.step()


# No prompt starves.


@dataclass(frozen=True)
class Prompt:
    """A new conversation that arrives at a time."""

    arrival_s: float
    num_tokens: int


def first_tokens(
    prompts: Sequence[Prompt], *, step_s: float, num_steps: int, order: str = "work_left"
) -> dict[int, float]:
    """Serve prompts with room for all; return the times of first tokens, by index.

    A step takes `step_s` and the work of its prompts. Every grant that passes a prompt must keep the rule.
    """
    harness = harness_of(num_pages=40_000, prompt_order=order, max_num_running=4000,
                         max_num_batched_tokens=4128, token_buckets=(4128,))  # fmt: skip
    harness.scheduler._order._buckets = (128,)  # a step has room for few tokens beside many requests
    clock, start_s = harness.cache.clock, harness.cache.clock.now()
    requests: dict[Request, int] = {}
    found: dict[int, float] = {}
    todo = list(enumerate(prompts))
    for _ in range(num_steps):
        if todo and not requests:
            clock.advance_to(start_s + todo[0][1].arrival_s)
        while todo and start_s + todo[0][1].arrival_s <= clock.now():
            index, prompt = todo.pop(0)
            requests[harness.add(f"{index}", prompt.num_tokens, max_tokens=1)] = index
        if not requests and not todo:
            break
        before_s = {request: WORK.left(request) for request in harness.scheduler.running}
        output = harness.step()
        before_s |= {request: WORK.of_interval(0, len(request.token_ids)) for request in output.admitted}
        granted = {grant.request for grant in output.grants}
        if order == "work_left":
            check_no_passing(before_s, granted)
        clock.advance(step_s + sum(WORK.of_interval(grant.start, grant.end) for grant in output.grants))
        for request in granted:
            if request.is_decoding:
                found[requests.pop(request)] = clock.now() - start_s
    return found


def check_no_passing(work_s: dict[Request, float], granted: set[Request]) -> None:
    """Assert that no prompt was served that arrived long after another one that got no token."""
    for passed in work_s:
        for other in granted:
            if passed not in granted and passed.status is RequestStatus.RUNNING:
                latest_s = passed.arrival_s + work_s[passed] / AGE_SHARE
                assert other.arrival_s <= latest_s, "a prompt was passed by one that came too late"


def stream(long_tokens: int, *, gap_s: float, num_short: int) -> list[Prompt]:
    """Return a long prompt at 0 s, and short ones that keep arriving."""
    return [Prompt(0.0, long_tokens), *(Prompt((i + 1) * gap_s, 30) for i in range(num_short))]


def bound_s(prompts: Sequence[Prompt], index: int, step_s: float, num_steps: int) -> float:
    """Return the latest time of a first token: the work of all that may go before, and of the steps."""
    own = prompts[index]
    own_s = WORK.of_interval(0, own.num_tokens)
    latest_s = own.arrival_s + own_s / AGE_SHARE
    before = [p for p in prompts if p.arrival_s <= latest_s]
    return own.arrival_s + sum(WORK.of_interval(0, p.num_tokens) for p in before) + num_steps * step_s


def test_a_long_prompt_waits_a_bounded_time_under_a_stream_of_short_ones():
    """Short prompts of 34 s of work arrive every 15 s, more than the machine can compute."""
    ends = first_tokens(stream(300, gap_s=15.0, num_short=1500), step_s=0.0, num_steps=140)
    own_s, short_s = WORK.of_interval(0, 300), WORK.of_interval(0, 30)
    assert own_s < ends[0] <= own_s + (own_s / AGE_SHARE / 15.0 + MAX_NUM_PROMPTS) * short_s
    assert list(ends).index(0) > 100, "short ones go first while they may"
    assert len(ends) > 500, "the stream goes on"


def test_without_ageing_the_long_prompt_starves(monkeypatch):
    """This shows that the test before can fail."""
    monkeypatch.setattr(prompt_order, "AGE_SHARE", 0.0)
    monkeypatch.setattr("tests.scheduler.test_prompt_order.check_no_passing", lambda *_: None)
    ends = first_tokens(stream(300, gap_s=15.0, num_short=1500), step_s=0.0, num_steps=140)
    assert len(ends) > 500 and 0 not in ends


def test_the_check_of_passing_can_fail(monkeypatch):
    monkeypatch.setattr(prompt_order, "AGE_SHARE", 0.0)
    with pytest.raises(AssertionError, match="came too late"):
        first_tokens(stream(200, gap_s=15.0, num_short=300), step_s=0.0, num_steps=300)


def test_random_prompts_keep_the_bound():
    """Every first token comes within the work of those that may go before it."""
    seed = new_seed()
    for number in range(6):
        choose = random.Random(seed + number)
        arrival_s, prompts = 0.0, []
        for _ in range(40):
            arrival_s += choose.expovariate(1 / choose.choice((1.0, 60.0, 400.0)))
            prompts.append(Prompt(arrival_s, choose.choice((5, 30, 120, 700))))
        step_s = choose.choice((0.0, 3.0))
        ends = first_tokens(prompts, step_s=step_s, num_steps=2000)
        assert len(ends) == len(prompts), "a prompt starves"
        for index, end_s in ends.items():
            # A step that ends a prompt gives what it has left to a later one.
            spare_s = len(prompts) * WORK.of_interval(0, 128) + 700 * WORK.pair_s * 128
            assert end_s <= bound_s(prompts, index, step_s, 2000) + spare_s


@settings(max_examples=40, print_blob=True, deadline=None)
@given(pools, turns)
def test_the_order_of_prompts_changes_no_admission(pool: Pool, arrivals: list[Arrival]):
    """Where a step holds all missing tokens, both orders do the same in the same steps."""
    by_order = [run_turns(pool, arrivals, prompt_order=order) for order in PROMPT_ORDERS]
    assert by_order[0] == by_order[1]
