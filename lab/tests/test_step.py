"""Whole steps against their bounds: the arithmetic of bounds and traces, and a small run of everything."""

from __future__ import annotations

import dataclasses
import json

import pytest

from model_defs import LayerKind, preset
from pensieve_jax import ConfigError
from pensieve_jax.device import row_steps
from tests.launching import load

step_bounds = load("pensieve_lab.steps.bounds")
device_trace = load("pensieve_lab.steps.device_trace")
ceilings = load("pensieve_lab.steps.ceilings")

STEPS = {
    "model": "random:llama-tiny",
    "decodes": "4,1",
    "prompts": "40,16of40",
    "mixed": "4+12",
    "context_tokens": 40,
    "num_repeats": 2,
    "num_launches": 2,
    "num_serving": 4,
    "num_steps": 3,
    "ceiling_bytes": 2**20,
    "ceiling_matrix": 32,
    "chunk_tokens": 16,
}


@pytest.mark.parametrize("name", ["llama-tiny", "opt-tiny"])
def test_operations(name):
    """Bytes of weights, activations and KV cache, and two operations per multiply-add, of every layer."""
    model = preset(name)
    rows = [row_steps.StepRow(0, 9, 10), row_steps.StepRow(1, 2, 5)]
    token_bytes = 3 * model.num_layers * 2 * model.num_kv_heads * model.head_dim  # 3 for a number
    sizes = {"num_samples": 2, "bytes_per_number": 2, "kv_token_bytes": token_bytes, "num_devices": 1}
    found = {one.name: one for one in step_bounds.operations(model, rows, **sizes)}
    width, inner, num_layers = model.hidden_size, model.intermediate_size, model.num_layers
    num_gates = 2 if name == "llama-tiny" else 1
    assert found["mlp in"].flop == num_layers * 2 * 4 * width * num_gates * inner
    assert found["mlp out"].num_bytes == num_layers * 2 * (width * inner + 4 * (width + inner))
    assert found["logits"].flop == 2 * 2 * model.embed_width * model.vocab_size
    pairs = 10 + (3 + 4 + 5)  # queries with the keys they see
    assert found["attention"].flop == num_layers * pairs * 4 * model.num_heads * model.head_dim
    state = (10 + 5) * 2 * model.num_kv_heads * model.head_dim
    queries_and_answers = 2 * 4 * model.num_heads * model.head_dim
    assert found["attention"].num_bytes == num_layers * (3 * state + 2 * queries_and_answers)
    halves = step_bounds.operations(model, rows, **sizes | {"num_devices": 2})
    assert [one.flop for one in halves] == [one.flop // 2 for one in found.values()]


@pytest.mark.parametrize("window", [1, 4, 7, 12, 20, 40])
@pytest.mark.parametrize(("begin", "end"), [(0, 20), (9, 10), (10, 20), (19, 20)])
def test_attention_within_windows(begin, end, window):
    """Half of the layers see and read at most their window; keys of each query are counted one by one."""
    kinds = (LayerKind(window=window), LayerKind()) * 2
    model = dataclasses.replace(preset("llama-tiny"), num_layers=4, layer_kinds=kinds)
    seen = [[set(range(max(i + 1 - of, 0), i + 1)) for i in range(begin, end)] for of in (window, end)]
    sizes = {"num_samples": 0, "bytes_per_number": 2, "kv_token_bytes": 4 * 10, "num_devices": 1}
    rows = [row_steps.StepRow(0, begin, end)]
    found = {one.name: one for one in step_bounds.operations(model, rows, **sizes)}["attention"]
    width = model.num_heads * model.head_dim
    assert found.flop == 2 * 4 * width * sum(len(keys) for layer in seen for keys in layer)
    num_read = sum(len(set().union(*layer)) for layer in seen)
    assert found.num_bytes == 2 * 10 * num_read + 4 * 2 * (end - begin) * width * 2


def test_operations_of_experts_in_8_bits():
    """Weights take half, activations and the router what they did."""
    model, rows = preset("qwen3-30b-a3b"), [row_steps.StepRow(0, 0, 32)]
    sizes = {"num_samples": 0, "bytes_per_number": 2, "kv_token_bytes": 0, "num_devices": 1}
    wide, narrow = (
        {one.name: one for one in step_bounds.operations(model, rows, **sizes, bytes_per_weight=size)}
        for size in (None, 1)
    )
    assert wide["router"] == narrow["router"]
    for name, numbers in (("experts in", 2048 + 2 * 768), ("experts out", 768 + 2048)):
        activations = 48 * 2 * 32 * 8 * numbers
        assert wide[name].num_bytes - activations == 2 * (narrow[name].num_bytes - activations)
        assert wide[name].flop == narrow[name].flop


def test_operations_of_experts():
    """A step reads the experts that it chooses: about 112 of 128 for 32 tokens, all of them for many."""
    model = preset("qwen3-30b-a3b")
    sizes = {"num_samples": 0, "bytes_per_number": 2, "kv_token_bytes": 0, "num_devices": 1}
    expert = 2 * 3 * model.hidden_size * model.experts.width
    for num_tokens, num_read in ((1, 8), (32, 111.78), (2048, 128)):
        rows = [row_steps.StepRow(0, 0, num_tokens)]
        found = {one.name: one for one in step_bounds.operations(model, rows, **sizes)}
        assert not {"mlp in", "mlp out"} & set(found)
        weights = found["experts in"].num_bytes + found["experts out"].num_bytes
        weights -= 48 * num_tokens * 8 * 2 * (2 * model.hidden_size + 3 * model.experts.width)
        assert weights == pytest.approx(48 * num_read * expert, rel=1e-4)
        flop = found["experts in"].flop + found["experts out"].flop
        assert flop == 48 * num_tokens * 8 * expert
        assert found["router"].num_bytes > 48 * 2 * 128 * 2048
    some = dataclasses.replace(model, layer_kinds=(LayerKind(), LayerKind(mlp="moe")) * 24)
    found = {one.name: one for one in step_bounds.operations(some, rows, **sizes)}
    assert found["mlp out"].flop == 24 * 2 * 2048 * 6144 * 2048
    assert found["experts in"].flop + found["experts out"].flop == flop // 2


def test_the_bound_is_what_limits_each_operation():
    limits = ceilings.Ceilings(read_bytes_per_s=100.0, copy_bytes_per_s=1.0, flop_per_s=1000.0)
    memory, arithmetic = step_bounds.Operation("a", 200, 1000), step_bounds.Operation("b", 10, 3000)
    assert step_bounds.bound_s([memory, arithmetic], limits) == 2 + 3


def test_idle_time_of_a_trace():
    """Idle time lies between kernels that do not overlap."""
    runs = [("a", 0, 10), ("b", 5, 10), ("a", 20, 10), ("c", 22, 2), ("a", 31, 9)]
    found = device_trace.summary([device_trace.Kernel(*one) for one in runs], num_steps=2)
    assert found["span_s"] == pytest.approx(20e-9) and found["idle_s"] == pytest.approx(3e-9)
    assert found["longest_gap_s"] == pytest.approx(5e-9) and found["num_kernels"] == 2.5
    assert next(iter(found["kernels_s"].items())) == ("a", pytest.approx(14.5e-9))
    assert device_trace.summary([], num_steps=2) == {}
    assert device_trace.trace_kernels(lambda: None) == []


def test_a_trace_is_of_as_many_steps_as_were_launched(monkeypatch):
    benchmark_step = load("benchmark_step")
    kernels = []

    def launch():
        kernels.append(device_trace.Kernel("a step", 10.0 * len(kernels), 10.0))

    def trace_kernels(run):
        run()
        return kernels

    monkeypatch.setattr(benchmark_step, "trace_kernels", trace_kernels)
    found = benchmark_step.traced(row_steps.Timed(launch, lambda _: None))
    assert len(kernels) > 1 == found["num_kernels"]
    assert found["span_s"] == pytest.approx(10e-9)


@pytest.mark.long
def test_steps(launch, compilation_cache, capsys):
    """Every case is there, in the smallest bucket that holds it; the crowd is timed at its own contexts."""
    launch("benchmark_step", shared_llm=False, compilation_cache_dir=compilation_cache, trace=True, **STEPS)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    expected = {"decode 4 x 40": (4, 16), "decode 1 x 40": (1, 16), "prompt of 40": (40, 48)}
    expected |= {"prompt of 16 of 40": (16, 16), "decode 4 x 40 + prompt of 12": (16, 16)}
    assert {name: (one["num_tokens"], one["bucket"]) for name, one in found["steps"].items()} == expected
    for one in found["steps"].values():
        assert one["bound_s"] == pytest.approx(sum(one["operations_s"].values()))
        assert one["share_of_bound"] == pytest.approx(one["bound_s"] / one["step_s"]["median"])
        assert one["dispatch_s"] > 0 and one["trace"] == {}  # a GPU's
    assert len(found["sampling"]) == 8 and found["sampling"]["no sampler"]["extra"] == 0
    serving = found["serving"]
    assert serving["wait_s"]["num_values"] == 5 and serving["engine_step_s"]["num_values"] == 5
    assert serving["num_sequences"] == 4 and 40 < serving["mean_context_tokens"] < 70


@pytest.mark.long
def test_decodes_alone(launch, compilation_cache, capsys):
    """The engine needs a larger bucket than decodes do, which they do not use."""
    alone = STEPS | {"prompts": "", "mixed": "", "num_serving": 0, "num_layer_groups": 1}
    alone |= {"compilation_cache_dir": compilation_cache}
    launch("benchmark_step", shared_llm=False, **alone)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert {one["bucket"] for one in found["steps"].values()} == {16} and "serving" not in found


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"decodes": "4,x"}, "--decodes is '4,x'"),
        ({"prompts": "0"}, "--prompts is '0'"),
        ({"prompts": "512of500"}, "--prompts is '512of500'"),
        ({"prompts": "5of6of7"}, "--prompts is '5of6of7'"),
        ({"mixed": "128"}, "--mixed is '128'"),
        ({"mixed": "0+12"}, "--mixed is '0,12'"),
        ({"decodes": "", "prompts": "", "mixed": ""}, "at least one case"),
        ({"gpu_pages": 100}, "--gpu_pages is 100.*left out"),
        ({"gpu_memory_fraction": 0.5}, "--gpu_memory_fraction is 0.5.*left out"),
    ],
)
def test_refused_before_anything_is_loaded(launch, monkeypatch, flags, says):
    monkeypatch.setattr(load("benchmark_step"), "open_parts", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=says):
        launch("benchmark_step", shared_llm=False, **STEPS | flags)
