"""Clocks when the system clock is set: the wall clock follows it back, and the order's clock never does."""

from __future__ import annotations

import random

import pytest

from pensieve_jax.core.clock import MAX_HOLD_S, SteadyClock, WallClock, time_since_boot, utc_text
from tests.seeds import new_seed

START_S = 1_790_000_000.0
DAYS_S = 31 * 24 * 3600.0


class System:
    """A system clock that a test sets, and the time since the start, which only a sleep of the test moves."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.elapsed_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.elapsed_s += seconds


def test_a_clock_that_was_ahead_for_seconds_does_not_date_everything_ahead(caplog):
    system = System()
    clock = WallClock(lambda: system.now_s)
    assert clock.now() == START_S
    system.now_s += DAYS_S
    assert clock.now() == START_S + DAYS_S
    system.sleep(2.0)
    clock.now()
    system.now_s -= DAYS_S
    assert clock.now() == START_S + 2.0
    (record,) = caplog.records
    assert (
        utc_text(START_S + DAYS_S + 2.0) in record.getMessage()
        and utc_text(START_S + 2.0) in record.getMessage()
    )
    system.sleep(1.0)
    assert clock.now() == START_S + 3.0 and len(caplog.records) == 1


def test_small_corrections_never_go_back(caplog):
    system = System()
    clock = WallClock(lambda: system.now_s)
    clock.now()
    system.now_s -= MAX_HOLD_S
    assert clock.now() == START_S
    system.sleep(MAX_HOLD_S - 1.0)
    assert clock.now() == START_S
    system.sleep(2.0)
    assert clock.now() == START_S + 1.0 and not caplog.records


def test_small_steps_back_do_not_add_up():
    """Each is measured from the latest time that was returned, so the clock is at most the bound ahead."""
    rng, system = random.Random(new_seed()), System()
    clock = WallClock(lambda: system.now_s)
    for _ in range(2000):
        system.sleep(rng.random())
        system.now_s += rng.choice((0.0, 0.0, rng.uniform(-40, 40), rng.uniform(-1e6, 1e6)))
        before, now = clock._latest_s, clock.now()
        assert system.now_s <= now <= system.now_s + MAX_HOLD_S
        assert now >= before or before - now > MAX_HOLD_S


def test_the_steady_clock_ignores_the_system_clock():
    system = System()
    clock = SteadyClock(START_S, lambda: system.elapsed_s)
    system.now_s -= DAYS_S
    system.sleep(5.0)
    system.now_s += 2 * DAYS_S
    assert clock.now() == START_S + 5.0


def test_the_steady_clock_begins_with_the_time_of_the_day():
    before_s = WallClock().now()
    assert before_s - 1.0 <= SteadyClock().now() <= WallClock().now() + 1.0
    first = time_since_boot()
    assert time_since_boot() >= first >= 0.0


@pytest.mark.parametrize(("time_s", "text"), [(0.0, "1970-01-01T00:00:00Z"), (1e30, "1000")])
def test_a_time_in_words(time_s, text):
    assert utc_text(time_s).startswith(text)
