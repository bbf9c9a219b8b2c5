"""The engine's two clocks: stored times follow the wall clock, the order of the cache never goes back."""

from __future__ import annotations

from pensieve_jax.core.clock import SteadyClock, VirtualClock, WallClock
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.explanation import DropJournal
from tests.engine.harness import Harness

MONTH_S = 31 * 24 * 3600.0


def with_two_clocks(path) -> tuple[Harness, VirtualClock]:
    """Return an engine whose wall clock is the harness's, and the clock of its cache."""
    harness, order = Harness(path=path), VirtualClock(1000.0)
    harness.engine._order_clock, harness.engine._drops = order, DropJournal(order)
    harness.engine._make_state()
    return harness, order


def last_active(harness: Harness, name: str) -> float:
    return harness.engine.conversations.get(name).sequence.last_active_s


def test_a_wall_clock_that_was_ahead_pins_nothing_in_the_cache(tmp_path):
    harness, order = with_two_clocks(tmp_path / "chats.sqlite")
    harness.turn("before", 8, max_tokens=2)
    harness.clock.advance(MONTH_S)
    order.advance(5.0)
    harness.turn("ahead", 8, max_tokens=2)
    harness.clock._now_s -= MONTH_S
    order.advance(5.0)
    harness.turn("after", 8, max_tokens=2)
    assert [last_active(harness, name) for name in ("before", "ahead", "after")] == [1000.0, 1005.0, 1010.0]
    stored = {info.conversation_id: info.last_active_s for info in harness.store.conversations()}
    assert stored == {"before": 1000.0, "ahead": 1000.0 + MONTH_S, "after": 1000.0}
    harness.engine.close()
    harness, order = with_two_clocks(tmp_path / "chats.sqlite")
    order.advance(60.0)
    assert last_active(harness, "ahead") == 1060.0, "it is the most recent one now, and not for a month"
    assert last_active(harness, "before") == 1000.0
    harness.engine.close()


def test_without_a_given_clock_the_engine_has_both():
    harness = Harness()
    engine = Engine(
        harness.runner,
        harness.config,
        harness.engine.limits,
        harness.store,
        cost_model=harness.engine._cost_model,
    )
    assert isinstance(engine._clock, WallClock) and isinstance(engine._order_clock, SteadyClock)
    assert engine._cache._clock is engine._order_clock is engine._drops.clock
    harness.engine.close()
