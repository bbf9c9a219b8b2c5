"""Text halves of multimodal checkpoints: published options, names of tensors, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model_defs import (
    CheckpointError,
    ModelConfig,
    RopeConfig,
    UnsupportedModelError,
    load_model,
    make_mesh,
    num_parameters,
    preset,
)
from model_defs.hf_config import parse_hf_config
from model_defs.multimodal import MULTIMODAL
from tests.models.helpers import GOLDEN, dense_logits, golden
from tests.models.test_hf_config import without

QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "image_token_id": 151655,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "model_type": "qwen2_5_vl"},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
QWEN3_VL_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "qwen3_vl"},
}
MISTRAL_SMALL_3_1: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}

MINISTRAL3_8B: dict[str, Any] = MISTRAL_SMALL_3_1 | {
    "dtype": "bfloat16",
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "vocab_size": 131072,
    },
}

INTERNVL3_8B: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "text_config": {
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151674,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "internvl_vision"},
}
SMOLVLM2_2B: dict[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 130000,
        "vocab_size": 49280,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "smolvlm_vision"},
}
LLAVA_7B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "clip_vision_model"},
}


def changed(values: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the config with options of the text half replaced; `is_tied` is that of both halves."""
    tied = options.pop("is_tied", None)
    outer = {} if tied is None else {"tie_word_embeddings": tied}
    if "text_config" in values:
        return values | outer | {"text_config": values["text_config"] | outer | options}
    return values | outer | options


def sizes(layers: int, hidden: int, wide: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }


PUBLISHED = {
    "Qwen2.5-VL-3B": (
        changed(QWEN2_5_VL_7B, **sizes(36, 2048, 11008, 16, 2, vocab_size=151936), is_tied=True),
        3.09,
    ),
    "Qwen2.5-VL-7B": (QWEN2_5_VL_7B, 7.62),
    "Qwen2.5-VL-72B": (changed(QWEN2_5_VL_7B, **sizes(80, 8192, 29568, 64, 8)), 72.71),
    "Qwen3-VL-2B": (changed(QWEN3_VL_4B, **sizes(28, 2048, 6144, 16, 8)), 1.72),
    "Qwen3-VL-4B": (QWEN3_VL_4B, 4.02),
    "Qwen3-VL-8B": (changed(QWEN3_VL_4B, **sizes(36, 4096, 12288, 32, 8), is_tied=False), 8.19),
    "Qwen3-VL-32B": (changed(QWEN3_VL_4B, **sizes(64, 5120, 25600, 64, 8), is_tied=False), 32.76),
    "Mistral-Small-3.1-24B": (MISTRAL_SMALL_3_1, 23.57),
    "InternVL3-8B": (changed(INTERNVL3_8B, rope_scaling=None), 7.61),
    "InternVL3.5-8B": (
        changed(
            INTERNVL3_8B,
            **sizes(36, 4096, 12288, 32, 8, head_dim=128, vocab_size=151936),
            model_type="qwen3",
            rope_scaling=None,
        ),
        8.19,
    ),
    "SmolVLM2-2.2B": (SMOLVLM2_2B, 1.81),
    "Llava-1.5-7B": (LLAVA_7B, 6.74),
    "Ministral-3-3B": (changed(MINISTRAL3_8B, **sizes(26, 3072, 9216, 32, 8), is_tied=True), 3.43),
    "Ministral-3-8B": (MINISTRAL3_8B, 8.49),
    "Ministral-3-14B": (changed(MINISTRAL3_8B, **sizes(40, 5120, 16384, 32, 8)), 13.51),
}
"""config.json as published, and billions of parameters of the text half."""


def as_saved_now(values: dict[str, Any]) -> dict[str, Any]:
    """Return the config as transformers 5 writes it."""
    text = dict(values.get("text_config", values))
    if "rope_parameters" in text:  # a model of this version
        return values
    rope = text.pop("rope_scaling", None) or {"rope_type": "default"}
    rope = {key: "default" if value == "mrope" else value for key, value in rope.items()}
    text["rope_parameters"] = rope | {"rope_theta": text.pop("rope_theta", 10000.0)}
    if "text_config" not in values:
        text["model_type"] = MULTIMODAL[values["architectures"][0]].text_type
    outer = {key: values[key] for key in ("architectures", "model_type", "vision_config")}
    tied = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
    return outer | tied | {"dtype": "bfloat16", "text_config": text}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_text_halves(name: str) -> None:
    values, billions = PUBLISHED[name]
    config = parse_hf_config(values)
    assert num_parameters(config) / 1e9 == pytest.approx(billions, rel=0.002)
    assert parse_hf_config(as_saved_now(values)) == config
    assert config.dtype == "bfloat16" and not config.layer_kinds


