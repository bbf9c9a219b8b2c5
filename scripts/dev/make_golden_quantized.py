"""Make tests/models/golden_quantized: small quantized weights, decoded by the libraries of their formats.

The script needs libraries that the project does not. Make a separate environment:

    python3.11 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch transformers compressed-tensors absl-py numpy

Of two more libraries only single files are executed, so they are unpacked and not installed:

    cd /tmp/golden && bin/pip download --no-deps --no-binary :all: --no-build-isolation autoawq==0.2.9
    bin/pip download --no-deps auto-gptq==0.7.1 && unzip -q auto_gptq-0.7.1-*.whl -d auto_gptq-0.7.1
    tar xf autoawq-0.2.9.tar.gz

Then run this:

    /tmp/golden/bin/python scripts/dev/make_golden_quantized.py --sources=/tmp/golden

Each variant is a safetensors file with the tensors of a layer `layer.*` as the format stores them, the
decoded weight as `expected.float32` and `expected.bfloat16`, and in its metadata the `quantization_config`.
Two variants follow a formula, since none of these libraries has code for them: `pack_int4_g_idx`, `gptq_v2`.
Whole models are directories that compressed-tensors saved, with the logits that transformers computes of
decoded weights.
"""

import importlib.util
import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from absl import app, flags

