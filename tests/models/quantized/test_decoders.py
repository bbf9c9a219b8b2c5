"""Decoding what an encoder made gives the encoded weight, bit by bit, in any shape that the format allows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model_defs import CheckpointError
from model_defs.quantized import Source, parse_format, unpacking
from model_defs.quantized.mxfp4 import Mxfp4, Mxfp4Decoder
from model_defs.quantized.source import Tensors
from model_defs.safetensors_reader import TensorEntry, read_header
from tests.models.quantized.encoders import FORMATS, e4m3_values

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = ((24, 96), (40, 72), (1, 33), (7, 5))  # in multiples that a format has


def stored(tensors: Mapping[str, np.ndarray], path: Path) -> dict[str, TensorEntry]:
    """Write the tensors of a layer and return their entries."""
    save_file({f"layer.{name}": np.ascontiguousarray(value) for name, value in tensors.items()}, path)
    return {entry.name: entry for entry in read_header(path)}


def source_of(name: str, shape: tuple[int, ...], entries: Tensors) -> Source:
    """Return the source of `layer.weight` in the format `name`, after checking that it is readable."""
    quantized = parse_format({"quantization_config": FORMATS[name].config})
    assert quantized is not None
    source = quantized.source("layer.weight", shape, entries)
    assert source is not None and source.decode is not None
    for part in source.parts:
        entries[part.name].check_readable(part.dtypes)
        assert entries[part.name].shape == part.shape
    return source


def decoded(source: Source, entries: Tensors) -> np.ndarray:
    arrays = [entries[part.name].read(part.dtypes) for part in source.parts]
    assert source.decode is not None and all(
        part.fault is None or part.fault(a) is None for part, a in zip(source.parts, arrays, strict=True)
    )
    return np.asarray(jax.jit(source.decode)(*arrays))


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_undoes_encoding(name: str, tmp_path: Path) -> None:
    multiples = FORMATS[name].multiples

    @settings(max_examples=6, deadline=None, database=None)
    @given(SEEDS, st.sampled_from(SHAPES))
    def check(seed: int, shape: tuple[int, int]) -> None:
        rng = np.random.default_rng(seed)
        whole = (-(-shape[0] // multiples[0]) * multiples[0], -(-shape[1] // multiples[1]) * multiples[1])
        tensors, weight = FORMATS[name].encode(rng, whole)
        entries = stored(tensors, tmp_path / "layer.safetensors")
        source = source_of(name, whole, entries)
        assert {part.name for part in source.parts}.union(source.others) == entries.keys()
        found = decoded(source, entries)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.view(np.uint32), np.ascontiguousarray(weight).view(np.uint32))

    check()


@settings(max_examples=20, deadline=None, database=None)
@given(SEEDS)
def test_mxfp4_is_a_sign_two_bits_of_exponent_and_one_of_mantissa(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (2, 3, 4, 16)).astype(np.uint8)
    scales = rng.integers(2, 252, (2, 3, 4)).astype(np.uint8)  # products that are normal numbers
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(2, 3, 4, 32)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    magnitude = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    expected = np.where(codes >> 3, -magnitude, magnitude) * 2.0 ** (scales[..., None] - 127.0)
    expected = expected.astype(np.float32).reshape(2, 3, 128).swapaxes(1, 2)
    found = np.asarray(Mxfp4Decoder()(blocks, scales))
    np.testing.assert_array_equal(found.view(np.uint32), expected.copy().view(np.uint32))


def test_every_code_of_e4m3_has_its_value() -> None:
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(values, e4m3_values()[codes])


def test_mxfp4_takes_the_tensors_of_experts_alone(tmp_path: Path) -> None:
    path = tmp_path / "experts.safetensors"
    tensors = {"up_blocks": np.zeros((2, 6, 2, 16), np.uint8), "up_scales": np.zeros((2, 6, 2), np.uint8)}
    save_file(tensors | {"norm.weight": np.ones(3, np.float32)}, path)
    entries = {entry.name: entry for entry in read_header(path)}
    source = Mxfp4().source("up", (2, 64, 6), entries)
    assert source is not None and [part.shape for part in source.parts] == [(2, 6, 2, 16), (2, 6, 2)]
    assert Mxfp4().source("norm.weight", (3,), entries) is None
    with pytest.raises(CheckpointError, match=r"'up_blocks' .* holds 32 input channels .* asks for 70"):
        Mxfp4().source("up", (2, 70, 6), entries)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("awq", (20, 64), r"holds 8 output channels in each element, but the config asks for 20"),
        ("gptq_int4", (16, 60), r"holds 8 input channels in each element, but the config asks for 60"),
    ],
)
def test_sizes_that_no_word_ends_at_are_refused(
    name: str, shape: tuple[int, int], says: str, tmp_path: Path
) -> None:
    tensors, _ = FORMATS[name].encode(np.random.default_rng(1), (16, 64))
    entries = stored(tensors, tmp_path / "layer.safetensors")
    with pytest.raises(CheckpointError, match=says):
        source_of(name, shape, entries)


@pytest.mark.parametrize("code", [127, 255])
@pytest.mark.parametrize("name", ["fp8_blocks", "fp8_tensor", "float_channel"])
def test_codes_that_are_not_numbers_are_found(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, _ = FORMATS[name].encode(np.random.default_rng(1), (16, 64))
    tensors["weight"].view(np.uint8)[3, 5] = code
    entries = stored(tensors, tmp_path / "layer.safetensors")
    codes = source_of(name, (16, 64), entries).parts[0]
    assert codes.fault is not None
    for block in (2**20, 100):  # the code is in the first block, or in the second
        monkeypatch.setattr(unpacking, "_CHECKED_BYTES", block)
        assert codes.fault(entries[codes.name].read(codes.dtypes)) == (
            f"code {code} at element {3 * 64 + 5}, which is NaN in e4m3"
        )


def test_the_exponent_that_is_not_a_number_is_found() -> None:
    codes = np.array([0, 254, 255, 1], np.uint8)
    assert unpacking.e8m0_fault(codes) == "code 255 at element 2, which is NaN in e8m0"
    assert unpacking.e8m0_fault(codes[:2]) is None


def test_scales_as_powers_of_two_belong_to_fp8_alone(tmp_path: Path) -> None:
    """Their codes are not numbers to multiply with."""
    tensors, _ = FORMATS["float_channel"].encode(np.random.default_rng(1), (16, 64))
    tensors["weight_scale"] = np.full((16, 1), 120, ml_dtypes.float8_e8m0fnu)
    entries = stored(tensors, tmp_path / "layer.safetensors")
    with pytest.raises(CheckpointError, match=r"'layer\.weight_scale' .* F8_E8M0; one of F32, F16, BF16"):
        source_of("float_channel", (16, 64), entries)
