"""Decoded weights are bit-equal to those of the formats' own libraries, in float32 and in bfloat16.

Whole models are as their library saves them; their logits are what transformers computes of decoded weights.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from model_defs import load_model, make_mesh
from model_defs.parameters import named_parameters
from model_defs.quantized import parse_format
from model_defs.quantized.source import Source
from model_defs.safetensors_reader import read_header
from tests.models.helpers import dense_logits

GOLDEN = Path(__file__).parents[1] / "golden_quantized"
VARIANTS = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
MODELS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
BLOCKS = {"float_block", "fp8_block", "fp8_block_cut", "fp8_block_powers"}


def source_of(variant: str) -> tuple[Source, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return the source of a variant's weight, its tensors, and the weight in float32 and in bfloat16."""
    path = GOLDEN / f"{variant}.safetensors"
    with safe_open(path, "numpy") as file:
        config = json.loads(file.metadata()["quantization_config"])
    entries = {entry.name: entry for entry in read_header(path)}
    wide, half = (entries.pop(f"expected.{dtype}").read() for dtype in ("float32", "bfloat16"))
    quantized = parse_format({"quantization_config": config})
    assert quantized is not None
    source = quantized.source("layer" if variant == "mxfp4" else "layer.weight", wide.shape, entries)
    assert source is not None
    for part in source.parts:
        entries[part.name].check_readable(part.dtypes)
        assert entries[part.name].shape == part.shape
    assert {part.name for part in source.parts}.union(source.others) == entries.keys()
    return source, {part.name: entries[part.name].read(part.dtypes) for part in source.parts}, wide, half


def test_every_variant_is_there() -> None:
    assert MODELS == ["llama_pack_int4_zeros", "qwen3_float_channel"]
    assert len(VARIANTS) == 21 and {*BLOCKS, "awq", "gptq_int4", "gptq_int4_act_order", "mxfp4"} < {*VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_those_of_the_library(variant: str) -> None:
    source, tensors, wide, half = source_of(variant)
    assert len(np.unique(wide)) > 100  # a weight that is all alike would agree with much
    for dtype, expected in ((jnp.float32, wide), (jnp.bfloat16, half)):
        decode = jax.jit(lambda arrays, dtype=dtype: source.decode(*arrays).astype(dtype))
        found = np.asarray(decode([tensors[part.name] for part in source.parts]))
        bits = np.uint32 if dtype == jnp.float32 else np.uint16
        np.testing.assert_array_equal(found.view(bits), expected.view(bits))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    """As in the reference, weights are rounded to the checkpoint's bfloat16, and multiplied in float32."""
    with np.load(GOLDEN / name / "logits.npz") as arrays:
        token_ids, expected = arrays["input_ids"].astype(np.int32), arrays["logits"]
    model, wide = (load_model(GOLDEN / name, dtype=d, mesh=make_mesh(1)) for d in ("auto", "float32"))
    for (_, rounded), (_, parameter) in zip(*map(named_parameters, (model, wide)), strict=True):
        parameter.set_value(rounded.get_value().astype(jnp.float32))
    assert expected.std() > 0.3
    np.testing.assert_allclose(dense_logits(wide, token_ids), expected, atol=1e-4, rtol=0)
