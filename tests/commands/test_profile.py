"""The profiler on a tiny model: its measurements, its file, and that the engine uses it."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import numpy as np
import pytest

from model_defs import load_model, make_mesh, preset
from pensieve_jax import LLM, CacheConfig, ConfigError, EngineConfig, SchedulerConfig, assembly
from pensieve_jax.assembly import cost_subject
from pensieve_jax.cache.order.cost import AnalyticCostModel, CostProfile, MeasuredCostModel
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.device import row_steps
from pensieve_jax.device.chunk_steps import ChunkSteps
from pensieve_jax.device.dense_reference import DenseReference
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.runtime.compilation import keep_compilations_in
from tests.launching import load

SIZES = {"max_context_tokens": 127, "num_batched_chunks": 4, "repeats": 2, "sample_ms": 1, "chunk_tokens": 32}
LENS = [32, 64]


@pytest.fixture
def files(tmp_path):
    return {"output": tmp_path / "costs.json", "plot": tmp_path / "costs.png"}


@pytest.mark.long
def test_the_profiler_measures_writes_and_draws(launch, compilation_cache, files, capsys):
    """The engine reads its file, for this model alone."""
    pytest.importorskip("matplotlib")
    flags = SIZES | files | {"compilation_cache_dir": compilation_cache, "cost": "alone"}
    assert launch("profile", shared_llm=False, **flags) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert document["benchmark"] == "recompute_costs" and "Cost(l) is alone: " in out
    assert {"versions", "hardware", "command", "units"} <= document.keys()

    profile = CostProfile.load(files["output"])
    assert profile.to_json()["curves"] == document["results"]["curves"] and profile.cost == "alone"
    assert profile.model == "random:llama-tiny" and profile.num_batched_chunks == 4
    for points in profile.curves.values():
        assert [point.context_len for point in points] == LENS
        assert len({point.rest_s for point in points}) == 1 and min(p.attention_s for p in points) > 0
        assert points[0].total_s >= points[0].rest_s
    assert files["plot"].read_bytes().startswith(b"\x89PNG") and files["plot"].stat().st_size > 10_000
    check_engine_takes(str(files["output"]), profile)


def check_engine_takes(path, profile):
    """Check that it becomes the cost model of this model and dtype, and is refused for another one."""
    config = EngineConfig(cache=CacheConfig(cost_profile=path))
    costs = assembly._costs_before_loading(preset("llama-tiny"), config, "auto")
    assert (costs.kind, costs.source) == ("file", path) and isinstance(costs.model, MeasuredCostModel)
    assert costs.model.chunk_cost_s(32) == profile.points[0].total_s
    for name, dtype, says in (
        ("random:llama-tiny", "bfloat16", "a profile of dtype='bfloat16'"),
        ("random:opt-tiny", "float32", "a profile of architecture='opt', num_kv_heads=4"),
    ):
        with pytest.raises(ConfigError, match=says):
            LLM(name, dtype=dtype, config=config, progress=False)


def test_the_estimate_is_of_layers_and_not_of_embeddings():
    """In `Cost(l) = attention(l) + c`, c is the layers' products; no recomputed token is sampled from."""
    few, many = (preset("llama-tiny", vocab_size=size) for size in (512, 8192))
    costs = [assembly.estimated_cost_model(model, 32) for model in (few, many)]
    assert costs[0] == costs[1]
    layer = 12 * 5120**2 + 13 * 5120  # OPT's products, its biases and norms
    assert assembly.estimated_cost_model(preset("opt-13b"), 32).num_weights == 40 * layer


def test_analytic_without_a_profile():
    model = preset("llama-tiny")
    costs = assembly._costs_before_loading(model, EngineConfig(), "auto")
    assert costs.kind == "analytic" and isinstance(costs.model, AnalyticCostModel)
    subject = cost_subject(model, dtype="bfloat16", tensor_parallel_size=2, chunk_tokens=16)
    assert (subject.dtype, subject.tensor_parallel_size, subject.chunk_tokens) == ("bfloat16", 2, 16)