def test_the_text_half_is_a_plain_model_of_its_family() -> None:
    assert parse_hf_config(QWEN2_5_VL_7B) == preset("qwen2.5-7b", max_position_embeddings=128000)
    larger = parse_hf_config(PUBLISHED["Qwen3-VL-8B"][0])
    theta = RopeConfig(theta=5e6)
    assert larger == preset("qwen3-8b", max_position_embeddings=262144, ropes=(theta,))
    assert parse_hf_config(MISTRAL_SMALL_3_1) == preset("mistral-small-24b")
    assert parse_hf_config(MINISTRAL3_8B) == preset("ministral3-8b")


def test_missing_options_have_the_defaults_of_transformers() -> None:
    """They differ from those of the plain models."""
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")

    def bare(values: dict[str, Any]) -> ModelConfig:
        text = values.get("text_config", values)
        outer = {key: values[key] for key in ("architectures", "model_type")}
        return parse_hf_config(outer | {"text_config": {key: text[key] for key in required}})

    config = bare(changed(QWEN2_5_VL_7B, num_attention_heads=56))
    assert (config.num_kv_heads, config.norm_eps, config.ropes[0].theta) == (8, 1e-5, 1e6)
    assert (config.bos_token_id, config.eos_token_ids) == (151643, (151645,))
    assert config.max_position_embeddings == 32768 and not config.tie_word_embeddings
    config = bare(QWEN3_VL_4B)
    assert (config.num_kv_heads, config.head_dim, config.ropes[0].theta) == (32, 128, 5e5)
    assert (config.max_position_embeddings, config.eos_token_ids) == (128000, ())


def test_outer_options() -> None:
    """Tokens count where the text half has none; the outer tie and dtype win, as in transformers."""
    nothing = changed(QWEN3_VL_4B, eos_token_id=None) | {"eos_token_id": 7, "dtype": "float16"}
    config = parse_hf_config(nothing)
    assert (config.eos_token_ids, config.dtype, config.tie_word_embeddings) == ((7,), "float16", True)
    inner = changed(without(QWEN3_VL_4B, "dtype", "torch_dtype"), dtype="float16")
    assert parse_hf_config(inner).dtype == "float16"
    assert parse_hf_config(inner | {"torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert not parse_hf_config(QWEN3_VL_4B | {"tie_word_embeddings": False}).tie_word_embeddings


def test_a_window_is_that_of_the_text_half() -> None:
    windowed = changed(QWEN2_5_VL_7B, use_sliding_window=True, max_window_layers=20)
    assert [kind.window for kind in parse_hf_config(windowed).layer_kinds] == [None] * 20 + [32768] * 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            changed(MISTRAL_SMALL_3_1, model_type=["mistral"]),
            r"text_config has model_type=\['mistral'\], which is not supported in Mistral3ForCondition",
        ),
        (
            changed(MISTRAL_SMALL_3_1, model_type="mistral4"),
            "text_config has model_type='mistral4', which is not supported in Mistral3ForCondition.*; one",
        ),
        (INTERNVL3_8B, "rope_type='dynamic' is not supported"),
        (
            changed(LLAVA_7B, model_type="mistral"),
            "model_type='mistral', which is not .*Llava.*; one of 'llama'",
        ),
        (QWEN3_VL_4B | {"text_config": None}, "text_config=None must be an object"),
        (QWEN2_5_VL_7B | {"text_config": [1]}, r"text_config=\[1\] must be an object"),
        (
            QWEN3_VL_4B | {"architectures": ["Qwen3VLMoeForConditionalGeneration"]},
            "'Qwen3VLMoeForConditionalGeneration'.* is not supported; .* Mistral3ForConditionalGeneration",
        ),
        (QWEN3_VL_4B | {"model_type": "qwen3_vl_moe"}, "model_type='qwen3_vl_moe' is not supported"),
        (changed(QWEN2_5_VL_7B, rope_scaling={"type": "dynamic"}), "rope_type='dynamic'"),
        (
            changed(MISTRAL_SMALL_3_1, rope_scaling={"type": "mrope", "mrope_section": [1]}),
            "rope_type='mrope'",
        ),
        (QWEN3_VL_4B | {"quantization_config": {"quant_method": "hqq"}}, "quantized by HQQ are not"),
    ],
)
def test_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config(values)


