"""A quantized checkpoint is the model of its plain twin: weights are equal, bit by bit, and so are logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model_defs import (
    CheckpointError,
    UnsupportedModelError,
    hf_weights,
    load_config,
    load_model,
    make_mesh,
    model_fingerprint,
    preset,
    weights_digest,
)
from model_defs.hf_config import hf_config
from model_defs.tensor_recipes import gated_mlp_recipes
from tests.launching import load
from tests.models.helpers import dense_logits
from tests.models.quantized.checkpoints import CONFIGS, checkpoints, parameters_of, tensors_of, write
from tests.models.quantized.encoders import FORMATS
from tests.models.quantized.test_decoders import source_of, stored

convert = load("scripts.convert_checkpoint").convert
_SHORT = ("fp8_blocks", "pack_int4_zeros", "gptq_int4_order")
IN_SHORT = [pytest.param(name, marks=[] if name in _SHORT else pytest.mark.long) for name in FORMATS]
TOKEN_IDS = np.random.default_rng(5).integers(0, 320, 40).astype(np.int32)


def assert_equal_models(quantized: Path, plain: Path, tp: int = 1, dtype: str = "auto") -> None:
    mesh = make_mesh(tp)
    models = [load_model(source, dtype=dtype, mesh=mesh) for source in (quantized, plain)]
    found, expected = map(parameters_of, models)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == found[name].dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "llama") for name in FORMATS),
        *(pytest.param(name, "qwen3", marks=pytest.mark.long) for name in FORMATS),
    ],
)
def test_weights_are_those_of_the_plain_checkpoint(name: str, family: str, tmp_path: Path) -> None:
    assert_equal_models(*checkpoints(tmp_path, name, CONFIGS[family]))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("fp8_blocks", "qwen3"),
        ("gptq_int4", "llama"),
        *(
            pytest.param(name, family, marks=pytest.mark.long)
            for name in FORMATS
            for family in ("llama", "qwen3")
            if (name, family) not in (("fp8_blocks", "qwen3"), ("gptq_int4", "llama"))
        ),
    ],
)
def test_logits_are_those_of_the_plain_checkpoint(name: str, family: str, tmp_path: Path) -> None:
    sources = checkpoints(tmp_path, name, CONFIGS[family])
    found, expected = (dense_logits(load_model(one, mesh=make_mesh(1)), TOKEN_IDS) for one in sources)
    assert expected.std() > 0.3
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", IN_SHORT)
def test_two_devices_hold_the_weights_of_one(name: str, tmp_path: Path) -> None:
    """Groups of 32 divide the 64 inputs of half an output projection, and not the 80 of half an MLP."""
    config = dataclasses.replace(CONFIGS["llama"], intermediate_size=160)
    assert_equal_models(*checkpoints(tmp_path, name, config), tp=2)


@pytest.mark.parametrize("name", ["awq", "gptq_int4_order", "pack_int4_zeros"])
def test_layers_with_biases_over_several_files(name: str, tmp_path: Path) -> None:
    assert_equal_models(*checkpoints(tmp_path, name, CONFIGS["qwen2"], num_files=3))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["fp8_blocks", "gptq_int4_order", "pack_int4_zeros"])
def test_tensors_that_hold_several_are_cut_after_decoding(name: str, tp: int, tmp_path: Path) -> None:
    assert_equal_models(*checkpoints(tmp_path, name, CONFIGS["phi3"]), tp=tp)


@pytest.mark.parametrize("name", ["fp8_tensor", "awq", "gptq_int8_v2"])
def test_layers_may_be_plain(name: str, tmp_path: Path) -> None:
    assert_equal_models(
        *checkpoints(
            tmp_path, name, CONFIGS["llama"], plain=("embed_tokens", "lm_head", "layers.1.", "q_proj")
        )
    )


@pytest.mark.parametrize("name", ["gptq_int4", "fp8_tensor"])
def test_heads_and_tables_may_be_quantized(name: str, tmp_path: Path) -> None:
    """Tools leave tables of tokens alone, but FP8's layers and tables have the same form."""
    plain = [] if name == "fp8_tensor" else ["embed_tokens"]
    sources = checkpoints(tmp_path, name, CONFIGS["llama"], plain=plain)
    for tp in (1, 2):
        assert_equal_models(*sources, tp=tp)


def test_the_text_half_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    stored, _ = tensors_of(CONFIGS["qwen3"], "pack_int4")
    source, plain = checkpoints(tmp_path, "pack_int4", CONFIGS["qwen3"])
    text = json.loads((source / "config.json").read_text())
    section = text.pop("quantization_config")
    section["ignore"] = ["lm_head", "re:.*visual.*"]
    values = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text | {"model_type": "qwen3_vl_text"},
        "tie_word_embeddings": False,
        "quantization_config": section,
    }
    tensors = {name.replace("model.", "model.language_model."): value for name, value in stored.items()}
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.zeros((4, 4), np.float32)
    assert_equal_models(write(tmp_path / "both", values, tensors), plain)


