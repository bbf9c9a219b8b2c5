"""The source of eviction costs: a file, the package, an earlier start, this start, or an estimate."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from model_defs import LayerKind, preset
from pensieve_jax import (
    LLM,
    CacheConfig,
    ConfigError,
    EngineConfig,
    RunnerConfig,
    SamplingParams,
    SchedulerConfig,
    assembly,
    cost_choice,
)
from pensieve_jax.cache import CacheManager
from pensieve_jax.cache.order.cost import (
    AnalyticCostModel,
    CostPoint,
    CostProfile,
    CostSubject,
    MeasuredCostModel,
)
from pensieve_jax.config import POLICIES
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.core.errors import StepFailedError
from pensieve_jax.cost_choice import costs_before_loading, costs_of_runner, needs_costs
from pensieve_jax.device import start_costs
from pensieve_jax.device.start_costs import StartSizes, TimedLength, cost_points, start_sizes
from pensieve_jax.device.step_programs import bucket_layouts, bucket_tile_specs
from tests.launching import TINY_MODEL, tiny_config

ROOT = Path(__file__).parents[1]
ESTIMATED = AnalyticCostModel(32, num_weights=1e9, attention_width=1e5)
PROMPTS = [[5, 6, 7] * 20, [9, 8] * 25]


def shipped_subject() -> CostSubject:
    """Return what an engine on an H200 asks for; only the device's kind is set by hand."""
    subject = assembly.cost_subject(
        preset("llama2-13b-gqa10"), dtype="bfloat16", tensor_parallel_size=1, chunk_tokens=32
    )
    return dataclasses.replace(subject, device="NVIDIA H200")