def rewritten(variant: str, directory: Path, **prefixes: str) -> Path:
    """Copy a golden checkpoint with other prefixes: of the text half, of its head, and of the image half."""
    shutil.copytree(GOLDEN / variant, directory, dirs_exist_ok=True)
    tensors = {}
    for name, value in load_file(directory / "model.safetensors").items():
        short = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        short = short.removeprefix("text_model.")
        is_image = "vis" in short or short.startswith(("multi_modal_projector", "connector"))
        half = "head" if short == "lm_head.weight" else "image" if is_image else "text"
        tensors[prefixes.get(half, "") + short] = value
    save_file(tensors, directory / "model.safetensors")
    return directory


OLD = {
    "qwen2_5_vl": {"text": "model."},
    "qwen3_vl": {"text": "model.language_model.", "image": "model."},
    "mistral3": {"text": "language_model.model.", "head": "language_model."},
    "qwen3_in_internvl": {"text": "language_model.model.", "head": "language_model."},
    "llama_in_smolvlm": {"text": "model.text_model.", "image": "model."},
}
NEW = {"text": "model.language_model.", "image": "model."}


@pytest.mark.parametrize("variant", OLD)
def test_names_of_tensors_of_old_and_new_files(variant: str, tmp_path: Path) -> None:
    token_ids, expected = golden(variant)
    for index, prefixes in enumerate((OLD[variant], NEW)):
        directory = rewritten(variant, tmp_path / str(index), **prefixes)
        model = load_model(directory, dtype="float32", mesh=make_mesh(1))
        np.testing.assert_allclose(dense_logits(model, token_ids), expected, atol=1e-4, rtol=0)


def test_tensors_of_images_are_left_out_of_multimodal_models_only(tmp_path: Path) -> None:
    directory = rewritten("qwen2_5_vl", tmp_path, text="model.")
    config = json.loads((directory / "config.json").read_text())
    plain = config["text_config"] | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    plain["rope_parameters"].pop("mrope_section")
    (directory / "config.json").write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match=r"are not part of this model: 'visual\."):
        load_model(directory, mesh=make_mesh(1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("audio_tower.conv.weight", r"1 tensor\(s\) are not part of this model: 'audio_tower.conv.weight'"),
        ("model.language_model.norm.bias", "'model.language_model.norm.bias'"),
        ("language_model.model.norm.weight", "the same one of this model"),
    ],
)
def test_other_tensors_are_refused(name: str, message: str, tmp_path: Path) -> None:
    directory = rewritten("mistral3", tmp_path, **NEW)
    tensors = load_file(directory / "model.safetensors") | {name: np.zeros(24, np.float32)}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(directory, mesh=make_mesh(1))


def test_a_tensor_that_the_text_half_lacks_is_missing(tmp_path: Path) -> None:
    directory = rewritten("qwen3_vl", tmp_path, **NEW)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.language_model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) are missing: 'model.norm.weight'"):
        load_model(directory, mesh=make_mesh(1))


def test_a_quantized_text_half(tmp_path: Path) -> None:
    """Linear weights of the text half are codes in FP8 with a scale; those of the image half stay plain."""
    directory = Path(shutil.copytree(GOLDEN / "qwen3_vl", tmp_path / "codes"))
    codes, plain = {}, {}
    for name, weight in load_file(directory / "model.safetensors").items():
        codes[name] = plain[name] = weight
        if "_proj" in name and "visual" not in name:
            scale = np.float32(np.abs(weight.astype(np.float32)).max() / 448)
            codes[name] = (weight.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
            codes[name.replace("weight", "weight_scale_inv")] = np.full((1, 1), scale)
            plain[name] = codes[name].astype(np.float32) * scale
    expected = rewritten("qwen3_vl", tmp_path / "plain", **NEW)
    save_file(plain, expected / "model.safetensors")
    save_file(codes, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.visual.blocks.0.attn.qkv", "lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    models = [load_model(path, dtype="float32", mesh=make_mesh(1)) for path in (directory, expected)]
    token_ids, logits = golden("qwen3_vl")
    found, same = (dense_logits(model, token_ids) for model in models)
    np.testing.assert_array_equal(found, same)
    assert 1e-3 < np.abs(found - logits).max() < 1.0