@pytest.mark.parametrize(("host_s", "device_s", "row_s"), [(2.0, 7.0, 7.0), (7.0, 2.0, (2.0 + 2 * 7.0) / 3)])
def test_launches_are_timed_back_to_back(monkeypatch, host_s, device_s, row_s):
    """This holds if the host that launches them is faster than the device, or slower."""
    clock, events = VirtualClock(), []
    device_free_s = 0.0

    def launch():
        nonlocal device_free_s
        clock.advance(host_s)
        device_free_s = max(device_free_s, clock.now()) + device_s
        events.append("launch")
        return device_free_s

    def wait(end_s):
        clock.advance(max(0.0, end_s - clock.now()))
        events.append("wait")

    monkeypatch.setattr(row_steps, "time", SimpleNamespace(perf_counter=clock.now))
    timed = row_steps.Timed(launch, wait)
    assert timed.once_s() == 9.0
    assert timed.sample_s(3) == pytest.approx(row_s)
    assert events == ["launch", "wait", "launch", "launch", "wait", "launch", "launch", "wait"]
    del events[:]
    assert timed.dispatch_s(2) == host_s
    assert events == ["launch", "launch", "wait", "launch", "wait", "wait"]


@pytest.fixture(scope="module")
def steps(compilation_cache):
    """Yield three sequences of up to three chunks, the model they run on, and its runner."""
    keep_compilations_in(compilation_cache)
    mesh = make_mesh(1)
    model = load_model("random:llama-tiny", dtype="float32", mesh=mesh)
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=9),
        scheduler=SchedulerConfig(
            max_num_running=3, max_num_rows=3, max_num_batched_tokens=96, token_buckets=(32, 96),
            max_context_tokens=96,
        ),
    )  # fmt: skip
    runner = ModelRunner(model, config, mesh)
    runner.warm_up()
    return ChunkSteps(model.config, config, runner, mesh), model, runner


def test_steps_compute_what_the_dense_model_does(steps):
    """Compares the next token of the whole sequence so far, chunk by chunk, alone and in a batch."""
    steps, model, _ = steps
    reference = DenseReference(model, min_padded_tokens=128)
    for end in (32, 64, 96):
        expected = []
        for ids in steps.rows.token_ids[:, :end] if end != 64 else []:
            expected.append(int(reference.logits(ids)[-1].argmax()))
        for num_chunks in (3, 1):
            plan = steps.plan(num_chunks, end)
            plan.num_samples[0] = num_chunks
            plan.sample_tokens[:num_chunks] = 32 * np.arange(num_chunks) + 31
            step = steps.rows.whole(plan)
            ids = step.wait(step.launch()).token_ids[:num_chunks].tolist()
            assert not expected or ids == expected[:num_chunks]


def test_attention_alone_reads_the_pages_of_the_step(steps):
    """Every layer's output, over the whole context, is the next one's query: none can be left out."""
    steps, _, runner = steps
    for end in (32, 64, 96):
        steps.rows.whole(steps.plan(3, end)).sample_s(1)
    plan = steps.plan(3, 96)
    attention = steps.attention(plan)
    out = np.asarray(attention.launch())
    length = 64 + 1  # keys that the second row's first query sees
    values = np.random.default_rng(0).standard_normal((96, 4, 32), np.float32)[32]
    for pool in runner.pools:
        keys = np.asarray(pool)[plan.page_indices[1]].reshape(96, 4, 32)[:length]
        k, v = (keys[:, i::2].repeat(2, axis=1) for i in (0, 1))  # two query heads per KV head
        weights = np.exp(np.einsum("hd,shd->hs", values, k) / 32**0.5)
        values = np.einsum("hs,shd->hd", weights, v) / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out[32], values, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"max_context_tokens": 63}, "--max_context_tokens is 63"),
        ({"max_context_tokens": 0}, "--max_context_tokens is 0"),
        ({"max_context_tokens": 4096}, "the model's 2048 positions"),
        ({"chunk_tokens": 48, "max_context_tokens": 480}, "cache.chunk_tokens is 48"),
        ({"output": "/nowhere/costs.json"}, "--output is '/nowhere/costs.json'"),
        ({"plot": "/nowhere/costs.png"}, "--plot is '/nowhere/costs.png'"),
        ({"plot": "costs.exe"}, "--plot is 'costs.exe'"),
    ],
)
def test_refused_before_anything_is_loaded(launch, monkeypatch, flags, says):
    monkeypatch.setattr(
        load("pensieve_jax.commands.profile_steps"), "make_runner", lambda *_, **__: pytest.fail("loaded")
    )
    with pytest.raises(ConfigError, match=says):
        launch("profile", shared_llm=False, **flags)


def test_without_matplotlib_it_says_so_first(launch, monkeypatch, tmp_path):
    monkeypatch.setattr(
        load("pensieve_jax.commands.profile_steps"), "make_runner", lambda *_, **__: pytest.fail("loaded")
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        launch("profile", shared_llm=False, plot=tmp_path / "costs.png")
