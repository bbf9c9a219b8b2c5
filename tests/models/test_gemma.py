"""Gemma below float32: scales of norms and the factor of embeddings, and an engine that serves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from model_defs import load_config, load_model, make_mesh
from model_defs.parameters import named_parameters
from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SamplingParams, SchedulerConfig
from pensieve_jax.device.dense_reference import DenseReference
from tests.launching import load
from tests.models.helpers import GOLDEN

convert = load("scripts.convert_checkpoint").convert


def test_a_scale_is_one_plus_the_weight_in_float32() -> None:
    """In bfloat16, one plus a weight would lose bits of the weight."""
    directory = GOLDEN / "gemma3_ropes"
    model = load_model(directory, dtype="bfloat16", mesh=make_mesh(1))
    values = {name: parameter.get_value() for name, parameter in named_parameters(model)}
    dtypes = {name: value.dtype for name, value in values.items()}
    assert {str(dtype) for name, dtype in dtypes.items() if name.endswith("norm.scale")} == {"float32"}
    assert {str(dtype) for name, dtype in dtypes.items() if not name.endswith("norm.scale")} == {"bfloat16"}
    assert str(model.compute_dtype) == "bfloat16"
    names = {"layers.1.k_norm": "layers.1.self_attn.k_norm", "final_norm": "norm"}
    with safe_open(directory / "model.safetensors", framework="flax") as tensors:
        for ours, theirs in names.items():
            weight = tensors.get_tensor(f"model.{theirs}.weight").astype("float32")
            np.testing.assert_array_equal(values[f"{ours}.scale"], 1 + weight)
            assert (values[f"{ours}.scale"] != (1 + weight).astype("bfloat16")).any()


@pytest.mark.parametrize(("dtype", "factor"), [("float32", np.float32(24**0.5)), ("bfloat16", 4.90625)])
def test_the_factor_of_embeddings_is_rounded_to_the_dtype(dtype: str, factor: float) -> None:
    """In bfloat16, numbers near the root of 24 are 1/32 apart."""
    model = load_model(GOLDEN / "gemma2_window", dtype=dtype, mesh=make_mesh(1))
    ids = np.arange(5, dtype=np.int32)
    rows = np.asarray(model.embed.table.get_value()[:5], np.float32)
    np.testing.assert_array_equal(model.embed_tokens(ids, ids), rows * np.float32(factor))


def test_a_conversion_keeps_both_dtypes(tmp_path: Path) -> None:
    """The directory has the dtype of the model, whichever array comes first, and scales in float32."""
    source = GOLDEN / "gemma3_ropes"
    convert(str(source), tmp_path / "target", "bfloat16")
    assert load_config(tmp_path / "target") == load_config(source)
    models = [load_model(path, dtype="auto", mesh=make_mesh(1)) for path in (source, tmp_path / "target")]
    for (name, one), (_, other) in zip(*map(named_parameters, models), strict=True):
        assert one.get_value().dtype == other.get_value().dtype, name
        np.testing.assert_array_equal(one.get_value(), other.get_value(), err_msg=name)


def test_groups_of_layers_run_in_the_dtype_of_the_model() -> None:
    """The first array of a layer is a scale in float32; KV cache and layers are in bfloat16."""
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=4, cpu_pages=0, chunk_tokens=16),
        scheduler=SchedulerConfig(max_num_running=2, max_num_batched_tokens=32, token_buckets=(32,)),
        runner=RunnerConfig(num_layer_groups=2),
    )
    directory, prompt = GOLDEN / "gemma3_ropes", [5, 6, 7]
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with LLM(str(directory), dtype="bfloat16", config=config, progress=False) as llm:
        (output,) = llm.generate([prompt], params)
        assert llm.describe()["model"]["dtype"] == "bfloat16"
    reference = DenseReference(
        load_model(directory, dtype="bfloat16", mesh=make_mesh(1)), min_padded_tokens=48
    )
    replay = reference.replay_turn([], prompt, output.token_ids, params, margin=0.1)
    assert replay.possible.all(), (output.token_ids, replay)
