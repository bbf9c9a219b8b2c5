"""Steps beside decodes with a target of time per later token: when they grow, and when not."""

from __future__ import annotations

import pytest

from pensieve_jax import ConfigError
from pensieve_jax.cache import AnalyticCostModel
from pensieve_jax.config import PROMPT_ORDERS, SchedulerConfig
from tests.scheduler.helpers import CHUNK, SchedulerHarness

SIZES = (64, 256, 512, 1024, 2048)
# 40 us for each token: 41 ms for 1,024, and 82 ms for 2,048.
COSTS = AnalyticCostModel(CHUNK, num_weights=0.5, attention_width=0, flop_per_s=25_000)


def harness_of(step_s: float = 0.01, num_steps: int = 12, **options) -> SchedulerHarness:
    """Return a harness with a reply that got `num_steps` tokens, one each `step_s`."""
    sizes = {"max_num_batched_tokens": 2048, "token_buckets": SIZES, "max_num_running": 8}
    harness = SchedulerHarness(2000, cost_model=COSTS, **{"target_tpot_ms": 20.0} | sizes | options)
    harness.add("decodes", 5, max_tokens=500)
    for _ in range(num_steps):
        harness.step()
        harness.cache.clock.advance(step_s)
    return harness


def prompt_tokens(harness: SchedulerHarness, num_steps: int = 1, step_s: float = 0.01) -> list[int]:
    """Return the tokens of prompts in the next steps."""
    found = []
    for _ in range(num_steps):
        harness.step()
        harness.cache.clock.advance(step_s)
        found.append(sum(end - start for name, start, end, _ in harness.steps[-1] if name != "decodes"))
    return found


@pytest.mark.parametrize("order", PROMPT_ORDERS)
def test_steps_grow_while_enough_waits(order):
    """A step of 1,024 tokens needs four times its work waiting; 2,048 would take too long."""
    harness = harness_of(prompt_order=order)
    harness.add("long", 8000)
    assert prompt_tokens(harness, 8) == [1023, 1023, 1023, 1023, 511, 511, 511, 511]


def test_without_a_target_steps_are_as_large_as_they_may_be():
    harness = harness_of(target_tpot_ms=None)
    harness.add("long", 8000)
    assert prompt_tokens(harness, 2) == [2047, 2047]


def test_requests_of_the_queue_count_as_waiting():
    harness = harness_of()
    harness.add("first", 1500)
    harness.add("second", 3000)
    assert harness.scheduler.running[1:] == [] and prompt_tokens(harness) == [1023]


@pytest.mark.parametrize(("step_s", "expected"), [(0.019, 1023), (0.021, 255)])
def test_replies_over_the_target_get_small_steps(step_s, expected):
    harness = harness_of(step_s)
    harness.add("long", 5000)
    assert prompt_tokens(harness) == [expected]


def test_replies_over_the_target_get_the_usual_step_while_much_waits():
    """Small steps cost more per token: they stop where over a quarter of a second waits, 6,250 tokens."""
    harness = harness_of(0.021)
    harness.add("long", 7000)
    assert prompt_tokens(harness, 4, step_s=0.021) == [511, 511, 255, 255]
    harness.add("waits", 1500)
    assert prompt_tokens(harness, 3, step_s=0.021) == [511, 511, 255]


def test_the_mean_is_that_of_the_running_replies():
    """One is slow and one is fast: each counts alike, from its own first token."""
    harness = harness_of(0.03, num_steps=20)
    harness.add("new", 5, max_tokens=500)
    for _ in range(10):
        harness.step()
        harness.cache.clock.advance(0.002)
    now_s = harness.cache.clock.now()
    means = []
    for request in harness.scheduler.running:
        since_s, since_tokens = request.decoding_since
        means.append((now_s - since_s) / (len(request.token_ids) - since_tokens))
    found_s = harness.scheduler._order._target.mean_s(harness.scheduler.running)
    assert found_s == pytest.approx(sum(means) / 2) and means[0] > 0.02 > found_s > means[1]


def test_replies_of_a_few_tokens_do_not_count():
    harness = harness_of(0.5, num_steps=6)
    harness.add("long", 8000)
    assert prompt_tokens(harness) == [1023]


def test_a_step_that_prompts_do_not_fill_does_not_grow():
    """They fill 700 of 1,023 tokens."""
    harness = harness_of()
    harness.add("short", 700)
    assert prompt_tokens(harness, 2) == [511, 189]


def test_without_decodes_a_prompt_gets_the_largest_step():
    harness = harness_of(num_steps=0)
    harness.scheduler.remove(harness.scheduler.waiting[0])
    harness.add("long", 8000)
    assert prompt_tokens(harness) == [2048]


def test_many_decodes_over_the_target_leave_room_for_a_chunk():
    """The first prompt advances in every step, as without a target."""
    harness = harness_of(0.5, max_num_running=400)
    for index in range(300):
        harness.add(f"more {index}", 1, max_tokens=500)
    prompt_tokens(harness, 30, step_s=0.5)
    assert sum(request.is_decoding for request in harness.scheduler.running) == 301
    harness.add("long", 5000)
    harness.step()
    assert sum(end - start for name, start, end, _ in harness.steps[-1] if name == "long") == 512 - 301


def test_a_resumed_reply_counts_from_its_return():
    harness = harness_of(0.5)
    request = harness.scheduler.running[0]
    assert harness.scheduler._suspend_latest() is request
    harness.step()
    now_s, num_tokens = harness.cache.clock.now(), len(request.token_ids) - 1
    assert request.is_decoding and request.decoding_since == (now_s, num_tokens)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "20", True])
def test_an_invalid_target_is_refused(value):
    with pytest.raises(ConfigError, match=r"^scheduler.target_tpot_ms is .*above 0 milliseconds"):
        SchedulerConfig(max_num_batched_tokens=1024, target_tpot_ms=value)


def test_a_target_without_larger_steps_is_refused():
    with pytest.raises(ConfigError, match=r"^scheduler.target_tpot_ms is 20.*256.*all steps are small"):
        SchedulerConfig(max_num_batched_tokens=256, target_tpot_ms=20.0)
    assert SchedulerConfig(target_tpot_ms=20.0).target_tpot_ms == 20.0


def test_an_invalid_order_is_refused():
    with pytest.raises(ConfigError, match=r"^scheduler.prompt_order is 'fifo'"):
        SchedulerConfig(prompt_order="fifo")
