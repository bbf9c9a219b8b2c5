"""The random driver on a model over two or four devices, with small tiers; a device that fails alone.

The dense reference on one device judges every token, as it judges those of the engine on one device
(`test_real_models`): so both engines agree.
"""

from __future__ import annotations

import functools
from collections import Counter

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from model_defs.sharding import TENSOR_AXIS
from pensieve_jax.config import POLICIES
from pensieve_jax.core.errors import StepFailedError
from tests.engine.driver import run_scenario
from tests.engine.harness import Harness
from tests.engine.real_models import (
    MAX_CONTEXT_TOKENS,
    MAX_FAR_FRACTION,
    MAX_UNCERTAIN_STORED_FRACTION,
    RealBench,
    real_config,
)
from tests.engine.scenarios import RandomChooser, Scenario, tier_ops
from tests.seeds import enough

PRESET = "llama-tiny"
BUCKETS = (48,)
MAX_UNCERTAIN_FRACTION = 0.02


@functools.cache
def bench(num_devices=2, preset=PRESET, kv_dtype=None):
    return RealBench(preset, kv_dtype, num_devices=num_devices, buckets=BUCKETS)


def short_scenario(seed, kv_dtype=None):
    """Draw a few rounds of conversations that return to two small tiers."""
    choose = RandomChooser(seed)
    config = real_config(choose.pick(("retention", *POLICIES)), kv_dtype=kv_dtype, buckets=BUCKETS)
    return Scenario(config, MAX_CONTEXT_TOKENS, durable=False, ops=tier_ops(choose, 5, max_len=70))


SOME = range(3, 6)  # together they cover everything; `tests.search_schedules` runs others


def check_scenarios(judge, seeds, record_property):
    totals = Counter()
    num_before = judge.num_turns
    judge.uncertain.clear()
    kv_dtype = judge.kv_dtype
    for seed in seeds:
        print(
            f"run_scenario(short_scenario({seed}, {kv_dtype!r}), "
            f"bench({judge.num_devices}, {judge.preset!r}, {kv_dtype!r}))"
        )
        totals += run_scenario(short_scenario(seed, kv_dtype), judge).totals
    num_turns = judge.num_turns - num_before
    note = f"{num_turns} turns on {judge.num_devices} devices, {len(judge.uncertain)} too close to call"
    record_property("note", note)
    assert num_turns > 5 * len(seeds) and judge.num_prompts > 0
    for name in ("reused_gpu_tokens", "swapped_in_tokens", "recomputed_tokens"):
        assert totals[name] > 2 * len(seeds), (name, totals)
    allowed = MAX_UNCERTAIN_FRACTION if kv_dtype is None else MAX_UNCERTAIN_STORED_FRACTION
    assert len(judge.uncertain) <= max(1, allowed * num_turns)


@pytest.mark.long
def test_random_scenarios_equal_the_dense_reference(record_property):
    """Swapped, dropped, recomputed, suspended, cancelled, failed: the tokens equal one device's."""
    check_scenarios(bench(), SOME, record_property)


@pytest.mark.long
def test_random_scenarios_on_four_devices(record_property):
    """Covers the other model family, with our own all-reduces, layer norms and biases on GPUs."""
    check_scenarios(bench(4, "opt-tiny"), range(enough(6, 100)), record_property)


@pytest.mark.long
def test_an_8_bit_kv_cache_equals_a_reference_on_one_device_with_the_same_storage(record_property):
    """Each device has the scales of its own heads, in both tiers and during copies."""
    judge = bench(2, PRESET, "int8")
    check_scenarios(judge, range(enough(4, 100)), record_property)
    assert judge.num_logprobs > 0 and judge.num_far <= MAX_FAR_FRACTION * judge.num_logprobs


class FailsAlone:
    """Samplers after which one device fails on demand."""

    def __init__(self, runner) -> None:
        self.is_armed = False
        mesh = runner._mesh
        run = jax.jit(
            jax.shard_map(
                self._pass_on, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
            )
        )

        @functools.cache
        def passing_on(num_words):
            sharding = NamedSharding(mesh, PartitionSpec())
            return run.lower(jax.ShapeDtypeStruct((num_words,), np.int32, sharding=sharding)).compile()

        def behind(executable):
            passed_on = passing_on(executable.out_info[1].shape[0])

            def choose(*args):
                next_ids, words = executable(*args)
                return next_ids, passed_on(words)

            return choose

        self.choose = {key: behind(executable) for key, executable in runner._executables.choose.items()}

    def _pass_on(self, words):
        nothing = jax.ShapeDtypeStruct((), np.int32)
        return words + jax.pure_callback(self._fail, nothing, lax.axis_index(TENSOR_AXIS))

    def _fail(self, device):
        if self.is_armed and int(device) == 1:
            raise RuntimeError("this device failed")
        return np.int32(0)


def test_a_device_that_fails_alone_fails_the_step(monkeypatch):
    """The other device's result exists and is not used; nothing hangs, and the next turn is exact."""
    runner = bench().runner
    fails = FailsAlone(runner)
    harness = Harness(real_config(buckets=BUCKETS), bench=bench(), max_model_tokens=MAX_CONTEXT_TOKENS)
    harness.turn("a", 20, seed=1, max_tokens=4)
    facts = harness.facts(harness.prompt(9, seed=2), "a", max_tokens=1)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_executables", runner._executables._replace(choose=fails.choose))
        fails.is_armed = True
        turn = harness.submit(facts, "a")
        with pytest.raises(StepFailedError, match="a step failed on the device"):
            harness.run(turn)
        fails.is_armed = False
        harness.turn("b", 9, seed=3, max_tokens=2)
    output = harness.turn("a", 9, seed=2, max_tokens=5)
    assert output.usage.recomputed_tokens > 0, "what was on the device is lost"
    harness.turn("b", 30, seed=4, max_tokens=3)
    harness.check_empty()


def test_a_failed_result_is_noticed_before_the_next_step(monkeypatch):
    """The failed device would not join its all-reduces, and the other one would wait there for it."""
    runner = bench().runner
    harness = Harness(real_config(buckets=BUCKETS), bench=bench(), max_model_tokens=MAX_CONTEXT_TOKENS)
    fails = FailsAlone(runner)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_executables", runner._executables._replace(choose=fails.choose))
        fails.is_armed = True
        plan = runner._empty_plan(min(runner.layouts.values(), key=lambda layout: layout.num_tokens))
        handle = runner.launch(plan)
        runner.choose(handle, None)
        while not handle.words.is_ready():
            pass
        plan.step_id += 1
        with pytest.raises(StepFailedError, match="could not be started"):
            runner.launch(plan)
        fails.is_armed = False
        runner.reset()
        harness.turn("c", 9, seed=5, max_tokens=2)
