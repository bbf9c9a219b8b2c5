"""The programs that compare tiers and measure copies, at small sizes, and their arithmetic."""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest

from model_defs import preset
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, Output, Usage, assembly
from pensieve_jax.cache.order.cost import AnalyticCostModel, CostPoint, MeasuredCostModel
from pensieve_jax.config import POLICIES
from pensieve_jax.cost_choice import CostChoice
from tests.launching import load, optimized

compare_variants = load("compare_variants")
benchmark_swaps = load("benchmark_swaps")
spread = load("pensieve_lab.common.spread")
workload = load("pensieve_lab.serving.rounds")
estimate = load("pensieve_lab.serving.estimate")

LOAD = {
    "num_conversations": 6,
    "num_turns": 4,
    "prompt_tokens": 12,
    "output_tokens": 12,
    "concurrency": 3,
    "chunk_tokens": 16,
    "token_buckets": 64,
    "max_num_running": 8,
    "dtype": "float32",
    "max_num_staged_pages": 4,
    "num_layer_groups": 1,
}
SWAPS = {
    "num_decodes": 4,
    "context_tokens": 40,
    "max_crowd_tokens": 400,
    "max_position_embeddings": 512,
    "num_chunks": 4,
    "prompt_tokens": 6,
    "num_steps": 4,
    "num_repeats": 2,
    "chunk_tokens": 16,
    "dtype": "float32",
    "max_num_staged_pages": 4,
    "num_layer_groups": 2,
}


def last_line(out):
    return json.loads(out.splitlines()[-1])


@pytest.mark.long
def test_variants(launch, compilation_cache, monkeypatch, capsys):
    """More KV is kept, less is recomputed, and the tokens are the same; otherwise it fails."""
    flags = LOAD | {"compilation_cache_dir": compilation_cache, "policies": True}
    with optimized():
        assert launch("compare_variants", shared_llm=False, **flags) == 0
    document = last_line(capsys.readouterr().out)
    results = document["results"]
    variants = results["variants"]
    others = {f"both tiers, {policy}" for policy in POLICIES} - {f"both tiers, {CacheConfig().policy}"}
    assert variants.keys() == {"stateless", "gpu only", "both tiers"} | others
    assert all(results["same_tokens"].values())
    stateless, gpu_only, both = (variants[name] for name in ("stateless", "gpu only", "both tiers"))
    history = {name: sum(one[key] for key in workload.HISTORY_SOURCES) for name, one in variants.items()}
    assert len(set(history.values())) == 1, "the variants served different histories"
    assert stateless["recomputed_tokens"] == history["stateless"] > 0
    assert gpu_only["gpu_hit_rate"] > 0 and gpu_only["cpu_hit_rate"] == 0
    assert both["cpu_hit_rate"] > 0 and both["swapped_in_bytes"] > 0
    assert both["recomputed_tokens"] < gpu_only["recomputed_tokens"] < stateless["recomputed_tokens"]
    assert {"versions", "hardware", "command", "units"} <= document.keys()

    config = EngineConfig(cache=CacheConfig(gpu_pages=8, cpu_pages=8))
    measured = config, variants, results["same_tokens"] | {"both tiers, lru": False}
    monkeypatch.setattr(compare_variants, "measure", lambda: measured)
    assert launch("compare_variants", shared_llm=False, **flags) == 1
    assert "both tiers, lru: tokens differ" in capsys.readouterr().out


