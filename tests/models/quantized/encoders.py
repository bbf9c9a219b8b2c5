"""Encoders of weights into the tensors of each format, in NumPy; they share no code with the decoders.

An encoder takes a random generator and a shape [out, in] and returns the stored tensors by their names behind
the layer's, and the weight in float32. Groups are of 32 input channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

GROUP = 32
Shape = tuple[int, int]
Encoded = tuple[dict[str, np.ndarray], np.ndarray]
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # channel of each nibble, from the lowest


def pack(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return words i32 of unsigned codes, the lowest bits first; missing codes at the end are 0."""
    count = 32 // bits
    lines = np.moveaxis(codes, axis, 0)
    missing = -len(lines) % count
    lines = np.concatenate([lines, np.zeros((missing, *lines.shape[1:]), lines.dtype)])
    words = np.zeros((len(lines) // count, *lines.shape[1:]), np.uint32)
    for place in range(count):
        words |= lines[place::count].astype(np.uint32) << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32)


def e4m3_values() -> np.ndarray:
    """Return the value of each code of e4m3: a sign bit, four bits of exponent, three of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes >> 7, -magnitude, magnitude).astype(np.float32)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (rng.uniform(0.2, 1.0, shape) * 0.1).astype(dtype)


def _e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 254, shape)
    return (codes + (codes >= 127)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)


def fp8(rng: np.random.Generator, shape: Shape, block: tuple[int, int] | None = (16, 32)) -> Encoded:
    """FP8 in blocks, the last ones cut; or with one scale."""
    codes = _e4m3(rng, shape)
    values = e4m3_values()[codes.view(np.uint8)]
    if block is None:
        scale = _scales(rng, (), np.float32) / 100
        return {"weight": codes, "weight_scale": scale, "input_scale": np.float32(3)[()]}, values * scale
    scales = _scales(rng, (-(-shape[0] // block[0]), -(-shape[1] // block[1])), np.float32) / 100
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return {"weight": codes, "weight_scale_inv": scales}, values * scales[rows][:, columns]


def scaled(rng: np.random.Generator, shape: Shape, kind: str, has_zeros: bool = False) -> Encoded:
    """compressed-tensors of eight bits with a scale for each output channel."""
    scales = _scales(rng, (shape[0], 1), ml_dtypes.bfloat16)
    if kind == "float":
        codes = _e4m3(rng, shape)
        weight = e4m3_values()[codes.view(np.uint8)] * (scales.astype(np.float32) / 128)
        return {"weight": codes, "weight_scale": (scales / 128).astype(ml_dtypes.bfloat16)}, weight
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    tensors = {"weight": codes, "weight_scale": scales}
    zeros = np.zeros((shape[0], 1), np.int8)
    if has_zeros:
        zeros = tensors["weight_zero_point"] = rng.integers(-128, 128, zeros.shape).astype(np.int8)
    return tensors, (codes.astype(np.float32) - zeros.astype(np.float32)) * scales.astype(np.float32)


def packed(
    rng: np.random.Generator,
    shape: Shape,
    bits: int = 4,
    has_zeros: bool = False,
    has_order: bool = False,
) -> Encoded:
    """compressed-tensors' pack-quantized; zero points are packed along the output channels."""
    (num_out, num_in), groups = shape, -(-shape[1] // GROUP)
    codes, zeros = rng.integers(0, 2**bits, shape), np.full((num_out, groups), 2 ** (bits - 1))
    scales = _scales(rng, (num_out, groups), ml_dtypes.bfloat16)
    group = np.arange(num_in) // GROUP
    tensors = {
        "weight_packed": pack(codes, bits, 1),
        "weight_scale": scales,
        "weight_shape": np.array(shape, np.int64),
    }
    if has_zeros:
        zeros = rng.integers(0, 2**bits, zeros.shape)
        tensors["weight_zero_point"] = pack(zeros, bits, 0)
    if has_order:
        group = rng.permutation(group)
        tensors["weight_g_idx"] = group.astype(np.int32)
    wide = scales.astype(np.float32)[:, group]
    return tensors, (codes - zeros[:, group]).astype(np.float32) * wide


def awq(rng: np.random.Generator, shape: Shape) -> Encoded:
    """AWQ: eight output channels to a word, in its order."""
    (num_out, num_in), groups = shape, -(-shape[1] // GROUP)
    codes, zeros = rng.integers(0, 16, (num_in, num_out)), rng.integers(0, 16, (groups, num_out))
    scales = _scales(rng, (groups, num_out), np.float16)

    def ordered(values: np.ndarray) -> np.ndarray:
        return values.reshape(len(values), -1, 8)[:, :, AWQ_NIBBLES].reshape(values.shape)

    group = np.arange(num_in) // GROUP
    weight = (codes - zeros[group]).astype(np.float32) * scales.astype(np.float32)[group]
    tensors = {"qweight": pack(ordered(codes), 4, 1), "qzeros": pack(ordered(zeros), 4, 1), "scales": scales}
    return tensors, weight.T


def gptq(
    rng: np.random.Generator,
    shape: Shape,
    bits: int = 4,
    has_order: bool = False,
    is_v2: bool = False,
) -> Encoded:
    """GPTQ; the first version stores zero points less one, and 0 as the largest code."""
    (num_out, num_in), groups = shape, -(-shape[1] // GROUP)
    codes, zeros = rng.integers(0, 2**bits, (num_in, num_out)), rng.integers(0, 2**bits, (groups, num_out))
    scales = _scales(rng, (groups, num_out), np.float16)
    group = np.arange(num_in) // GROUP
    if has_order:
        group = rng.permutation(group)
    weight = (codes - zeros[group]).astype(np.float32) * scales.astype(np.float32)[group]
    stored = zeros if is_v2 else (zeros - 1) % 2**bits
    tensors = {
        "qweight": pack(codes, bits, 0),
        "qzeros": pack(stored, bits, 1),
        "scales": scales,
        "g_idx": group.astype(np.int32),
    }
    return tensors, weight.T


@dataclasses.dataclass(frozen=True)
class Format:
    """Format as config.json describes it, its encoder, and the multiples that its sizes must be."""

    config: dict[str, Any]
    encode: Callable[[np.random.Generator, Shape], Encoded]
    multiples: Shape = (1, 1)


def _groups(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_GPTQ = {"quant_method": "gptq", "group_size": GROUP}

FORMATS = {
    "fp8_blocks": Format({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8),
    "fp8_tensor": Format({"quant_method": "fp8"}, lambda rng, shape: fp8(rng, shape, None)),
    "float_channel": Format(
        _groups("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda rng, shape: scaled(rng, shape, "float"),
    ),
    "int8_channel": Format(
        _groups("int-quantized", symmetric=False, **_INT8),
        lambda rng, shape: scaled(rng, shape, "int", has_zeros=True),
    ),
    "pack_int4": Format(_groups("pack-quantized", symmetric=True, **_INT4), packed),
    "pack_int4_zeros": Format(
        _groups("pack-quantized", symmetric=False, **_INT4),
        lambda rng, shape: packed(rng, shape, has_zeros=True),
    ),
    "pack_int8_order": Format(
        _groups("pack-quantized", symmetric=False, **_INT4 | {"num_bits": 8, "actorder": "group"}),
        lambda rng, shape: packed(rng, shape, 8, has_zeros=True, has_order=True),
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, (8, 1)),
    "gptq_int4": Format(_GPTQ | {"bits": 4}, gptq, (8, 8)),
    "gptq_int4_order": Format(
        _GPTQ | {"bits": 4, "desc_act": True}, lambda rng, shape: gptq(rng, shape, has_order=True), (8, 8)
    ),
    "gptq_int8_v2": Format(
        _GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"},
        lambda rng, shape: gptq(rng, shape, 8, is_v2=True),
        (4, 4),
    ),
}
"""Formats of layers, by name. MXFP4 is one of experts, and has tests of its own."""