@pytest.mark.parametrize("layer", ["attn.c_proj", "mlp.c_fc"])
def test_packed_weights_of_a_transposed_layer_are_refused(layer: str, tmp_path: Path) -> None:
    """GPT-2 stores plain weights as [in, out], but GPTQ packs those of every model as [out, in]."""
    config = preset("gpt2-tiny", intermediate_size=128)  # so that both layers are square
    stored, twin = tensors_of(config, "gptq_int4", plain=("",))
    tensors, _ = FORMATS["gptq_int4"].encode(np.random.default_rng(1), (128, 128))
    stored |= {f"transformer.h.0.{layer}.{name}": value for name, value in tensors.items()}
    del stored[f"transformer.h.0.{layer}.weight"]
    values = hf_config(config) | {"quantization_config": FORMATS["gptq_int4"].config}
    says = rf"'h.0.{layer}.weight' is quantized \(GPTQ\), .* \[out, in\]; .* \[in, out\]"
    with pytest.raises(UnsupportedModelError, match=says):
        load_model(write(tmp_path / "packed", values, stored), mesh=make_mesh(1))
    load_model(write(tmp_path / "plain", hf_config(config), twin), mesh=make_mesh(1))


def test_products_are_rounded_once(tmp_path: Path) -> None:
    """With a float32 model the weights are the products themselves."""
    source, _ = checkpoints(tmp_path, "fp8_blocks", CONFIGS["llama"])
    wide = parameters_of(load_model(source, dtype="float32", mesh=make_mesh(1)))["layers.0.mlp.down.kernel"]
    half = parameters_of(load_model(source, mesh=make_mesh(1)))["layers.0.mlp.down.kernel"]
    assert (wide != half.astype(np.float32)).any()
    np.testing.assert_array_equal(wide.astype(ml_dtypes.bfloat16), half)


@pytest.mark.parametrize(
    "name", ["awq", *(pytest.param(name, marks=pytest.mark.long) for name in FORMATS if name != "awq")]
)
def test_a_converted_checkpoint_is_the_same_model(name: str, tmp_path: Path) -> None:
    source, plain = checkpoints(tmp_path, name, CONFIGS["qwen3"])
    convert(str(source), tmp_path / "converted", "auto")
    assert_equal_models(tmp_path / "converted", plain)
    assert_equal_models(tmp_path / "converted", plain, tp=2)
    config = load_config(source)
    assert load_config(tmp_path / "converted") == config
    assert model_fingerprint(config, tmp_path / "converted") == model_fingerprint(config, source)