@pytest.fixture
def cost_models(monkeypatch):
    """Record the cost models of the engines that `compare_variants` starts, in order; they serve nothing.

    The runner is one of an accelerator, whose costs take one measurement.
    """
    engines, measured, models = load("pensieve_lab.common.engines"), [], []

    class Transfers:
        retrieval_priority = None

    class Engine:
        limits = None

        def __init__(self, *_, cost_model=None, **__):
            models.append(cost_model)

        def close(self):
            pass

        def check_integrity(self):
            pass

    def open_parts(config):
        config = config.with_cpu_pages(1)
        model = preset("llama-tiny")
        found = assembly._costs_before_loading(model, config, "float32")
        runner = SimpleNamespace(reset=lambda: None, transfers=Transfers())
        costs = found or costs_of_runner()
        return SimpleNamespace(
            engine=Engine(), runner=runner, config=config, costs=costs, model_config=model, model_name="m"
        )

    def costs_of_runner(*_, **__):
        measured.append(None)
        points = (CostPoint(32, 0.0, 1.0, 1.0), CostPoint(64, 1.0, 1.0, 2.0))
        return CostChoice(MeasuredCostModel(points), "measured at start", None, "measured", points)

    monkeypatch.setattr(assembly, "_is_accelerator", lambda: True)
    monkeypatch.setattr(assembly, "costs_of_runner", costs_of_runner)
    monkeypatch.setattr(engines, "open_parts", open_parts)
    monkeypatch.setattr(engines, "Engine", Engine)
    monkeypatch.setattr(engines, "DeviceTransfers", Transfers)
    monkeypatch.setattr(compare_variants, "probe", lambda *_: estimate.Pace(step_s=1.0, prompt_token_s=1.0))
    served = workload.RoundsResult(seconds=1.0, stats=Counter())
    monkeypatch.setattr(compare_variants, "serve", lambda *_: served)
    yield models
    assert len(measured) == 1


@pytest.mark.parametrize("policy", ["lru", "retention"])
def test_a_variant_that_needs_costs_evicts_by_measured_ones(launch, cost_models, capsys, policy):
    """The result does not depend on whether the policy of the flags, which the others use, needs costs."""
    launch(
        "compare_variants",
        shared_llm=False,
        **LOAD | {"policy": policy, "policies": True, "prompt_order": "arrival"},
    )
    variants = last_line(capsys.readouterr().out)["results"]["variants"]
    kinds = {name: one["costs"]["kind"] for name, one in variants.items()}
    measured = {name for name, kind in kinds.items() if kind == "measured at start"}
    others = {f"both tiers, {other}" for other in ("retention", "learned") if other != policy}
    assert measured == others | ({"gpu only", "both tiers"} if policy == "retention" else set())
    assert variants["both tiers, learned"]["costs"]["points"][1]["total_s"] == 2.0
    assert variants["stateless"]["costs"]["points"] is None
    started = dict(zip(variants, cost_models[-len(variants) :], strict=True))
    expected = {name: MeasuredCostModel if name in measured else AnalyticCostModel for name in variants}
    assert {name: type(model) for name, model in started.items()} == expected


def test_same_tokens():
    def served(*replies):
        usage = Usage(1, 0, 0, 0, 1, 1)
        return workload.RoundsResult([Output(name, ids, "", "length", usage, 0) for name, ids in replies])

    a, b, c = ("a", (1, 2)), ("b", (3,)), ("b", (4,))
    found = compare_variants.same_tokens(
        {"first": served(a, b), "other order": served(b, a), "other token": served(a, c), "lost": served(a)}
    )
    assert found == {"first": True, "other order": True, "other token": False, "lost": False}


def test_the_time_to_come_is_estimated_from_a_probe():
    load_ = workload.Workload([[("a", [1] * 10), ("b", [1] * 20)], [("b", [1] * 4), ("a", [1] * 6)]], 5)
    found, computed = estimate.seconds(load_, 2, estimate.Pace(step_s=0.5, prompt_token_s=0.1))
    assert found == pytest.approx(2 * 5 * 0.5 + 40 * 0.1)
    assert computed == pytest.approx(found + (10 + 5 + 20 + 5) * 0.1)
    told = compare_variants.expectation(3, 4, (60.0, 120.0))
    assert told == "3 variants of 4 turns: 4 min to 6 min, by a probe; stateless 2 min"