def test_a_full_models_profile_does_not_pass_for_one_with_windows():
    """Rotations cost nothing, so they are not told apart."""
    full = preset("llama2-13b-gqa10")

    def subject(*kinds: LayerKind) -> CostSubject:
        given = dataclasses.replace(full, layer_kinds=kinds * (40 // len(kinds)), ropes=full.ropes * 2)
        found = assembly.cost_subject(given, dtype="bfloat16", tensor_parallel_size=1, chunk_tokens=32)
        return dataclasses.replace(found, device="NVIDIA H200")

    assert subject(LayerKind(rope=1), LayerKind()) == shipped_subject()
    window = LayerKind(window=1024)
    for kinds, layers in (
        ((window,), "window 1024"),
        ((window, LayerKind()), "20 full, 20 window 1024"),
        ((window, window, LayerKind(), LayerKind(), LayerKind(rope=None)), "24 full, 16 window 1024"),
    ):
        assert subject(*kinds).layers == layers
        assert before_loading(subject=subject(*kinds)) is None, "measured at the start instead"
    path = ROOT / "pensieve_jax/cost_profiles/h200_llama2-13b-gqa10.json"
    with pytest.raises(ConfigError, match="a profile of layers='window 1024'; this one is of layers='full'"):
        CostProfile.load(path, subject(window))


def test_experts_are_part_of_a_subject_and_only_the_chosen_ones_cost():
    """A profile of one mixture is not that of another, even of equal dimensions."""
    model = preset("qwen3-30b-a3b")

    def layers(model) -> str:
        return assembly.cost_subject(model, dtype="bfloat16", tensor_parallel_size=1, chunk_tokens=32).layers

    assert layers(model) == "full moe 8 of 128 x 768"
    some = dataclasses.replace(model, layer_kinds=(LayerKind(), LayerKind(mlp="moe")) * 24)
    assert layers(some) == "24 full, 24 full moe 8 of 128 x 768"
    more = dataclasses.replace(model, experts=dataclasses.replace(model.experts, num_experts=256))
    costs = [assembly.estimated_cost_model(one, 32).chunk_cost_s(4096) for one in (model, more)]
    assert layers(more) != layers(model) and costs[1] == pytest.approx(costs[0], rel=0.01), "a larger router"


def test_the_analytic_costs_of_a_window_are_flat_beyond_it():
    full, kinds = preset("llama2-13b-gqa10"), (LayerKind(window=1024), LayerKind())
    costs = {
        name: assembly.estimated_cost_model(dataclasses.replace(full, layer_kinds=of), 32)
        for name, of in (("full", ()), ("some", kinds * 20), ("all", kinds[:1] * 40))
    }
    at = {name: [model.chunk_cost_s(length) for length in (1024, 4096)] for name, model in costs.items()}
    assert at["full"][0] == pytest.approx(at["some"][0]) == pytest.approx(at["all"][0]) == at["all"][1]
    assert at["some"][1] - at["some"][0] == pytest.approx((at["full"][1] - at["full"][0]) / 2)


def before_loading(config=None, subject=None, *, is_accelerator=True):
    return costs_before_loading(
        config or EngineConfig(), subject or shipped_subject(), ESTIMATED, is_accelerator=is_accelerator
    )


def test_a_shipped_profile_is_found_by_its_subject():
    """The model's name does not matter; the package's copy is the document's measurement."""
    costs = before_loading()
    assert (costs.kind, costs.source) == ("shipped", "h200_llama2-13b-gqa10")
    assert round(costs.ratio_at_4096(32), 2) == 1.30
    document = json.loads((ROOT / "lab/results/h200_costs_llama2-13b-gqa10.json").read_text("utf-8"))
    assert [point._asdict() for point in costs.points] == document["results"]["curves"]["in_batch"]


@pytest.mark.parametrize(
    "change",
    [{"kv_dtype": "int8"}, {"weights_dtype": "int8"}, {"device": "NVIDIA H100"}, {"chunk_tokens": 16}],
)
def test_a_profile_of_another_system_is_not_used(change):
    """Costs are then measured on an accelerator; times of a CPU are noise."""
    subject = dataclasses.replace(shipped_subject(), **change)
    assert before_loading(subject=subject) is None
    costs = before_loading(subject=subject, is_accelerator=False)
    assert (costs.kind, costs.source, costs.model) == ("analytic", None, ESTIMATED)


BY_ARRIVAL = SchedulerConfig(prompt_order="arrival")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (EngineConfig(cache=CacheConfig(cost_profile="analytic")), "analytic"),
        (EngineConfig(cache=CacheConfig(policy="learned")), None),
        (EngineConfig(cache=CacheConfig(policy="lru"), scheduler=BY_ARRIVAL), "analytic"),
        (EngineConfig(stateful=False, scheduler=BY_ARRIVAL), "analytic"),
        (EngineConfig(cache=CacheConfig(policy="lru")), None),
        (EngineConfig(stateful=False), None),
        (
            EngineConfig(
                cache=CacheConfig(policy="lru"),
                scheduler=dataclasses.replace(BY_ARRIVAL, target_tpot_ms=20.0),
            ),
            None,
        ),
    ],
)
def test_costs_are_measured_if_a_policy_or_an_order_uses_them(config, kind):
    costs = before_loading(config, dataclasses.replace(shipped_subject(), kv_dtype="int8"))
    assert (costs and costs.kind) == kind


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        (EngineConfig(cache=CacheConfig(policy="lru"), scheduler=BY_ARRIVAL), "lru"),
        (EngineConfig(stateful=False, scheduler=BY_ARRIVAL), "a stateless engine"),
    ],
)
def test_the_reason_names_the_policy_and_the_order(config, policy):
    costs = before_loading(config, dataclasses.replace(shipped_subject(), kv_dtype="int8"))
    assert costs.reason == f"not measured: neither {policy} nor prompts by arrival use costs"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stateful", [True, False])
def test_every_engine_with_the_default_order_uses_costs(policy, stateful):
    config = EngineConfig(cache=CacheConfig(policy=policy), stateful=stateful)
    assert needs_costs(config) and needs_costs(EngineConfig())
    assert not needs_costs(EngineConfig(stateful=False, scheduler=BY_ARRIVAL))


