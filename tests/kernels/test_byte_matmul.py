"""Products of few rows with weights in 8 bits: the Hopper kernel, interpreted and lowered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.byte_matmul import (
    ByteMatmulArgumentError,
    ByteTile,
    byte_matmul,
    choose_backend,
    default_tile,
)
from pallas_kernels.byte_matmul.tiles import most_stages
from pallas_kernels.decode_matmul import device_limit
from tests.kernels.cross_lower import lower_for_cuda

SHAPE = jax.ShapeDtypeStruct
INTERPRETED = {"backend": "pallas_mosaic_gpu", "interpret": True}
KERNEL = {"backend": "pallas_mosaic_gpu"}
CODES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
# (depth, width, gated) of llama2-13b-gqa10: gate and up, down, queries with keys and values, out.
PROJECTIONS = {
    "gate_up": (5120, 13824, True),
    "down": (13824, 5120, False),
    "qkv": (5120, 7680, False),
    "out": (5120, 5120, False),
}


def arrays(num_rows, depth, width, *, gated, codes="int8", seed=0):
    """Draw x [num_rows, depth], codes [width, depth] and scales; if gated, 2 * width of both."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_rows, depth)), jnp.bfloat16)
    shape = width * (1 + gated), depth
    drawn = rng.integers(-127, 128, shape) if codes == "int8" else 100 * rng.standard_normal(shape)
    scale = rng.uniform(0.5, 1.5, shape[0]) / (40 * np.sqrt(depth))
    return x, jnp.asarray(drawn, CODES[codes]), jnp.asarray(scale, jnp.float32)


def in_float64(x, codes, scale, bias=None, *, gated=False, relu=False):
    y = np.asarray(x, np.float64) @ np.asarray(codes.astype(jnp.float32), np.float64).T
    y = y * np.asarray(scale, np.float64)
    if gated:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.maximum(y, 0) if relu else y


def assert_rounded_once(got, want):
    """Nearly all values are the exact ones, rounded to bfloat16; float32 moves a few to a neighbour."""
    assert got.dtype == jnp.bfloat16
    exact = np.asarray(jnp.asarray(want, jnp.bfloat16), np.float64)
    got = np.asarray(got, np.float64)
    assert (got == exact).mean() > 0.99
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("checked_interpreter")
@pytest.mark.parametrize(
    ("num_rows", "columns", "gated", "codes"),
    [
        (8, 64, False, "int8"),
        (3, 128, False, "fp8"),
        (24, 64, True, "fp8"),
        (40, 128, True, "int8"),
        pytest.param(128, 64, False, "int8", marks=pytest.mark.long),
        pytest.param(128, 128, True, "int8", marks=pytest.mark.long),
        pytest.param(1, 64, True, "int8", marks=pytest.mark.long),
    ],
)
def test_interpreted(num_rows, columns, gated, codes):
    """An odd number of blocks; two stages, so that each is used again."""
    given = arrays(num_rows, 640, 128, gated=gated, codes=codes)
    got = byte_matmul(*given, gated=gated, tile=ByteTile(columns, 2), **INTERPRETED)
    assert_rounded_once(got, in_float64(*given, gated=gated))
    assert not get_races().races_found


@pytest.mark.usefixtures("checked_interpreter")
@pytest.mark.parametrize(("columns", "relu"), [(64, True), (128, False)])
def test_a_bias_and_relu(columns, relu):
    """Every column has its own bias, added after the scale and before the only rounding."""
    given = arrays(16, 256, 128, gated=False)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(128), jnp.bfloat16)
    got = byte_matmul(*given, bias, relu=relu, tile=ByteTile(columns, 2), **INTERPRETED)
    want = in_float64(*given, bias, relu=relu)
    assert_rounded_once(got, want)
    assert not get_races().races_found
    assert_rounded_once(byte_matmul(*given, bias, relu=relu, backend="xla"), want)


@pytest.mark.usefixtures("checked_interpreter")
def test_another_gate():
    """GELU in its tanh form, of both back ends."""
    given = arrays(8, 256, 64, gated=True)
    gate, up = np.split(in_float64(*given), 2, axis=1)
    want = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    for options in (INTERPRETED | {"tile": ByteTile(64, 2)}, {"backend": "xla"}):
        got = byte_matmul(*given, gated=True, activation="gelu_tanh", **options)
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-7, atol=1e-5)


@pytest.mark.usefixtures("checked_interpreter")
def test_rows_do_not_depend_on_each_other():
    """A row alone has the same bits as among others, whatever the tile of its step."""
    x, codes, scale = arrays(32, 512, 64, gated=False)
    run = functools.partial(byte_matmul, tile=ByteTile(64, 4), **INTERPRETED)
    whole = run(x, codes, scale)
    np.testing.assert_array_equal(run(x[5:6], codes, scale)[0], whole[5])


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("gated", [False, True])
def test_xla(gated, codes):
    given = arrays(5, 96, 40, gated=gated, codes=codes)
    assert_rounded_once(byte_matmul(*given, gated=gated, backend="xla"), in_float64(*given, gated=gated))


@pytest.mark.parametrize(
    ("name", "num_rows", "codes"),
    [
        ("out", 8, "int8"),
        ("gate_up", 128, "fp8"),
        *(
            pytest.param(name, num_rows, codes, marks=pytest.mark.long)
            for name in PROJECTIONS
            for num_rows in (1, 32, 128)
            for codes in CODES
        ),
    ],
)
def test_lowers(name, num_rows, codes):
    depth, width, gated = PROJECTIONS[name]
    columns = width * (1 + gated)
    given = SHAPE((num_rows, depth), jnp.bfloat16), SHAPE((columns, depth), CODES[codes])
    product = functools.partial(byte_matmul, gated=gated, **KERNEL)
    assert "mosaic_gpu" in lower_for_cuda(product, *given, SHAPE((columns,), jnp.float32))


