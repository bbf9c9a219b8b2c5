"""Admission of turns: which requests run, wait or are refused, and in which order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.server.http.admission import TokenRate, TurnAdmission
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import FakeEngine


def limits_of(max_num_running=2, **settings):
    engine, clock = FakeEngine(max_num_running=max_num_running), VirtualClock()
    return TurnAdmission(engine, ServerSettings(**settings), clock.now), engine, clock


async def fill(limits, owner="a"):
    """Return permits until the next one would have to wait."""
    permits = []
    while limits._has_room(owner, 1):
        permits.append(await limits.enter(owner))
    return permits


def test_a_key_has_a_limited_number_of_turns_at_a_time():
    async def scenario():
        limits, _, _ = limits_of(max_in_flight_per_key=3, api_keys_file="keys")
        first = await limits.enter("a", 2)
        with pytest.raises(ApiError) as caught:
            await limits.enter("a", 2)
        assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
        assert caught.value.headers == {"retry-after": "1"}
        await limits.enter("a")
        await limits.enter("b", 3)
        first.leave()
        first.leave()
        assert limits.in_flight("a") == 1
        await limits.enter("a", 2)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("num_turns", "most", "settings"),
    [(11, 10, {}), (5, 4, {"max_in_flight_per_key": 4, "api_keys_file": "keys"})],
)
@pytest.mark.parametrize("is_full", [False, True])
def test_a_request_with_more_turns_than_ever_fit_is_refused_permanently(num_turns, most, settings, is_full):
    """With a Retry-After the client would retry forever."""

    async def scenario():
        limits, _, _ = limits_of(**settings)
        permits = await fill(limits, "b") if is_full and not settings else []
        with pytest.raises(ApiError, match=f"{num_turns} turns.* at most {most}") as caught:
            await limits.enter("a", num_turns)
        assert (caught.value.status, caught.value.code) == (400, "invalid_value")
        assert limits.num_waiting == limits.in_flight("a") == 0 and limits.num_in_engine == len(permits)

    asyncio.run(scenario())


def test_without_keys_there_are_no_shares():
    async def scenario():
        limits, _, _ = limits_of(max_num_running=200, max_in_flight_per_key=3)
        await limits.enter("", 200)
        assert limits.in_flight("") == 200

    asyncio.run(scenario())


def test_waiting_requests_are_admitted_in_order_of_arrival():
    async def scenario():
        limits, _, _ = limits_of()
        permits = await fill(limits)
        assert len(permits) == 10  # two that run, eight in the engine's queue
        order: list[int] = []

        async def wait(number: int, num_turns: int):
            permit = await limits.enter("b", num_turns)
            order.append(number)
            return permit

        tasks = [asyncio.ensure_future(wait(i, n)) for i, n in enumerate((2, 1, 1))]
        await asyncio.sleep(0)
        assert limits.num_waiting == 4
        permits.pop().leave()
        await asyncio.sleep(0)
        assert order == []  # the first needs two, and none overtakes it
        permits.pop().leave()
        await tasks[0]
        permits.pop().leave()
        permits.pop().leave()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2] and limits.num_waiting == 0

    asyncio.run(scenario())


def test_a_small_request_is_admitted_when_the_large_one_before_it_gives_up():
    """There was room for it all the time; it need not wait for a permit to be returned."""

    async def scenario():
        limits, _, _ = limits_of(queue_timeout_s=100.0)
        permits = await fill(limits)
        permits.pop().leave()
        large = asyncio.ensure_future(limits.enter("b", 2))
        await asyncio.sleep(0)
        small = asyncio.ensure_future(limits.enter("c"))
        await asyncio.sleep(0)
        assert limits.num_waiting == 3
        large.cancel()
        await asyncio.gather(large, return_exceptions=True)
        assert (limits.num_waiting, limits.num_in_engine, limits.in_flight("b")) == (0, 10, 0)
        assert (await small).num_turns == 1

    asyncio.run(scenario())


def test_requests_are_told_to_retry_later_on_a_full_queue_a_long_wait_or_an_engine_that_refuses_turns():
    async def scenario():
        limits, engine, _ = limits_of(queue_timeout_s=0.01)
        permits = await fill(limits)
        waiting = [asyncio.ensure_future(limits.enter("b")) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="full") as caught:
            await limits.enter("b")
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, ApiError) and "0.01 s" in error.message
        assert limits.num_waiting == 0 and limits.in_flight("b") == 0
        for state in ("starting", "draining", "dead"):
            engine.state = state
            with pytest.raises(ApiError) as caught:
                await limits.enter("c")
            assert caught.value.code == "overloaded" and "retry-after" in caught.value.headers
        assert len(permits) == limits.num_in_engine

    asyncio.run(scenario())


def test_an_empty_queue_accepts_any_request_that_can_ever_fit():
    """Otherwise the queue would be full forever for a request larger than the queue."""

    async def scenario():
        limits, _, _ = limits_of(max_num_running=1)
        permits = [await limits.enter(owner) for owner in "ab"]
        waiting = asyncio.ensure_future(limits.enter("c", 9))
        await asyncio.sleep(0)
        assert limits.num_waiting == 9
        with pytest.raises(ApiError, match="full"):
            await limits.enter("c")
        for permit in permits:
            permit.leave()
        assert (await waiting).num_turns == limits.num_in_engine == 9

    asyncio.run(scenario())


def test_a_turn_that_waits_gets_no_permit_once_the_engine_has_ended():
    async def scenario():
        limits, engine, _ = limits_of()
        permits = await fill(limits)
        waiting = asyncio.ensure_future(limits.enter("b"))
        await asyncio.sleep(0)
        engine.state = "draining"
        permits.pop().leave()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        assert limits.num_in_engine == len(permits)

    asyncio.run(scenario())


def test_retry_after_is_the_waiting_work_divided_by_the_recent_rate():
    async def scenario():
        limits, _, clock = limits_of()
        assert limits.retry_after_s() == 1
        permit = await limits.enter("a", num_tokens=1000)
        assert limits.retry_after_s() == 1  # the rate is unknown
        clock.advance(10.0)
        limits.rate.add(1000)
        assert limits.rate.per_second() == 100
        assert limits.retry_after_s() == 10
        clock.advance(20.0)
        assert limits.retry_after_s() == 30
        permit.leave(num_done_tokens=3000)
        assert limits.retry_after_s() == 1  # no request waits
        clock.advance(31.0)
        assert limits.rate.per_second() == 0

    asyncio.run(scenario())


def test_retry_after_includes_replies_by_their_recent_length():
    """Once, short prompts with long replies got a Retry-After of one second, whatever the queue."""

    async def scenario():
        limits, _, clock = limits_of()
        first = await limits.enter("a", 2, 20)
        clock.advance(10.0)
        first.leave(220, [50, 150])
        assert limits.rate.per_second() == 22
        permits = [await limits.enter("a", num_tokens=10), await limits.enter("a", 2, 20)]
        assert limits.retry_after_s() == 15  # 30 tokens of prompts, three replies of 100, 22 a second
        permits.append(await limits.enter("a", num_tokens=10, max_tokens=12))
        assert limits.retry_after_s() == 16  # a reply limited to fewer tokens counts only these
        for permit in permits[:2]:
            permit.leave()
        assert limits.retry_after_s() == 1
        for _ in range(100):  # old replies do not count
            (await limits.enter("a")).leave(0, [400])
        await limits.enter("a")
        assert limits.retry_after_s() == 20

    asyncio.run(scenario())


def test_without_recent_ends_retry_after_is_the_waiting_time_of_the_first_request():
    async def scenario():
        limits, _, clock = limits_of()
        permit = await limits.enter("a", num_tokens=1000)
        assert limits.retry_after_s() == 1
        clock.advance(7.5)
        await limits.enter("a")
        assert limits.retry_after_s() == 8
        clock.advance(60.0)
        assert limits.retry_after_s() == 30
        permit.leave()
        assert limits.retry_after_s() == 30  # the second has waited for a minute

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_num_running", [2, 16])
def test_permits_are_never_lost_or_given_twice(seed, max_num_running):
    """Requests for more than the whole room are refused at once and block no other."""

    async def scenario():
        chooser = random.Random(seed)
        room = max_num_running + 8
        limits, _, clock = limits_of(max_num_running, max_in_flight_per_key=room + 2, api_keys_file="keys")
        tasks: list[asyncio.Task] = []
        held = []
        too_many = num_told = 0
        for _ in range(300):
            action = chooser.random()
            if action < 0.5:
                owner, num_turns = chooser.choice("abc"), chooser.randint(1, room + 6)
                tasks.append(asyncio.ensure_future(limits.enter(owner, num_turns, 10)))
                too_many += num_turns > room
            elif action < 0.75 and held:
                held.pop(chooser.randrange(len(held))).leave(5)
            elif tasks:
                chooser.choice(tasks).cancel()
            if chooser.random() < 0.5:
                await asyncio.sleep(0)
            if chooser.random() < 0.02:
                clock.advance(100.0)  # other keys are active no longer
            assert limits.num_in_engine <= room
            waiting = Counter(permit.owner for permit in limits._waiting.values())
            assert all(
                limits._num_waiting_of[owner] <= 2 * max_num_running or waiting[owner] == 1
                for owner in waiting
            )
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                error = None if task.cancelled() else task.exception()
                num_told += isinstance(error, ApiError) and error.status == 400
                if not task.cancelled() and error is None:
                    held.append(task.result())
            assert not any(permit.num_turns > room for permit in limits._waiting.values())
        assert too_many and num_told
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(found, BaseException):
                held.append(found)
        assert limits.num_in_engine == sum(permit.num_turns for permit in held)
        for permit in held:
            permit.leave()
        assert limits.num_in_engine == limits.num_waiting == len(limits._permits) == 0
        assert limits._in_flight == limits._num_in_engine_of == {}

    asyncio.run(scenario())


@pytest.mark.parametrize(("max_num_running", "most"), [(1, 9), (32, 40), (35, 43), (36, 45), (100, 125)])
def test_the_engine_admits_a_quarter_more_turns_than_it_runs_but_at_least_eight_more(max_num_running, most):
    async def scenario():
        limits, _, _ = limits_of(max_num_running=max_num_running)
        permit = await limits.enter("a", most)
        assert limits.num_in_engine == most and not limits._has_room("b", 1)
        permit.leave()
        with pytest.raises(ApiError, match=f"at most {most}"):
            await limits.enter("a", most + 1)

    asyncio.run(scenario())


def test_a_rate_covers_at_most_the_last_half_minute():
    clock = VirtualClock(1000.0)
    rate = TokenRate(clock.now)
    assert rate.per_second() == 0.0
    rate.add(60)
    assert rate.per_second() == 0.0, "no time has passed"
    clock.advance(10.0)
    assert rate.per_second() == 6.0
    rate.add(30)
    clock.advance(20.0)
    assert rate.per_second() == 3.0, "what is as old as the window counts"
    clock.advance(1.0)
    assert rate.per_second() == 1.0
    clock.advance(9.5)
    assert rate.per_second() == 0.0


@pytest.mark.parametrize(("num_waiting", "is_full"), [(3, False), (4, True)])
def test_the_queue_of_a_key_holds_two_requests_per_running_turn(num_waiting, is_full):
    async def scenario():
        limits, _, _ = limits_of()
        await fill(limits)
        waiting = [asyncio.ensure_future(limits.enter("b")) for _ in range(num_waiting)]
        await asyncio.sleep(0)
        if is_full:
            with pytest.raises(ApiError, match="full"):
                limits.enter_now("b")
        else:
            assert limits.enter_now("b") is None
            with pytest.raises(ApiError, match="full"):
                limits.enter_now("b", 2)
        assert limits.enter_now("c", 4) is None, "another key has a queue of its own"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())


def test_a_cancelled_request_ahead_in_the_queue_blocks_no_other():
    """A returned permit goes past it at once, before its task has run."""

    async def scenario():
        limits, _, _ = limits_of()
        permits = await fill(limits)
        gone, late = (asyncio.ensure_future(limits.enter(owner)) for owner in "bc")
        await asyncio.sleep(0)
        gone.cancel()
        permits.pop().leave()
        assert (limits.num_waiting, limits.num_in_engine) == (0, 10)
        assert (limits.in_flight("b"), limits.in_flight("c")) == (0, 1)
        assert (await late).num_turns == 1
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (limits.num_waiting, limits.num_in_engine) == (0, 10)

    asyncio.run(scenario())


@pytest.mark.parametrize("call", ["enter", "enter_now"])
def test_the_default_is_one_turn_without_tokens_or_a_limit(call):
    async def scenario():
        limits, _, _ = limits_of()
        permit = limits.enter_now("a") if call == "enter_now" else await limits.enter("a")
        assert permit is not None and limits.num_in_engine == limits.in_flight("a") == 1
        assert (permit.num_turns, permit.num_tokens, permit.max_tokens) == (1, 0, None)

    asyncio.run(scenario())


def test_leaving_without_arguments_counts_no_tokens():
    async def scenario():
        limits, _, clock = limits_of()
        clock.advance(1.0)
        (await limits.enter("a")).leave()
        assert limits.rate.per_second() == 0.0

    asyncio.run(scenario())


def test_two_keys_that_always_wait_are_served_the_same_tokens():
    """One of them has ten times as many requests, and its replies are longer than expected."""

    async def scenario():
        settings = {"max_in_flight_per_key": 200, "queue_per_running": 50, "api_keys_file": "keys"}
        limits, _, _ = limits_of(max_num_running=16, **settings)
        served: Counter[str] = Counter()
        lengths = {"many": 90, "few": 30}

        async def ask(owner: str) -> None:
            while served.total() < 60_000:
                permit = await limits.enter(owner, 1, 10)
                await asyncio.sleep(0)
                if served.total() < 60_000:  # afterwards only those that still wait are served
                    served[owner] += 10 + lengths[owner]
                permit.leave(10 + lengths[owner], [lengths[owner]])

        await asyncio.gather(*(ask("many") for _ in range(150)), *(ask("few") for _ in range(32)))
        assert min(served.values()) >= 0.45 * served.total(), served

    asyncio.run(scenario())


@pytest.mark.parametrize(("max_num_running", "num_left"), [(16, 1), (31, 1), (64, 4)])
def test_slots_are_left_for_a_key_without_turns_while_several_keys_are_active(max_num_running, num_left):
    async def scenario():
        settings = {"max_in_flight_per_key": 200, "queue_per_running": 50, "api_keys_file": "keys"}
        limits, _, clock = limits_of(max_num_running=max_num_running, **settings)
        alone = await fill(limits, "many")
        assert limits.num_in_engine == max_num_running + max(8, max_num_running // 4)
        for permit in alone:
            permit.leave()
        (await limits.enter("few")).leave()
        many = [asyncio.ensure_future(limits.enter("many")) for _ in range(100)]
        await asyncio.sleep(0)
        assert limits.num_in_engine == max_num_running - num_left
        first = await limits.enter("few")  # at once, although others wait
        assert limits.num_in_engine == max_num_running - num_left + 1
        more = [asyncio.ensure_future(limits.enter("few")) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in more)  # what is left is for keys without turns
        for task in (*many[::-1], *more):  # first those that wait, so that none follows the others
            if not task.cancel():
                task.result().leave()
        await asyncio.gather(*many, *more, return_exceptions=True)
        first.leave()
        clock.advance(60.0)  # alone again
        assert len(await fill(limits, "many")) == max_num_running + max(8, max_num_running // 4)

    asyncio.run(scenario())


def test_several_turns_at_once_wait_for_their_owners_turns_only():
    """Another key's turns pass them, one after the other, and still they enter."""

    async def scenario():
        limits, _, _ = limits_of(max_num_running=16, max_in_flight_per_key=200, api_keys_file="keys")
        single = await limits.enter("few")
        permits = [await limits.enter("many") for _ in range(10)]
        large = asyncio.ensure_future(limits.enter("many", 15))
        for permit in permits:
            single.leave(10)
            single = await limits.enter("few")
            assert not large.done()
            permit.leave(10)
        (await large).leave()
        single.leave()

    asyncio.run(scenario())


def test_a_key_whose_turns_are_cancelled_is_charged_for_them():
    async def scenario():
        limits, _, _ = limits_of(max_num_running=7, max_in_flight_per_key=200, api_keys_file="keys")
        permits = await fill(limits, "b")
        waiting = [asyncio.ensure_future(limits.enter("a", 1, 100)) for _ in range(3)]
        waiting += [asyncio.ensure_future(limits.enter("b", 1, 100)) for _ in range(3)]
        await asyncio.sleep(0)
        permits.pop().leave()
        first = await waiting[0]
        first.leave(250)  # it had sent more than was expected when it was cancelled
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [True, False, False, True, False, False]
        permits.pop().leave()
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [True, False, False, True, True, False]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(scenario())