def test_the_fingerprint_says_which_format(tmp_path: Path) -> None:
    """Equal files with another description are another model, and so are equal weights in another form."""
    config = CONFIGS["llama"]
    source, plain = checkpoints(tmp_path, "gptq_int4", config)
    digest, fingerprint = weights_digest(source), model_fingerprint(config, source)
    assert digest.endswith(":gptq-4-g32-v1") and ":" not in weights_digest(plain)
    values = json.loads((source / "config.json").read_text())
    values["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (source / "config.json").write_text(json.dumps(values))
    assert weights_digest(source) == digest.replace("v1", "v2")
    others = {model_fingerprint(config, source), model_fingerprint(config, plain), fingerprint}
    assert len(others) == 3


SIDE_FILES: dict[str, dict[str, Any]] = {
    "quant_config.json": {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
    "quantize_config.json": {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False},
}


@pytest.mark.parametrize(
    ("file", "name"), [("quant_config.json", "awq"), ("quantize_config.json", "gptq_int4")]
)
@pytest.mark.parametrize("is_in_config", [False, True])
def test_side_files_describe_a_format(file: str, name: str, is_in_config: bool, tmp_path: Path) -> None:
    source, plain = checkpoints(tmp_path, name, CONFIGS["llama"])
    if not is_in_config:
        (source / "config.json").write_text((plain / "config.json").read_text())
    (source / file).write_text(json.dumps(SIDE_FILES[file]))
    assert_equal_models(source, plain)


def test_compression_config_is_the_earlier_name(tmp_path: Path) -> None:
    source, plain = checkpoints(tmp_path, "int8_channel", CONFIGS["llama"])
    values = json.loads((source / "config.json").read_text())
    values["compression_config"] = values.pop("quantization_config") | {"quant_method": "sparseml"}
    (source / "config.json").write_text(json.dumps(values))
    assert_equal_models(source, plain)


def test_zero_biases_of_older_tools_are_left_out(tmp_path: Path) -> None:
    config, layer = CONFIGS["llama"], "model.layers.0.self_attn.k_proj."
    source, plain = checkpoints(tmp_path, "gptq_int4", config)
    stored, _ = tensors_of(config, "gptq_int4")
    bias = np.zeros(config.num_kv_heads * config.head_dim, np.float16)
    values = json.loads((source / "config.json").read_text())
    assert_equal_models(write(tmp_path / "zero", values, stored | {layer + "bias": bias}), plain)
    bias[-1] = 1
    with pytest.raises(CheckpointError, match=rf"1 tensor\(s\) are not part of this model: '{layer}bias'"):
        load_model(write(tmp_path / "not", values, stored | {layer + "bias": bias}), mesh=make_mesh(1))


def test_scales_of_activations_are_skipped_by_name(tmp_path: Path) -> None:
    config, layer = CONFIGS["llama"], "model.layers.0.self_attn.k_proj."
    source, plain = checkpoints(tmp_path, "int8_channel", config)
    stored, _ = tensors_of(config, "int8_channel")
    of_activations = {
        layer + "input_scale": np.ones(1, np.float32),
        layer + "input_zero_point": np.ones(1, np.int8),
    }
    values = json.loads((source / "config.json").read_text())
    assert_equal_models(write(tmp_path / "more", values, stored | of_activations), plain)
    with pytest.raises(CheckpointError, match=r"k_proj\.output_scale"):
        other = stored | {layer + "output_scale": np.ones(1, np.float32)}
        load_model(write(tmp_path / "other", values, other), mesh=make_mesh(1))


def test_codes_that_are_not_numbers_name_their_tensor(tmp_path: Path) -> None:
    config, name = CONFIGS["llama"], "model.layers.1.mlp.up_proj.weight"
    source, _ = checkpoints(tmp_path, "fp8_blocks", config)
    stored, _ = tensors_of(config, "fp8_blocks")
    stored[name].view(np.uint8)[0, 7] = 255
    values = json.loads((source / "config.json").read_text())
    with pytest.raises(
        CheckpointError, match=rf"tensor '{name}' .* has code 255 at element 7, .* NaN in e4m3"
    ):
        load_model(write(tmp_path / "nan", values, stored), mesh=make_mesh(1))


def test_a_list_of_groups_beyond_the_scales_is_refused(tmp_path: Path) -> None:
    config, name = CONFIGS["llama"], "model.layers.1.mlp.up_proj.g_idx"
    source, _ = checkpoints(tmp_path, "gptq_int4_order", config)
    stored, _ = tensors_of(config, "gptq_int4_order")
    stored[name][3] = 2
    values = json.loads((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"'{name}' .* names groups 0 to 2; there are 2, from 0"):
        load_model(write(tmp_path / "far", values, stored), mesh=make_mesh(1))


@pytest.mark.parametrize("name", IN_SHORT)
def test_decoding_takes_no_more_memory_than_fusing(name: str, tmp_path: Path) -> None:
    """A plain load has temporaries of one parameter; a decoded one in float32 would be twice that."""
    num_out, num_in = 512, 256
    tensors, _ = FORMATS[name].encode(np.random.default_rng(1), (num_out, num_in))
    entries = stored(tensors, tmp_path / "layer.safetensors")
    source = source_of(name, (num_out, num_in), entries)
    arrays = [entries[part.name].read(part.dtypes) for part in source.parts]
    config = preset("llama-tiny", hidden_size=num_in, intermediate_size=num_out)
    fuse = gated_mlp_recipes(config)["mlp.gate_up.kernel"].assemble
    sharding = NamedSharding(make_mesh(1), PartitionSpec())
    run = hf_weights._assembler(fuse, (source.decode,) * 2, np.dtype(ml_dtypes.bfloat16), sharding)
    memory = run.lower([arrays, arrays]).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.25 * 2 * (2 * num_out * num_in)


def test_tensors_are_split_at_whole_groups_and_words(tmp_path: Path) -> None:
    shape = (64, 128)
    tensors, _ = FORMATS["awq"].encode(np.random.default_rng(1), shape)
    source = source_of("awq", shape, stored(tensors, tmp_path / "layer.safetensors"))
    out, inputs, whole = PartitionSpec(None, "tp"), PartitionSpec("tp"), PartitionSpec()
    assert source.specs(shape, 0, 4) == [out] * 3
    assert source.specs(shape, 0, 16) == [whole] * 3  # four channels of each device are half a word
    assert source.specs(shape, 1, 4) == [inputs] * 3
    assert source.specs(shape, 1, 8) == [whole] * 3  # sixteen are half a group
    assert source.specs(shape, None, 4) == [whole] * 3
