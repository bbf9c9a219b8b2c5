"""Drafts on tiny real models, judged by whole forward passes; also in 8 bits, and over two devices."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest

from pensieve_jax.config import POLICIES
from tests.engine.driver import run_scenario
from tests.engine.real_models import (
    MAX_CONTEXT_TOKENS,
    MAX_UNCERTAIN_STORED_FRACTION,
    RealBench,
    real_config,
)
from tests.engine.scenarios import RandomChooser, Scenario, tier_ops
from tests.engine.test_real_models import MAX_UNCERTAIN_FRACTION

MAX_DRAFT_TOKENS = 8
BUCKETS = (48,)


@functools.cache
def bench_for(kv_dtype: str | None = None, num_devices: int = 1) -> RealBench:
    return RealBench(
        "llama-tiny", kv_dtype, num_devices=num_devices, buckets=BUCKETS, max_draft_tokens=MAX_DRAFT_TOKENS
    )


def scenario_of(seed: int, kv_dtype: str | None = None) -> Scenario:
    """Draw conversations that return to two small tiers."""
    choose = RandomChooser(seed)
    config = real_config(
        choose.pick(("retention", *POLICIES)),
        kv_dtype=kv_dtype,
        buckets=BUCKETS,
        max_draft_tokens=MAX_DRAFT_TOKENS,
    )
    return Scenario(config, MAX_CONTEXT_TOKENS, durable=False, ops=tier_ops(choose, 6, max_len=70))


def run_twice(seed: int, bench: RealBench) -> Counter[str]:
    """Run a scenario with drafts of the turns' own history, then with those of an oracle of its replies."""
    scenario = scenario_of(seed, bench.kv_dtype)
    print(f"run_twice({seed}, bench_for({bench.kv_dtype!r}, {bench.num_devices}))")
    totals = Counter(run_scenario(scenario, bench).totals)
    again = run_scenario(dataclasses.replace(scenario, drafts=seed), bench).totals
    return totals + Counter({f"again_{name}": count for name, count in again.items()})


def check(bench: RealBench, seeds: range, max_uncertain: float) -> None:
    totals, num_before = Counter[str](), bench.num_turns
    bench.uncertain.clear()
    for seed in seeds:
        totals += run_twice(seed, bench)
    print(dict(totals))
    num_turns = bench.num_turns - num_before
    assert totals["again_num_accepted_draft_tokens"] > 10 * len(seeds)
    assert totals["again_num_draft_tokens"] > totals["again_num_accepted_draft_tokens"]
    assert totals["again_swapped_in_tokens"] > 0 and num_turns > 10 * len(seeds)
    assert len(bench.uncertain) <= max(1, max_uncertain * num_turns)


def test_turns_with_drafts_equal_the_dense_reference() -> None:
    """Greedy and sampled turns, while others are swapped, dropped, recomputed and suspended."""
    check(bench_for(), range(3), MAX_UNCERTAIN_FRACTION)


@pytest.mark.long
def test_turns_with_drafts_over_an_8_bit_kv_cache_equal_the_dense_reference() -> None:
    check(bench_for("int8"), range(2), MAX_UNCERTAIN_STORED_FRACTION)


@pytest.mark.long
def test_turns_with_drafts_over_two_devices_equal_the_dense_reference() -> None:
    check(bench_for(num_devices=2), range(2), MAX_UNCERTAIN_FRACTION)