def test_conversations_longer_than_the_context_are_refused(launch, monkeypatch):
    monkeypatch.setattr(compare_variants, "EngineFactory", lambda _: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="--num_turns is 100"):
        launch("compare_variants", shared_llm=False, **(LOAD | {"num_turns": 100, "max_context_tokens": 512}))


@pytest.mark.long
def test_swaps(launch, compilation_cache, monkeypatch, capsys):
    """Everything is measured, and the measured events really happened."""
    flags = SWAPS | {"compilation_cache_dir": compilation_cache}
    assert launch("benchmark_swaps", shared_llm=False, enforce=False, **flags) == 0
    out = capsys.readouterr().out
    found = last_line(out)["results"]
    assert found["bulk"]["transfers"]["num_bytes"] == 4 * 4 * found["slot_bytes"]
    assert list(found["host"]) == ["1 chunks", "2 chunks", "4 chunks"]
    for calls in found["host"].values():
        assert len(calls) == 4 and all(spread["median"] > 0 for spread in calls.values())
    swap_in = found["beside decoding"]["swap-in"]
    assert swap_in["swapped_in_tokens"] == 64 and swap_in["num_copies"] == 4 * found["num_layer_groups"]
    steps = swap_in["steps_to_first_token"]["median"] - swap_in["steps_to_first_token_without"]["median"]
    assert steps == 1
    rate = found["beside decoding"]["swap-out at the rate of decoding"]
    assert rate["num_copies_per_window"] == 4 * 1 * found["num_layer_groups"]
    idle = found["idle engine"]
    assert idle["swapped in"]["swapped_in_tokens"] == idle["recomputed"]["recomputed_tokens"] == 64
    assert idle["on the device"]["swapped_in_tokens"] == idle["on the device"]["recomputed_tokens"] == 0
    prefetch = found["ablations"]["prefetch"]
    assert (
        prefetch["on"]["steps_to_first_token"]["median"] < prefetch["off"]["steps_to_first_token"]["median"]
    )
    assert len(found["targets"]) == 8

    # The exit status follows from the targets, if they are enforced.
    monkeypatch.setattr(benchmark_swaps, "open_parts", lambda *_, **__: _Parts())
    monkeypatch.setattr(benchmark_swaps, "measure", lambda _: {})
    for is_met in (True, False):
        checks = [{"target": "a", "value": 1.0, "bound": 1.0, "met": is_met}]
        monkeypatch.setattr(benchmark_swaps, "targets", lambda _, checks=checks: checks)
        assert launch("benchmark_swaps", shared_llm=False, **flags) == (0 if is_met else 1)


def test_a_flag_that_the_windows_decide_is_refused(launch, monkeypatch):
    monkeypatch.setattr(benchmark_swaps, "open_parts", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"--swap_out_fraction is 0\.5, but must be left out"):
        launch("benchmark_swaps", shared_llm=False, swap_out_fraction=0.5)


class _Parts:
    """Result of `assemble`, as far as a report needs it."""

    config = EngineConfig()

    class engine:
        close = staticmethod(lambda: None)

    class runner:
        class storage:
            slot_bytes, groups = 1, (1,)


def test_spread():
    found = spread.Spread.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found[:3] == (3.0, 2.0, 4.0) and found.num_values == 5
    assert math.isnan(spread.Spread.of([]).median) and spread.Spread.of([]).as_dict()["median"] is None


def test_a_workload_is_the_same_for_all_engines():
    made = [
        workload.make_workload(
            num_conversations=5, num_turns=3, prompt_tokens=8, output_tokens=4, vocab_size=50, seed=seed
        )
        for seed in (1, 1, 2)
    ]
    assert made[0] == made[1] != made[2]
    assert all(len({name for name, _ in one_round}) == 5 for one_round in made[0].prompts)
    total = sum(len(ids) + 4 for one_round in made[0].prompts for _, ids in one_round)
    assert made[0].num_tokens == total and total / 5 <= made[0].longest_tokens <= 3 * (10 + 4)