FLAGS = flags.FLAGS
OUT, IN, GROUP = 32, 96, 32
Tensors = dict[str, torch.Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _result(config: dict[str, Any], tensors: Tensors, wide: torch.Tensor, half: torch.Tensor) -> Any:
    return config, {f"layer.{name}": value.contiguous() for name, value in tensors.items()}, wide, half


def fp8_block(scales_as_powers: bool = False, rows: int = OUT) -> Any:
    """FP8 in blocks of 16 x 32.

    transformers refuses a cut block, so a cut weight is the top of a whole one.
    """
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = _e4m3_codes(OUT, IN)
    if scales_as_powers:
        scales = torch.randint(110, 130, (OUT // 16, IN // 32), dtype=torch.uint8)
    else:
        scales = torch.rand(OUT // 16, IN // 32) * 1e-2 + 1e-3
    decode = Fp8Dequantize(None)._dequantize_one
    wide, half = (decode(codes, scales, dtype)[:rows] for dtype in (torch.float32, torch.bfloat16))
    stored = scales.view(torch.float8_e8m0fnu) if scales_as_powers else scales
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}
    tensors = {"weight": codes[:rows], "weight_scale_inv": stored[: -(-rows // 16)]}
    return _result(config, tensors, wide, half)


def _e4m3_codes(rows: int, columns: int) -> torch.Tensor:
    """Return random codes in which each of the 254 that are numbers occurs."""
    codes = torch.randint(0, 254, (rows * columns,), dtype=torch.int32)
    codes[:254] = torch.randperm(254)
    codes += codes >= 127  # leaves out 127; 255 is beyond the range
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).reshape(rows, columns)


def compressed(layout: str, kind: str, bits: int, strategy: str, symmetric: bool = True) -> Any:
    """compressed-tensors, compressed and decompressed by its own code."""
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = {"group": GROUP, "channel": -1}.get(strategy)
    block = [16, 32] if strategy == "block" else None
    options = {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
        "block_structure": block,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**options))
    grid = {"tensor": (1,), "channel": (OUT, 1), "group": (OUT, IN // GROUP), "block": (OUT // 16, IN // 32)}
    grid = grid[strategy]
    scales = (torch.rand(grid) * 0.01 + 0.005).to(torch.bfloat16)
    state = {"weight": torch.randn(OUT, IN) * 0.3 * 2 ** (bits - 4), "weight_scale": scales.float()}
    if not symmetric:
        limit = 2 ** (bits - 1)
        state["weight_zero_point"] = torch.randint(-limit, limit, grid, dtype=torch.int8)
    compressor = PackedQuantizationCompressor if layout == "pack-quantized" else NaiveQuantizationCompressor
    stored = compressor.compress(state, scheme)
    wide = compressor.decompress(dict(stored), scheme)["weight"]
    half = compressor.decompress(stored | {"weight_scale": scales}, scheme)["weight"]
    assert (wide.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": options}},
    }
    return _result(config, stored | {"weight_scale": scales}, wide, half)


def pack_int4_g_idx() -> Any:
    """Files of earlier versions name the group of each input channel; today's library does not read that."""
    config, tensors, _, _ = compressed("pack-quantized", "int", 4, "group", symmetric=False)
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    groups = IN // GROUP
    g_idx = (torch.arange(IN, dtype=torch.int32) // GROUP)[torch.randperm(IN)]
    codes = unpack_from_int32(tensors["layer.weight_packed"], 4, torch.Size((OUT, IN)))
    zeros = unpack_from_int32(tensors["layer.weight_zero_point"], 4, torch.Size((OUT, groups)), packed_dim=0)
    scales = tensors["layer.weight_scale"].float()
    wide = (codes.float() - zeros.float()[:, g_idx]) * scales[:, g_idx]
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return config, tensors | {"layer.weight_g_idx": g_idx}, wide, wide.to(torch.bfloat16)


def awq() -> Any:
    """AWQ, packed in AutoAWQ's order and decoded by its own code, in float32."""
    path = Path(FLAGS.sources) / "autoawq-0.2.9/awq/utils/packing_utils.py"
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)

    def pack(codes: torch.Tensor) -> torch.Tensor:
        words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32)
        for nibble, channel in enumerate(_AWQ_ORDER):
            words |= codes[:, channel::8] << (4 * nibble)
        return words

    codes = torch.randint(0, 16, (IN, OUT), dtype=torch.int32)
    zeros = torch.randint(0, 16, (IN // GROUP, OUT), dtype=torch.int32)
    scales = (torch.rand(IN // GROUP, OUT) * 0.01 + 1e-3).half()
    tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
    wide = library.dequantize_gemm(tensors["qweight"], tensors["qzeros"], scales.float(), 4, GROUP).T
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return _result(config, tensors, wide, wide.to(torch.bfloat16))


def gptq(bits: int, act_order: bool = False, wraps: bool = False) -> Any:
    """GPTQ, packed and decoded by AutoGPTQ; `wraps` stores zero points of 0, which are 2**bits - 1 there."""
    file = "qlinear_cuda.py" if act_order else "qlinear_cuda_old.py"
    sys.modules["autogptq_cuda_64"] = sys.modules["autogptq_cuda_256"] = None  # type: ignore[assignment]
    library = types.ModuleType("qlinear")
    source = Path(FLAGS.sources) / "auto_gptq-0.7.1/auto_gptq/nn_modules/qlinear" / file
    exec(compile(source.read_text(), file, "exec"), library.__dict__)

    groups = IN // GROUP
    g_idx = torch.arange(IN, dtype=torch.int32) // GROUP
    if act_order:
        g_idx = g_idx[torch.randperm(IN)]
    layer = library.QuantLinear(bits, GROUP, IN, OUT, False, weight_dtype=torch.float32)
    layer.autogptq_cuda_available = layer.use_cuda_fp16 = False
    scales = (torch.rand(OUT, groups) * 0.01 + 3e-3).half().float()
    zeros = torch.randint(1, 2**bits, (OUT, groups)).float()
    linear = torch.nn.Linear(IN, OUT, bias=False)
    codes = torch.randint(0, 2**bits, (OUT, IN)).float()
    linear.weight.data = (codes - zeros[:, g_idx.long()]) * scales[:, g_idx.long()]
    layer.pack(linear, scales.clone(), zeros.clone(), g_idx)
    if wraps:  # its packer would overflow into the next zero point
        layer.qzeros |= torch.tensor(0x00F000F0, dtype=torch.int32)
    layer.scales = layer.scales.float()
    wide = layer(torch.eye(IN)).detach().T
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": False}
    tensors = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": scales.T.half(), "g_idx": g_idx}
    return _result(config, tensors, wide, wide.to(torch.bfloat16))


def gptq_v2() -> Any:
    """The second version stores zero points themselves: what GPTQModel makes of a file of the first."""
    config, tensors, wide, half = gptq(4)
    tensors["layer.qzeros"] = tensors["layer.qzeros"] + 0x11111111
    return config | {"checkpoint_format": "gptq_v2"}, tensors, wide, half


def mxfp4() -> Any:
    """MXFP4 of two experts; scales include those that give the largest and smallest normal numbers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 32, 3, 16), dtype=torch.uint8)
    scales = torch.randint(2, 250, (2, 32, 3), dtype=torch.uint8)
    wide, half = (
        convert_moe_packed_tensors(blocks, scales, dtype=d) for d in (torch.float32, torch.bfloat16)
    )
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return config, {"layer_blocks": blocks, "layer_scales": scales}, wide, half


VARIANTS: dict[str, Callable[[], Any]] = {
    "fp8_block": fp8_block,
    "fp8_block_cut": lambda: fp8_block(rows=24),
    "fp8_block_powers": lambda: fp8_block(scales_as_powers=True),
    "float_tensor": lambda: compressed("float-quantized", "float", 8, "tensor"),
    "float_channel": lambda: compressed("float-quantized", "float", 8, "channel"),
    "float_block": lambda: compressed("float-quantized", "float", 8, "block"),
    "int8_channel": lambda: compressed("int-quantized", "int", 8, "channel"),
    "int8_channel_zeros": lambda: compressed("int-quantized", "int", 8, "channel", symmetric=False),
    "int8_group": lambda: compressed("int-quantized", "int", 8, "group"),
    "pack_int4_group": lambda: compressed("pack-quantized", "int", 4, "group"),
    "pack_int4_group_zeros": lambda: compressed("pack-quantized", "int", 4, "group", symmetric=False),
    "pack_int4_g_idx": pack_int4_g_idx,
    "pack_int8_channel": lambda: compressed("pack-quantized", "int", 8, "channel"),
    "pack_int8_group_zeros": lambda: compressed("pack-quantized", "int", 8, "group", symmetric=False),
    "awq": awq,
    "gptq_int4": lambda: gptq(4),
    "gptq_int4_wraps": lambda: gptq(4, wraps=True),
    "gptq_int4_act_order": lambda: gptq(4, act_order=True),
    "gptq_int8": lambda: gptq(8),
    "gptq_v2": gptq_v2,
    "mxfp4": mxfp4,
}
"""Variants by name. The seed depends on the index in this table, so append new ones at the end."""


_SIZES = {"hidden_size": 32, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_pack_int4_zeros": ("llama", _INT4),
    "qwen3_float_channel": ("qwen3", _FLOAT8),
}
"""Whole models by name: `model_type`, and how weights of layers are quantized."""


def save_model(model_type: str, options: dict[str, Any], directory: Path, seed: int) -> None:
    """Quantize a tiny model, save it by compressed-tensors, and compute its logits by transformers."""
    import numpy as np
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams
    from make_golden_logits import NUM_TOKENS, Variant, build, logits_of
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    weights = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    model = build(Variant(model_type, _SIZES), seed).to(torch.bfloat16)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    )
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        groups = module.weight.float().reshape(*module.weight_scale.shape, -1)
        scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
        module.weight_scale.data.copy_(scales)
        if not weights.symmetric:
            module.weight_zero_point.data.copy_(zeros)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)

    decode = CompressedTensorsConfig(dequantize=True)
    decoded = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=decode, dtype=torch.bfloat16, attn_implementation="eager"
    )
    input_ids = np.random.default_rng(seed).integers(0, 64, NUM_TOKENS)
    logits = logits_of(decoded.float().eval(), input_ids)
    np.savez_compressed(directory / "logits.npz", input_ids=input_ids, logits=logits)
    for path in directory.iterdir():
        path.chmod(0o644)


def main(argv: list[str]) -> None:
    del argv
    from safetensors.torch import save_file

    root = Path(FLAGS.output)
    root.mkdir(parents=True, exist_ok=True)
    for index, (name, (model_type, options)) in enumerate(MODELS.items()):
        if not FLAGS.variants or name in FLAGS.variants:
            shutil.rmtree(root / name, ignore_errors=True)
            save_model(model_type, options, root / name, FLAGS.seed + index)
            print(f"{name}: {sum(path.stat().st_size for path in (root / name).iterdir())} bytes")
    for index, (name, make) in enumerate(VARIANTS.items()):
        if FLAGS.variants and name not in FLAGS.variants:
            continue
        torch.manual_seed(FLAGS.seed + index)
        config, tensors, wide, half = make()
        assert torch.equal(wide.to(torch.bfloat16), half), f"{name}: the library rounds more than once"
        expected = {"expected.float32": wide.contiguous(), "expected.bfloat16": half.contiguous()}
        path = root / f"{name}.safetensors"
        save_file(tensors | expected, path, metadata={"quantization_config": json.dumps(config)})
        path.chmod(0o644)
        print(f"{name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    flags.DEFINE_string("output", "tests/models/golden_quantized", "Directory to write the variants into.")
    flags.DEFINE_string("sources", "/tmp/golden", "Directory with autoawq and auto-gptq, unpacked.")
    flags.DEFINE_multi_enum("variants", [], [*VARIANTS, *MODELS], "Variants to make; default: all.")
    flags.DEFINE_integer("seed", 20261130, "Seed of the codes.")
    app.run(main)
