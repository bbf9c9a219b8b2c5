"""Descriptions of quantized formats as tools write them; what is not supported is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_defs import CheckpointError, UnsupportedModelError, load_model, make_mesh
from model_defs.hf_config import hf_config
from model_defs.quantized import parse_format, read_format
from tests.models.quantized.checkpoints import CONFIGS, checkpoints, tensors_of, write

Values = dict[str, Any]


def groups(layout: str = "pack-quantized", **weights: Any) -> Values:
    """Return a section of compressed-tensors with one group."""
    options = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": options | weights}},
        "ignore": ["lm_head"],
    }


GPTQ: Values = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ: Values = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8: Values = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
ACTIVATIONS: Values = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True, "observer": None
}  # fmt: skip
# As Qwen, DeepSeek, RedHatAI and TheBloke publish them.
PUBLISHED: list[tuple[Values, str]] = [
    (FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}, "fp8-128x128"),
    (FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, "fp8-128x128"),
    ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "fp8"),
    (
        groups(
            "float-quantized", num_bits=8, type="float", strategy="channel", group_size=None, dynamic=False
        )
        | {"kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.5},
        "compressed-tensors:Linear=F8_E4M3-8-1xall",
    ),
    (
        groups(
            "float-quantized",
            num_bits=8,
            type="float",
            strategy="block",
            block_structure=[128, 128],
            group_size=None,
        )
        | {"transform_config": {}, "sparsity_config": {}, "version": "0.11.0"},
        "compressed-tensors:Linear=F8_E4M3-8-128x128",
    ),
    (
        groups("int-quantized", num_bits=8, strategy="channel", group_size=None, observer="minmax")
        | {"quantization_status": "frozen"},
        "compressed-tensors:Linear=I8-8-1xall",
    ),
    (
        groups(actorder="weight", observer="minmax", observer_kwargs={}, block_structure=None, dynamic=False),
        "compressed-tensors:Linear=I8-4-1x128-packed",
    ),
    (
        groups(num_bits=8, strategy=None, group_size=-1, actorder=False),
        "compressed-tensors:Linear=I8-8-1xall-packed",
    ),
    (groups(actorder="static"), "compressed-tensors:Linear=I8-4-1x128-packed"),
    (groups(symmetric=False, strategy=None), "compressed-tensors:Linear=I8-4-1x128-packed-zeros"),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "a": groups(num_bits=8)["config_groups"]["group_0"] | {"format": "pack-quantized"},
                "b": {
                    "targets": ["re:.*down_proj"],
                    "format": "float-quantized",
                    "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                },
            },
        },
        "compressed-tensors:Linear=I8-8-1x128-packed;re:.*down_proj=F8_E4M3-8-allxall",
    ),
    (AWQ | {"modules_to_not_convert": None}, "awq-4-g128"),
    (AWQ | {"version": "GEMM", "group_size": -1}, "awq-4-gall"),
    (
        GPTQ
        | {"damp_percent": 0.1, "static_groups": False, "true_sequential": True, "model_name_or_path": None}
        | {"model_file_base_name": "model", "use_exllama": True, "exllama_config": {"version": 2}},
        "gptq-4-g128-v1",
    ),
    (
        {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2", "pack_dtype": "int32", "lm_head": False}
        | {"dynamic": {"-:.*gate": {}}, "meta": {"quantizer": ["gptqmodel:2.0.0"], "damp_percent": 0.01}},
        "gptq-8-g128-v2",
    ),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, "mxfp4"),
]


@pytest.mark.parametrize(("values", "digest"), PUBLISHED)
def test_published_descriptions_are_read(values: Values, digest: str) -> None:
    for where in ({"quantization_config": values}, {"text_config": {"quantization_config": values}}):
        found = parse_format(where)
        assert found is not None and found.digest() == digest


def test_activations_of_a_group_have_no_effect() -> None:
    values = groups(num_bits=8, type="float", strategy="channel", group_size=None)
    values["format"] = "float-quantized"
    found = parse_format({"quantization_config": values})
    values["config_groups"]["group_0"] |= {"input_activations": ACTIVATIONS, "output_activations": None}
    assert parse_format({"quantization_config": values}) == found


def test_plain_models_have_no_format() -> None:
    assert parse_format({}) is None
    assert parse_format({"quantization_config": None, "quantization": {}, "text_config": None}) is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"load_in_4bit": True}, "quantized by bitsandbytes are not supported; use .* AWQ or GPTQ"),
        ({"quant_method": "bitsandbytes"}, "quantized by bitsandbytes"),
        ({"quant_method": "hqq"}, "quantized by HQQ"),
        ({"quant_method": "aqlm"}, "quantized by AQLM"),
        ({"quant_method": "torchao"}, "quantized by torchao"),
        ({"quant_method": "gguf"}, "quantized by GGUF"),
        ({"quant_method": "nvfp4"}, "quantized by NVFP4"),
        ({"quant_method": "fbgemm_fp8"}, "quantized by FBGEMM FP8"),
        ({"quant_method": "modelopt"}, "quantized by ModelOpt .* version in compressed-tensors"),
        ({"quant_method": "auto-round"}, "quantized by auto-round .* export it in the format auto_gptq"),
        ({"quant_algo": "FP8"}, "quantized by ModelOpt"),
        ({"quant_method": "yaq"}, "quantized by yaq"),
        ({"bits": 4}, "quantized by an unnamed method"),
        ("awq", "quantization_config='awq' must be an object"),
        (GPTQ | {"bits": 3}, "bits=3: GPTQ of 3 bits is not supported, that of 4 and 8 is"),
        (GPTQ | {"bits": 2}, "GPTQ of 2 bits"),
        (GPTQ | {"bits": "4"}, "bits='4' must be an integer"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin': .* must be gptq or gptq_v2"),
        (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "format='gptq_v2'"),
        (GPTQ | {"is_marlin_format": True}, "packed for Marlin"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype='int64': words must be int32"),
        (GPTQ | {"group_size": 0}, "group_size=0 must be a positive integer, or -1"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic: options of single layers"),
        (GPTQ | {"desc_act": "no"}, "desc_act='no' must be true or false"),
        (GPTQ | {"rotation": "hadamard"}, "rotation='hadamard': a rotation"),
        (GPTQ | {"mystery": 1}, "mystery=1: unknown option, which may change the weights"),
        (AWQ | {"version": "gemv"}, "version='gemv': AWQ's version must be gemm"),
        (AWQ | {"version": "gemv_fast"}, "version='gemv_fast'"),
        (AWQ | {"backend": "llm-awq"}, "backend='llm-awq': the packing of llm-awq"),
        (AWQ | {"bits": 8}, "AWQ of 8 bits is not supported, that of 4 is"),
        (AWQ | {"w_bit": 8}, "bits=4 differs from w_bit=8, another name of the same option"),
        (AWQ | {"q_group_size": 64}, "group_size=128 differs from q_group_size=64, another name of the same"),
        (AWQ | {"zero_point": False}, "AWQ without zero points"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2': weights must be e4m3"),
        (FP8 | {"weight_block_size": [128]}, "must be a list of 2 positive integers"),
        (FP8 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme=.* a quantized KV cache is not"),
        (FP8 | {"expert_dtype": "fp4"}, "experts must be fp8"),
        (groups() | {"kv_cache_scheme": {"num_bits": 8}}, "a quantized KV cache is not supported"),
        (groups() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: sparse weights"),
        (groups("marlin-24"), "format='marlin-24': sparse weights"),
        (groups() | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config=.* a rotation"),
        (groups("nvfp4-pack-quantized", type="float", strategy="tensor_group"), "NVFP4"),
        (groups("mxfp4-pack-quantized", type="float"), "floats of four bits .*MXFP4"),
        (groups("mxfp8-quantized", type="float", num_bits=8), "format='mxfp8-quantized': the format must be"),
        (groups("dense"), "format='dense': the format must be one of"),
        (groups(num_bits=3), "num_bits=3, .* weights of 3 bits are not supported in this form"),
        (groups(num_bits=2), "weights of 2 bits"),
        (groups("int-quantized"), "num_bits=4, format='int-quantized'"),
        (groups(strategy="tensor_group"), "strategy='tensor_group'"),
        (groups(group_size=None), "group_size is missing: the strategy 'group' needs a pos"),
        (groups(group_size=-1), "group_size is -1: the strategy 'group' needs a positive integer"),
        (groups(group_size=0), "group_size=0 must be a positive integer, or -1"),
        (groups(group_size=0, strategy=None), "group_size=0 must be a positive integer, or -1"),
        (groups(strategy="channel"), "group_size=128: the strategy 'channel' does not use it"),
        (groups(strategy="tensor", group_size=32), "group_size=32: the strategy 'tensor' does not use it"),
        (groups(block_structure=[16, 16]), "block_structure=.16, 16.: the strategy 'group' does not use it"),
        (
            groups(strategy="channel", group_size=None, actorder="weight"),
            "actorder='weight': the strategy 'channel' does not use it",
        ),
        (groups(actorder="random"), "actorder='random': the order of groups must be group or dynamic or"),
        (groups(actorder=3), "actorder=3 must be a string, true or false"),
        (
            groups("int-quantized", num_bits=8, actorder="group"),
            "actorder='group': act order is not supported in int-quantized, it is in pack-quantized",
        ),
        (groups(strategy="tensor", group_size=None), "packed weights need scales for channels or groups"),
        (groups("float-quantized", type="float", num_bits=8, symmetric=False), "zero points of floats"),
        (
            groups("float-quantized", type="float", num_bits=8, strategy="block", group_size=None),
            "block_structure is missing",
        ),
        (groups(dynamic=True), "scales that are made at each step"),
        (groups(scale_fmt="x"), "scale_fmt='x': unknown option"),
        (groups() | {"quantization_status": "calibration"}, "quantization_status='calibration'"),
        (groups() | {"ignore": ["re:("]}, r"target 're:\(': it is not an expression"),
        (groups() | {"ignore": "lm_head"}, "ignore='lm_head' must be a list of names"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups is missing"),
    ],
)
def test_refused_by_name(values: Any, says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        parse_format({"quantization_config": values})


def test_formats_with_sections_of_their_own() -> None:
    mlx = {"bits": 4, "group_size": 64}
    with pytest.raises(UnsupportedModelError, match="quantization: checkpoints quantized by MLX"):
        parse_format({"quantization": mlx, "quantization_config": mlx})
    with pytest.raises(UnsupportedModelError, match="compression_config: config_groups is missing"):
        parse_format({"compression_config": {"format": "pack-quantized"}})
    with pytest.raises(UnsupportedModelError, match="2 times, and differently: awq-4-g128, gptq-4-g128-v1"):
        parse_format({"quantization_config": AWQ, "text_config": {"quantization_config": GPTQ}})


def test_side_files_must_agree(tmp_path: Path) -> None:
    source, _ = checkpoints(tmp_path, "awq", CONFIGS["llama"])
    side = source / "quant_config.json"
    side.write_text(json.dumps({"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}))
    with pytest.raises(UnsupportedModelError, match=r"AWQ \(awq-4-g32\), quant_config.json .* \(awq-4-g64\)"):
        read_format(source)
    side.write_text(json.dumps({"quant_method": "hqq", "w_bit": 4}))
    with pytest.raises(
        UnsupportedModelError, match=r"^quant_config.json: checkpoints quantized by HQQ are not supported"
    ):
        read_format(source)
    side.unlink()
    (source / "quantize_config.json").write_text(json.dumps(AWQ | {"group_size": 32}))
    found = read_format(source)
    assert found is not None and found.digest() == "awq-4-g32"
    (source / "quantize_config.json").write_text(json.dumps({"bits": 3, "group_size": 32}))
    with pytest.raises(UnsupportedModelError, match=r"^quantize_config.json: bits=3: GPTQ of 3 bits"):
        read_format(source)
    (source / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds hf_quant_config\.json: .* by ModelOpt are not"):
        read_format(source)


LAYER = "model.layers.0.mlp.down_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def load_groups(path: Path, *named: tuple[list[str], Values | None], ignore: list[str]) -> None:
    """Load a packed checkpoint of four bits whose description has these groups: targets and weights."""
    config = CONFIGS["llama"]
    stored, _ = tensors_of(config, "pack_int4")
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ignore,
        "config_groups": {
            f"group_{index}": {"targets": targets, "weights": weights}
            for index, (targets, weights) in enumerate(named)
        },
    }
    source = write(path, hf_config(config) | {"quantization_config": section}, stored)
    load_model(source, mesh=make_mesh(1))


@pytest.mark.parametrize(
    ("named", "ignore"),
    [
        ([(["Linear"], INT4)], ["lm_head"]),
        ([(["Linear"], INT4)], ["re:.*head"]),
        ([(["re:.*proj$"], INT4)], []),
        ([(["Linear"], None), (["re:model.layers.*"], INT4)], []),
        ([(["re:.*down.*"], INT4), ([r"re:.*layers\.\d.*"], INT4)], []),
        ([(["Linear"], INT4 | {"num_bits": 8}), (["re:.*proj"], INT4)], ["lm_head"]),
    ],
)
def test_a_layer_belongs_to_its_most_specific_group(named: Any, ignore: list[str], tmp_path: Path) -> None:
    load_groups(tmp_path / "model", *named, ignore=ignore)


@pytest.mark.parametrize(
    ("named", "ignore", "says"),
    [
        (
            [(["Linear"], INT4)],
            [],
            "layer 'lm_head' is in a group of quantized layers, but its tensor is BF16",
        ),
        ([(["Linear"], INT4)], ["lm_head", LAYER], f"tensors of layer '{LAYER}' are quantized, but no group"),
        ([(["re:.*self_attn.*"], INT4)], [], "are quantized, but no group names it"),
        (
            [(["re:.*down.*"], INT4), (["re:.*layers.*"], INT4 | {"num_bits": 8})],
            [],
            f"layer '{LAYER}' is in the groups 'group_0' and 'group_1', which differ; name it in one",
        ),
        (
            [(["re:.*proj"], INT4 | {"group_size": 64})],
            [],
            r"has shape \[64, 4\], compressed-tensors asks for \[64, 2",
        ),
        ([(["re:.*proj"], INT4 | {"symmetric": False})], [], "weight_zero_point"),
    ],
)
def test_layers_that_the_groups_leave_unclear_are_refused(
    named: Any, ignore: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=says):
        load_groups(tmp_path / "model", *named, ignore=ignore)


def test_a_shape_beside_packed_weights_must_be_the_configs(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    stored, _ = tensors_of(config, "pack_int4")
    stored[f"{LAYER}.weight_shape"] = np.array([64, 127])
    values = hf_config(config) | {"quantization_config": groups(group_size=32)}
    with pytest.raises(
        CheckpointError, match=r"weight_shape' .* shape \[64, 127\], the config asks for \[64, 128\]"
    ):
        load_model(write(tmp_path / "model", values, stored), mesh=make_mesh(1))


@pytest.mark.parametrize(
    ("name", "lost", "says"),
    [
        ("awq", "qzeros", r"1 tensor\(s\) are missing: 'model.layers.0.mlp.down_proj.qzeros'"),
        ("gptq_int4", "scales", "are missing: 'model.layers.0.mlp.down_proj.scales'"),
        (
            "pack_int8_order",
            "weight_g_idx",
            "'model.layers.0.mlp.down_proj.weight_packed' has no weight_g_idx",
        ),
        ("gptq_int4_order", "g_idx", "'model.layers.0.mlp.down_proj.qweight' has no g_idx beside it"),
        ("fp8_blocks", "weight_scale_inv", "are missing: 'model.layers.0.mlp.down_proj.weight_scale_inv'"),
        ("int8_channel", "weight_scale", "are missing: 'model.layers.0.mlp.down_proj.weight_scale'"),
        ("pack_int4", "weight_scale", "are missing: 'model.layers.0.mlp.down_proj.weight_scale'"),
        ("awq", "qweight", "'model.layers.0.mlp.down_proj.weight'"),
    ],
)
def test_missing_parts_are_named(name: str, lost: str, says: str, tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    source, _ = checkpoints(tmp_path, name, config)
    stored, _ = tensors_of(config, name)
    del stored[f"{LAYER}.{lost}"]
    values = json.loads((source / "config.json").read_text())
    with pytest.raises(CheckpointError, match=says):
        load_model(write(tmp_path / "less", values, stored), mesh=make_mesh(1))


def test_tensors_of_another_format_are_named(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    source, plain = checkpoints(tmp_path, "awq", config)
    stored, twin = tensors_of(config, "awq")
    values = json.loads((source / "config.json").read_text())
    more = stored | {"model.layers.0.self_attn.k_scale": np.ones(1, np.float32)}
    with pytest.raises(
        CheckpointError, match=r"k_scale' .* \(a quantized KV cache\), which AWQ does not read"
    ):
        load_model(write(tmp_path / "more", values, more), mesh=make_mesh(1))
    with pytest.raises(
        CheckpointError, match=r"quantized \(AWQ\), but no tensor is; remove that description"
    ):
        load_model(write(tmp_path / "none", values, twin), mesh=make_mesh(1))
    (source / "config.json").write_text((plain / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"neither config.json nor a side file describes how"):
        load_model(source, mesh=make_mesh(1))


def test_an_order_of_groups_without_act_order_is_refused(tmp_path: Path) -> None:
    """Some libraries read g_idx then, others do not."""
    config = CONFIGS["llama"]
    source, _ = checkpoints(tmp_path, "gptq_int4_order", config)
    values = json.loads((source / "config.json").read_text())
    values["quantization_config"]["desc_act"] = False
    (source / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"g_idx' names groups out of order, but desc_act is false"):
        load_model(source, mesh=make_mesh(1))