@pytest.mark.parametrize("num_rows", [1, 8, 32, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles(gated, num_rows):
    """Rings are as deep as fits, and a deeper one does not fit."""
    tile = default_tile(num_rows, 5120, 13824 if gated else 5120, gated=gated)
    assert tile is not None and tile.fits(num_rows, gated=gated)
    assert tile.columns == (128 if gated else 64)
    deeper = ByteTile(tile.columns, tile.num_stages + (1 if gated else 2))
    assert tile.num_stages == 16 or not deeper.fits(num_rows, gated=gated)
    assert most_stages(tile.columns, num_rows, gated=gated) == tile.num_stages


def test_other_shapes_are_left_to_xla():
    def choice(num_rows=8, depth=5120, width=5120, gated=False):
        return default_tile(num_rows, depth, width, gated=gated)

    assert choice() == ByteTile(64, 16)
    assert choice(width=64 * 240).columns == 128, "narrow programs would take two rounds"
    assert choice(gated=True, width=64 * 81).columns == 64, "not divided by 128 columns"
    for changed in (
        {"num_rows": 100},
        {"num_rows": 136},
        {"depth": 5120 + 64},
        {"depth": 128},
        {"width": 2048},
    ):
        assert choice(**changed) is None, changed


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "pallas_mosaic_gpu"),
        ({"num_rows": 7}, "pallas_mosaic_gpu"),
        ({"num_rows": 136}, "xla"),
        ({"dtype": "float32"}, "xla"),
        ({"device": None}, "xla"),
    ],
)
def test_choice_of_the_back_end(changed, expected):
    h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    what = {"num_rows": 128, "depth": 5120, "width": 5120, "dtype": "bfloat16", "device": h200} | changed
    sizes = [what.pop(name) for name in ("num_rows", "depth", "width")]
    assert choose_backend(*sizes, gated=False, **what) == expected
    assert choose_backend(*sizes, gated=False, **what | {"device": jax.devices()[0]}) == "xla", "no GPU"


@pytest.mark.parametrize(
    ("changed", "options", "says"),
    [
        ({}, {"backend": "cuda"}, "backend is 'cuda', but must be one of"),
        ({}, {"interpret": True}, "backend is 'auto', but interpret needs 'pallas_mosaic_gpu'"),
        (
            {"codes": (128, 64, jnp.bfloat16)},
            {},
            r"codes is bfloat16\[128, 64\], but must be of int8 or float8",
        ),
        ({"codes": (128, 32, jnp.int8)}, {}, r"x and codes are bfloat16\[8, 64\] and int8\[128, 32\]"),
        ({"scale": (64, jnp.float32)}, {}, r"scale is float32\[64\], but must be float32\[128\]"),
        ({"scale": (128, jnp.bfloat16)}, {}, r"scale is bfloat16\[128\], but must be float32\[128\]"),
        ({"codes": (127, 64, jnp.int8), "scale": (127, jnp.float32)}, {"gated": True}, "as many rows for up"),
        ({}, {"activation": "relu"}, "activation is 'relu', but must be one of"),
        ({}, {"gated": True, "relu": True}, "neither a bias nor relu"),
        ({}, KERNEL, r"codes is int8\[128, 64\], but pallas_mosaic_gpu needs a depth in two or more"),
        ({"x": (9, 64)}, KERNEL, "supports 1 to 8 rows, or a multiple of 8 up to 128"),
        ({}, KERNEL | {"tile": ByteTile(96, 2)}, "must have 64 or 128 columns"),
        ({}, KERNEL | {"tile": ByteTile(64, 3)}, "that are not gated, an even number"),
        ({}, KERNEL | {"tile": ByteTile(64, 2)}, "columns that divide 128, and 64 must be two"),
    ],
)
def test_refusals(changed, options, says):
    x = jnp.zeros(changed.get("x", (8, 64)), jnp.bfloat16)
    *shape, dtype = changed.get("codes", (128, 64, jnp.int8))
    width, scale_dtype = changed.get("scale", (128, jnp.float32))
    with pytest.raises(ByteMatmulArgumentError, match=says):
        byte_matmul(x, jnp.zeros(shape, dtype), jnp.zeros(width, scale_dtype), **options)


@pytest.mark.parametrize("bias", [jnp.zeros(64, jnp.bfloat16), jnp.zeros(128)], ids=["columns", "dtype"])
def test_a_bias_of_other_columns_or_of_another_dtype_is_refused(bias):
    given = arrays(8, 64, 128, gated=False)
    with pytest.raises(ByteMatmulArgumentError, match=r"must be bfloat16\[128\]"):
        byte_matmul(*given, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("num_rows", [1, 32, 128])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_on_a_gpu(name, num_rows, codes):
    """All tiles give the same bits for a warpgroup's columns, and XLA's values up to rounding."""
    depth, width, gated = PROJECTIONS[name]
    if device_limit(jax.devices()[0]) is not None:
        pytest.skip("the kernel does not run here")
    given = arrays(num_rows, depth, width, gated=gated, codes=codes)
    got = jax.jit(functools.partial(byte_matmul, gated=gated, **KERNEL))(*given)
    want = jax.jit(functools.partial(byte_matmul, gated=gated, backend="xla"))(*given)
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=2**-6, atol=1e-3
    )
