"""The random driver on a model that two virtual devices share, both tiers small, and a device that fails alone.

Every token is judged by the dense reference on one device, as those of the engine on one device are
(`test_real_models`): so they are each other's.
"""

from __future__ import annotations

import functools
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model_defs import make_mesh
from model_defs.sharding import TENSOR_AXIS
from pensieve_jax.core.errors import StepFailedError
from tests.engine.driver import run_scenario
from tests.engine.harness import Harness
from tests.engine.real_models import MAX_CONTEXT_TOKENS, RealBench, real_config
from tests.engine.test_real_models import MAX_UNCERTAIN_FRACTION, real_scenario

PRESET = "llama-tiny"


@functools.cache
def bench():
    return RealBench(PRESET, num_devices=2)


@pytest.mark.parametrize("seeds", [range(100, 110), pytest.param(range(110, 200), marks=pytest.mark.long)])
def test_random_scenarios_equal_the_dense_reference(seeds, record_property):
    """Swapped, dropped, recomputed, suspended, cancelled, failed: the tokens of one device."""
    judge, totals = bench(), Counter()
    num_before = judge.num_turns
    judge.uncertain.clear()
    for seed in seeds:
        print(f"run_scenario(real_scenario({seed}), RealBench({PRESET!r}, num_devices=2))")
        totals += run_scenario(real_scenario(seed), judge).totals
    num_turns = judge.num_turns - num_before
    record_property("note", f"{num_turns} turns on two devices, {len(judge.uncertain)} too close to call")
    assert num_turns > 10 * len(seeds)
    for name in ("reused_gpu_tokens", "swapped_in_tokens", "recomputed_tokens"):
        assert totals[name] > 15 * len(seeds), name
    assert len(judge.uncertain) <= max(1, MAX_UNCERTAIN_FRACTION * num_turns)