def test_named_costs_go_before_a_shipped_profile(tmp_path):
    path = tmp_path / "costs.json"
    points = (CostPoint(32, 0.0, 1.0, 1.0), CostPoint(64, 1.0, 1.0, 2.0))
    profile = CostProfile(
        subject=shipped_subject(),
        model="m",
        jax_version="0",
        command="c",
        num_batched_chunks=2,
        cost="in_batch",
        curves={"in_batch": points},
    )
    profile.save(path)
    config = EngineConfig(cache=CacheConfig(cost_profile=str(path)))
    costs = before_loading(config)
    assert (costs.kind, costs.source, costs.points) == ("file", str(path), points)
    with pytest.raises(ConfigError, match="a profile of kv_dtype='int8'"):
        before_loading(config, dataclasses.replace(shipped_subject(), kv_dtype="int8"))
    assert before_loading(EngineConfig(cache=CacheConfig(cost_profile="analytic"))).kind == "analytic"


def layouts(gpu_pages=4096, **scheduler):
    """Return the layouts of this scheduler's steps; the model's shape does not matter."""
    model = preset("llama-tiny")
    config = EngineConfig(cache=CacheConfig(gpu_pages=gpu_pages), scheduler=SchedulerConfig(**scheduler))
    specs = bucket_tile_specs(model, config, np.dtype("float32"), "xla", 1)
    return bucket_layouts(model, config, specs)


def sizes(context_tokens=4096, gpu_pages=4096, **scheduler):
    return start_sizes(
        layouts(gpu_pages, **scheduler), gpu_pages=gpu_pages, chunk_tokens=32, context_tokens=context_tokens
    )


def test_lengths_grow_by_factors_of_four_up_to_the_longest():
    assert sizes() == StartSizes(16, tuple(TimedLength(n, m) for n, m in
        ((32, 16), (128, 16), (512, 16), (2048, 16), (4096, 16))
    ))  # fmt: skip
    assert [length.context_len for length in sizes(context_tokens=2100).lengths] == [32, 128, 512, 2048]


