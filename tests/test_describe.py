"""`LLM.describe`: plain values that describe a started engine."""

from __future__ import annotations

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import ExpertsConfig, preset
from pallas_kernels import all_reduce
from pallas_kernels.ragged_paged_attention import BackendChoice
from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig, assembly
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.device import kernel_choices


def test_an_engine_describes_itself(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works before the first turn; nothing is compiled for this test."""
    monkeypatch.setattr(assembly.ModelRunner, "warm_up", lambda self, progress=None: None)
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=24, cpu_bytes=10**6, chunk_tokens=16, policy="lru"),
        scheduler=SchedulerConfig(max_num_running=4, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(num_layer_groups=1),
    )
    with (
        caplog.at_level(logging.INFO, logger="pensieve_jax.device.model_runner"),
        LLM("random:llama-tiny", config=config, progress=False) as llm,
    ):
        told = llm.describe()
        assert json.loads(json.dumps(told)) == told
        shown = str(told)
        llm.describe()["cache"].clear()
        assert llm.describe() == told, "a caller's changes are its own"
        page_bytes, weights_bytes = (llm.memory_analysis()[name] for name in ("page_bytes", "weights_bytes"))
    lines = shown.splitlines()
    words = [line.split() for line in lines]
    assert words[0] == ["model"] and ["policy", "lru"] in words and ["buckets", "64"] in words
    assert max(map(len, lines)) <= 110 and "{" not in shown
    model = told["model"]
    assert (model["name"], model["architecture"], model["dtype"]) == ("random:llama-tiny", "llama", "float32")
    assert model["num_layers"] == llm.model_config.num_layers
    assert model["windows"] == [None]
    assert model["num_parameters"] * 4 == model["weights_bytes"] == weights_bytes
    assert model["num_active_parameters"] == model["num_parameters"]
    assert told["device"] == {"platform": "cpu", "kind": "cpu", "count": 1}
    slots = 10**6 // page_bytes
    assert told["cache"] == {
        "stateful": True,
        "policy": "lru",
        "order": None,
        "chunk_tokens": 16,
        "kv_dtype": "float32",
        "page_bytes": page_bytes,
        "packed": "off: float32 is not packed, only bfloat16 is",
        "slot_bytes": page_bytes,
        **{"gpu_pages": 24, "gpu_bytes": 24 * page_bytes, "gpu_tokens": 24 * 16},
        **{"cpu_slots": slots, "cpu_bytes": slots * page_bytes, "cpu_tokens": 16 * slots},
        **{"cost_model": "analytic", "cost_profile": None, "cost_at_4096": 20.57},
        "summary": (
            f"KV cache: {24 * page_bytes / 2**20:.1f} MiB on the CPU (384 tokens), "
            f"{slots * page_bytes / 2**20:.1f} MiB in host memory ({16 * slots:,} tokens)"
        ),
        "cost_reason": "no profile is shipped, and CPUs are not measured",
    }
    limits = {"max_context_tokens": 384, "max_num_running": 4, "max_num_rows": 8, "num_layer_groups": 1}
    limits |= {"prompt_order": "work_left", "target_tpot_ms": None}
    assert told["steps"] == {"buckets": [64], **limits} and told["compilation_cache_dir"] is None
    assert told["kernels"].pop("all_reduce") is None, "one device"
    assert told["kernels"].pop("experts") is None, "none in this model"
    assert {name: chosen["backend"] for name, chosen in told["kernels"].items()} == dict.fromkeys(
        ("attention", "residual_norm", "decode_matmul", "sampling_cutoff", "page_copy"), "xla"
    )
    attention = told["kernels"]["attention"]["reason"]
    assert "float32 on cpu; not pallas_mosaic_gpu: " in attention
    assert caplog.text.count(f"attention back end: xla ({attention})") == 1, "said once, for all buckets"
    assert "needs an NVIDIA GPU" in told["kernels"]["page_copy"]["reason"]


class H200:
    platform, device_kind, compute_capability, local_hardware_id = "gpu", "NVIDIA H200", "9.0", 0


class TwoH200:
    """The part of a mesh that the choices use."""

    devices = np.array([H200(), H200()], object)


def test_choices_depend_on_the_mesh_and_on_one_shard() -> None:
    """They do not use the first device, which is not a GPU here."""
    assert jax.devices()[0].platform == "cpu"
    model = preset("llama2-13b-gqa10")
    found = kernel_choices.choose_kernels(model, EngineConfig(), np.dtype("float16"), TwoH200())
    heads = "20 query heads on 5 KV heads of 128 in float16"
    assert found.attention == BackendChoice(
        "pallas_mosaic_gpu", f"the fastest that serves {heads} on NVIDIA H200"
    )
    assert found.residual_norm.name == found.sampling_cutoff.name == "pallas_triton"
    assert "5120 elements on NVIDIA H200" in found.residual_norm.reason and found.page_copy is None
    named = EngineConfig(runner=RunnerConfig(attention_backend="xla"), cache=CacheConfig(cpu_pages=4))
    found = kernel_choices.choose_kernels(model, named, np.dtype("float16"), TwoH200())
    assert found.attention == BackendChoice("xla", "named in runner.attention_backend")
    assert found.page_copy is not None and found.page_copy.name == "pallas_triton"


class OneH200(TwoH200):
    devices = np.array([H200()], object)


@pytest.mark.parametrize(
    ("dtype", "runner", "mesh", "expected"),
    [
        ("bfloat16", {}, OneH200, ("pallas_mosaic_gpu", "up to 128 rows of bfloat16 on NVIDIA H200")),
        ("float32", {}, OneH200, ("xla", "multiplies bfloat16, not float32")),
        ("bfloat16", {}, TwoH200, ("pallas_mosaic_gpu", "up to 128 rows of bfloat16 on NVIDIA H200")),
        ("bfloat16", {"decode_matmul": "xla"}, OneH200, ("xla", "named in runner.decode_matmul")),
    ],
)
def test_the_description_names_the_small_batch_kernel(dtype, runner, mesh, expected) -> None:
    model, config = preset("llama2-13b-gqa10"), EngineConfig(runner=RunnerConfig(**runner))
    found = kernel_choices.choose_kernels(model, config, jnp.dtype(dtype), mesh()).decode_matmul
    assert (found.name, expected[1] in found.reason) == (expected[0], True), found


@pytest.mark.parametrize(
    ("dtype", "runner", "mesh", "expected"),
    [
        ("bfloat16", {}, OneH200, ("pallas_mosaic_gpu", "experts of width 768 of bfloat16 on NVIDIA H200")),
        ("bfloat16", {}, TwoH200, ("pallas_mosaic_gpu", "experts of width 384")),
        ("float32", {}, OneH200, ("xla", "multiplies bfloat16, not float32")),
        ("bfloat16", {"expert_matmul": "xla"}, OneH200, ("xla", "named in runner.expert_matmul")),
    ],
)
def test_the_description_names_the_kernel_of_experts(dtype, runner, mesh, expected) -> None:
    model, config = preset("qwen3-30b-a3b"), EngineConfig(runner=RunnerConfig(**runner))
    found = kernel_choices.choose_kernels(model, config, jnp.dtype(dtype), mesh())
    assert (found.experts.name, expected[1] in found.experts.reason) == (expected[0], True), found
    narrow = preset("qwen3-30b-a3b", experts=ExpertsConfig(128, 8, 2 * 48))
    found = kernel_choices.choose_kernels(narrow, EngineConfig(), jnp.dtype("bfloat16"), TwoH200())
    assert found.experts.name == "xla" and "an expert's width on a device is 48" in found.experts.reason


@pytest.mark.parametrize(
    ("runner", "limit", "expected"),
    [
        ({}, None, ("jax_triton", "the fastest that serves 2 devices of NVIDIA H200")),
        ({}, "it needs the extra", ("xla", "it needs the extra")),
        ({"all_reduce": "xla"}, None, ("xla", "named in runner.all_reduce")),
    ],
)
def test_the_description_names_the_all_reduce(runner, limit, expected, monkeypatch) -> None:
    monkeypatch.setattr(all_reduce, "devices_limit", lambda devices: limit)
    model, config = preset("llama2-13b-gqa10"), EngineConfig(runner=RunnerConfig(**runner))
    found = kernel_choices.choose_kernels(model, config, jnp.dtype("bfloat16"), TwoH200()).all_reduce
    assert found == BackendChoice(*expected)


def test_all_reduces_that_are_too_wide_are_skipped_or_refused(monkeypatch) -> None:
    monkeypatch.setattr(all_reduce, "devices_limit", lambda devices: None)
    model = preset("llama2-13b-gqa10", hidden_size=32768)
    found = kernel_choices.choose_kernels(model, EngineConfig(), jnp.dtype("bfloat16"), TwoH200()).all_reduce
    assert found is not None and found.name == "xla" and "at most 32768 bytes" in found.reason
    named = EngineConfig(runner=RunnerConfig(all_reduce="jax_triton"))
    with pytest.raises(ConfigError, match=r"runner\.all_reduce is 'jax_triton', but must be 'auto' or 'xla'"):
        kernel_choices.choose_kernels(model, named, jnp.dtype("bfloat16"), TwoH200())


NARROW_HEADS = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}


def test_an_unused_kernel_is_not_named() -> None:
    model, dtype = preset("llama-tiny"), jnp.dtype("bfloat16")
    found = kernel_choices.choose_kernels(model, EngineConfig(), dtype, OneH200()).decode_matmul
    assert found.name == "xla" and "none of this model" in found.reason


@pytest.mark.parametrize(
    ("changes", "sums", "name"),
    [
        ({}, "auto", "pallas_mosaic_gpu"),
        ({}, "xla", "pallas_mosaic_gpu"),
        # Only the MLP's second projection is wide enough, before an all-reduce.
        ({"intermediate_size": 128, **NARROW_HEADS}, "auto", "pallas_mosaic_gpu"),
        ({"intermediate_size": 128, **NARROW_HEADS}, "xla", "xla"),
        ({"intermediate_size": 64, **NARROW_HEADS}, "auto", "xla"),
    ],
)
def test_products_whose_biases_the_all_reduce_adds(changes, sums, name, monkeypatch) -> None:
    monkeypatch.setattr(all_reduce, "devices_limit", lambda devices: None)
    model, config = preset("opt-13b", **changes), EngineConfig(runner=RunnerConfig(all_reduce=sums))
    found = kernel_choices.choose_kernels(model, config, jnp.dtype("bfloat16"), TwoH200())
    assert found.decode_matmul.name == name, found
    assert name != "xla" or "their sizes do not fit, or they have a bias" in found.decode_matmul.reason


@pytest.mark.parametrize(("mlp_bias", "name"), [(True, "pallas_mosaic_gpu"), (False, "xla")])
def test_a_gated_product_with_a_bias_counts_with_twice_the_columns(mlp_bias, name) -> None:
    """It is the only projection that is wide enough."""
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, **NARROW_HEADS}
    model = preset("llama2-7b", mlp_bias=mlp_bias, **sizes)
    config = EngineConfig(runner=RunnerConfig(all_reduce="xla"))
    found = kernel_choices.choose_kernels(model, config, jnp.dtype("bfloat16"), TwoH200())
    assert found.decode_matmul.name == name, found