def test_a_small_pool_has_fewer_long_sequences():
    """It never has more pages than the pool."""
    found = sizes(gpu_pages=300)
    assert found.lengths[-1] == TimedLength(4096, 2)
    for length in found.lengths:
        pages = length.num_long * (length.context_len // 32) + found.num_chunks - length.num_long
        assert pages <= 300
    assert max(length.context_len for length in sizes(gpu_pages=100).lengths) == 2048


def test_long_contexts_are_bounded():
    """The KV cache that is computed for attention has at most 65,536 tokens."""
    found = sizes(context_tokens=10**6, gpu_pages=10**5)
    assert found.lengths[-1].context_len == 32_768 and found.lengths[-1].num_long == 1


def test_chunks_fill_a_step():
    """Otherwise a chunk would pay for padding."""
    assert sizes(max_num_batched_tokens=2048, token_buckets=(64, 1024, 2048)).num_chunks == 32
    assert sizes(max_num_running=4, max_num_batched_tokens=512, token_buckets=(512,)).num_chunks == 8
    assert sizes(max_num_running=1, max_num_batched_tokens=40, token_buckets=(40,)).num_chunks == 1


def test_short_contexts_have_too_few_lengths():
    assert len(sizes(context_tokens=63).lengths) == 1
    assert len(sizes(context_tokens=31).lengths) == 0


def test_a_chunks_cost_is_the_increase_from_long_chunks():
    lengths = (TimedLength(32, 4), TimedLength(128, 4), TimedLength(512, 2))
    found = cost_points(StartSizes(4, lengths), [8, 12, 18])
    assert [(point.context_len, point.total_s) for point in found] == [(32, 2.0), (128, 3.0), (512, 7.0)]
    assert [(point.rest_s, point.attention_s) for point in found] == [(2.0, 0.0), (2.0, 1.0), (2.0, 5.0)]
    noisy = cost_points(StartSizes(2, lengths[:2]), [8, 7])
    assert [point.total_s for point in noisy] == [4.0, 4.0]


def test_the_order_of_eviction_follows_the_profile():
    """The chunk at 4,096 tokens, idle for 1.2 times as long as a first chunk: 1.15 / 1.2 and 1.30 / 1.2."""
    costs = before_loading()
    analytic = assembly.estimated_cost_model(preset("llama2-13b-gqa10"), 32)
    assert round(analytic.chunk_cost_s(4096) / analytic.chunk_cost_s(32), 2) == 1.15
    dropped = []
    for model in (analytic, costs.model):
        clock = VirtualClock(100.0)
        cache = CacheManager(CacheConfig(gpu_pages=129), model, clock, max_num_copies=64)
        for arrival, (name, num_tokens, then_s) in enumerate(
            (("long", 4096, 2.0), ("short", 32, 10.0), ("new", 4096, 0.0))
        ):
            sequence = cache.open(name)
            cache.enqueue(sequence, arrival)
            cache.begin_step()
            assert cache.try_admit(sequence, num_tokens, waive_reserve=True)
            cache.fill(sequence, 0, num_tokens)
            if name != "new":
                cache.release(sequence)
            clock.advance(then_s)
        dropped.append(Counter(drop.conversation_id for drop in cache.take_drops()))
    assert dropped == [{"long": 128}, {"long": 127, "short": 1}]


TINY_STEPS = {"max_num_running": 1, "max_num_batched_tokens": 33, "token_buckets": (33,)}
HUGE_STEPS = {"max_num_running": 2048, "max_num_batched_tokens": 65_536, "token_buckets": (65_536,)}
POINTS = (CostPoint(32, 0.0, 1.0, 1.0), CostPoint(64, 1.0, 1.0, 2.0))


def chosen(path, monkeypatch, *, measure=lambda *_: POINTS, context_tokens=4096, gpu_pages=4096, **scheduler):
    """Return the costs chosen for a runner (only its step shapes matter), with `path` as its file."""
    monkeypatch.setattr(cost_choice, "_path", lambda *_: path)
    monkeypatch.setattr(cost_choice, "measure_start_costs", measure)
    return costs_of_runner(
        SimpleNamespace(layouts=layouts(gpu_pages, **scheduler)),
        EngineConfig(cache=CacheConfig(gpu_pages=gpu_pages)),
        shipped_subject(),
        ESTIMATED,
        name="a model",
        context_tokens=context_tokens,
        progress=lambda *_: None,
    )


def test_a_damaged_file_is_measured_again(tmp_path, caplog, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_bytes(b"{")
    costs = chosen(path, monkeypatch)
    assert (costs.kind, costs.source, costs.points) == ("measured at start", str(path), POINTS)
    assert "measured again" in caplog.text and CostProfile.load(path).model == "a model"
    assert list(tmp_path.iterdir()) == [path], "nothing half-written is left"
    assert chosen(path, monkeypatch, measure=lambda *_: pytest.fail("measured")).kind == "cached"


def test_an_unwritable_directory_is_not_an_error(tmp_path, caplog, monkeypatch):
    """A file exists in place of the directory."""
    (tmp_path / "costs").write_text("")
    costs = chosen(tmp_path / "costs" / "costs.json", monkeypatch)
    assert (costs.kind, costs.source, costs.points) == ("measured at start", None, POINTS)
    assert "are not stored in" in caplog.text


def test_an_interrupt_stores_nothing(tmp_path, monkeypatch):
    """This holds during the measurement, and during the writing of the file."""

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chosen(tmp_path / "costs.json", monkeypatch, measure=interrupted)
    monkeypatch.setattr(CostProfile, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chosen(tmp_path / "costs.json", monkeypatch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"context_tokens": 63}, "contexts of at most 63 tokens are too short"),
        ({"context_tokens": 31, "gpu_pages": 2}, "contexts of at most 31 tokens are too short"),
        ({"gpu_pages": 16}, "16 pages leave no room beside one chunk of each of 16 sequences"),
        (HUGE_STEPS, "a step of 65,536 tokens leaves no time for longer contexts"),
    ],
)
def test_the_reason_for_not_measuring_is_logged(tmp_path, monkeypatch, limits, why):
    """The reason names the limit that left fewer than two lengths."""
    costs = chosen(tmp_path / "costs.json", monkeypatch, measure=lambda *_: pytest.fail("measured"), **limits)
    assert (costs.kind, costs.model) == ("analytic", ESTIMATED)
    assert costs.reason == f"not measured: {why}"


@pytest.mark.parametrize(
    "limits", [{"context_tokens": 64}, {"gpu_pages": 17}, {"gpu_pages": 2, **TINY_STEPS}]
)
def test_the_smallest_measurement(tmp_path, monkeypatch, limits):
    """Steps of fewer tokens are refused: every step holds a chunk."""
    assert chosen(tmp_path / "costs.json", monkeypatch, **limits).kind == "measured at start"


@pytest.fixture
def measures(monkeypatch, tmp_path):
    """Measure a CPU as an accelerator; the test sets the seconds of steps."""
    monkeypatch.setattr(cost_choice, "_directory", lambda config: tmp_path / "cost_profiles")
    monkeypatch.setattr(assembly, "_is_accelerator", lambda: True)
    measured = []

    def rounds(timed, num_rounds, sample_s):
        """Run everything as `sample_rounds`, but with times that do not depend on the machine."""
        measured.append(len(timed))
        for _ in range(num_rounds):
            for one in timed:
                one.once_s()
            yield [1.0 + 0.5 * i for i in range(len(timed))]

    monkeypatch.setattr(start_costs, "sample_rounds", rounds)
    return measured


@pytest.fixture
def config(compilation_cache):
    """Return a factory of small configurations, whose compiled steps other tests load."""
    return functools.partial(tiny_config, compilation_cache)


def run(engine_config, **runner):
    """Run some turns; return the engine's description of its cache, its answers, and its costs."""
    runner_config = dataclasses.replace(engine_config.runner, **runner)
    engine_config = dataclasses.replace(engine_config, runner=runner_config)
    with LLM(TINY_MODEL, dtype="float32", config=engine_config, progress=False) as llm:
        outputs = llm.generate(
            PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True), conversation_ids=["a", "b"]
        )
        pools = [np.asarray(pool)[1:] for pool in llm._runner.pools]
        return llm.describe()["cache"], [output.token_ids for output in outputs], llm._parts.costs, pools


def test_an_engine_measures_once_and_answers_the_same(measures, config, tmp_path, caplog):
    """The second start reads the file of the first, measures nothing, and leaves the same pool contents."""
    with caplog.at_level(logging.INFO, logger="pensieve_jax.assembly"):
        described, answers, costs, pools = run(config())
    (path,) = (tmp_path / "cost_profiles").iterdir()
    assert (described["cost_model"], described["cost_profile"]) == ("measured at start", str(path))
    assert measures == [3] and isinstance(costs.model, MeasuredCostModel)
    assert [point.context_len for point in costs.points] == [32, 128, 512]
    assert "eviction costs: measured at start" in caplog.text and described["cost_at_4096"] > 1

    again, answers_again, costs_again, pools_again = run(config())
    assert (again["cost_model"], again["cost_profile"]) == ("cached", str(path)) and measures == [3]
    assert costs_again.points == costs.points and answers == answers_again
    for pool, pool_again in zip(pools, pools_again, strict=True):
        np.testing.assert_array_equal(pool, pool_again)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": "x"}', b"\xff"])
def test_an_invalid_profile_is_not_used(tmp_path, content, caplog):
    path = tmp_path / "costs.json"
    assert cost_choice._load(path, shipped_subject()) is None and not caplog.records
    path.write_bytes(content)
    assert cost_choice._load(path, shipped_subject()) is None
    assert f"{path} cannot be used, so costs are measured again" in caplog.text


def test_files_are_stored_beside_compiled_steps(tmp_path, monkeypatch, caplog):
    """Without these they are in the user's cache directory; without one nothing is stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost_choice._directory(EngineConfig()) == tmp_path / "pensieve_jax" / "cost_profiles"
    beside = EngineConfig(runner=RunnerConfig(compilation_cache_dir="/compiled"))
    assert cost_choice._directory(beside) == Path("/compiled/cost_profiles")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cost_choice, "user_cache_dir", homeless)
    assert cost_choice._directory(EngineConfig()) is None and "are not stored" in caplog.text


def key_of(monkeypatch, *, subject=None, kernels=("a", "b"), num_groups=2, sizes=None, environment=None):
    """Return the file of a measurement that differs from the usual one in the given values."""
    devices = {jax.devices()[1], jax.devices()[0]}
    asked = []

    def of_devices(devices):
        asked.append([device.id for device in devices])
        return {"source": "digest", "versions": "1"} | (environment or {})

    monkeypatch.setattr(cost_choice, "environment", of_devices)
    runner = SimpleNamespace(
        storage=SimpleNamespace(sharding=SimpleNamespace(device_set=devices), groups=(None,) * num_groups),
        kernels=[name and SimpleNamespace(name=name) for name in kernels],
    )
    config = EngineConfig(runner=RunnerConfig(compilation_cache_dir="/compiled"))
    path = cost_choice._path(runner, config, subject or shipped_subject(), sizes or USUAL_SIZES)
    assert asked == [[0, 1]], "in the order of their ids, whatever the set's"
    assert path.parent == Path("/compiled/cost_profiles") and path.suffix == ".json"
    return path.name


USUAL_SIZES = StartSizes(4, (TimedLength(32, 4), TimedLength(64, 2)))
SUBJECT_FIELDS = [field.name for field in dataclasses.fields(CostSubject)]


@pytest.mark.parametrize(
    "change",
    [
        {"kernels": ("a", "c")},
        {"kernels": ("a", None)},
        {"kernels": ("b", "a")},
        {"num_groups": 1},
        {"sizes": StartSizes(5, USUAL_SIZES.lengths)},
        {"sizes": StartSizes(4, (TimedLength(32, 4), TimedLength(64, 1)))},
        {"sizes": StartSizes(4, (TimedLength(32, 4), TimedLength(128, 2)))},
        {"environment": {"source": "another"}},
        {"environment": {"driver": "new"}},
        *({"subject": field} for field in SUBJECT_FIELDS),
    ],
)
def test_another_measurement_has_another_file(monkeypatch, change):
    """The same measurement has the same file at every start."""
    if name := change.get("subject"):
        value = getattr(shipped_subject(), name)
        other = "int8" if value is None else value + type(value)(1)
        subject = dataclasses.replace(shipped_subject(), **{name: other})
        change = {"subject": subject}
    usual = key_of(monkeypatch)
    assert key_of(monkeypatch, **change) != usual == key_of(monkeypatch)


def test_a_failed_step_leaves_the_estimate(measures, config, monkeypatch, caplog):
    """The engine serves all the same."""

    def fails(timed, num_rounds, sample_s):
        timed[0].once_s()
        raise StepFailedError("a step failed on the device")
        yield

    plain = run(config(cost_profile="analytic"))[1]
    monkeypatch.setattr(start_costs, "sample_rounds", fails)
    described, answers, *_ = run(config())
    assert (
        described["cost_model"] == "analytic" and "step to measure costs failed" in described["cost_reason"]
    )
    assert answers == plain and "a step to measure them failed" in caplog.text


@pytest.mark.long
def test_steps_on_two_devices_are_measured(measures, config):
    described, *_ = run(config(), tensor_parallel_size=2)
    assert described["cost_model"] == "measured at start"


@pytest.mark.long
def test_an_8_bit_kv_cache_with_host_memory_is_measured(measures, config):
    described, *_ = run(config(kv_dtype="int8", cpu_pages=4))
    assert described["cost_model"] == "measured at start"
