"""Products of few rows: the Hopper kernel, interpreted against float64, and its lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.decode_matmul import (
    MatmulArgumentError,
    MatmulTile,
    choose_backend,
    decode_matmul,
    default_tile,
    device_limit,
)
from tests.kernels.cross_lower import lower_for_cuda
from tests.launching import load

matmul_tiles = load("pensieve_lab.kernels.matmul_tiles")

SHAPE = jax.ShapeDtypeStruct
INTERPRETED = {"backend": "pallas_mosaic_gpu", "interpret": True}
KERNEL = {"backend": "pallas_mosaic_gpu"}
SMALL = MatmulTile(64, 3)
# (depth, width, gated) of llama2-13b-gqa10: gate and up, down, queries with keys and values, out.
PROJECTIONS = {
    "gate_up": (5120, 13824, True),
    "down": (13824, 5120, False),
    "qkv": (5120, 7680, False),
    "out": (5120, 5120, False),
}
# One device's part of those of llama2-70b on two devices.
PARTS = {
    "part of gate_up": (8192, 14336, True),
    "part of down": (14336, 8192, False),
    "part of qkv": (8192, 5120, False),
    "part of out": (4096, 8192, False),
}
QUICK = ("out", 1), ("part of gate_up", 128)


def arrays(num_rows, depth, width, *, gated, seed=0):
    """Draw x [num_rows, depth] and w [depth, width], or if gated [depth, 2 * width]."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_rows, depth)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((depth, width * (1 + gated))) / np.sqrt(depth), jnp.bfloat16)
    return x, w


def in_float64(x, w, bias=None, *, gated, activation="silu", relu=False):
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    if gated:
        gate, up = np.split(y, 2, axis=1)
        if activation == "silu":
            y = gate / (1 + np.exp(-gate)) * up
        else:
            y = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.maximum(y, 0) if relu else y


def assert_equals(got, want):
    """Check equality except for the rounding to bfloat16 and float32 sums."""
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-4)


@pytest.mark.usefixtures("checked_interpreter")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [64, 128])
def test_interpreted(num_rows, gated):
    x, w = arrays(num_rows, 320, 128, gated=gated)
    got = decode_matmul(x, w, gated=gated, tile=SMALL, **INTERPRETED)
    assert_equals(got, in_float64(x, w, gated=gated))
    assert not get_races().races_found


@pytest.mark.parametrize("how", [INTERPRETED, {"backend": "xla"}], ids=["interpreted", "xla"])
def test_a_gate_by_gelu(how):
    """Gates of both signs, far from zero too, where an exponential is infinite or zero."""
    x, w = arrays(8, 128, 64, gated=True)
    x = x.at[0].multiply(300)
    tile = SMALL if how is INTERPRETED else None
    got = decode_matmul(x, w, gated=True, activation="gelu_tanh", tile=tile, **how)
    want = in_float64(x, w, gated=True, activation="gelu_tanh")
    assert np.abs(want[0]).max() > 1e4 and (want == 0).any() and np.isfinite(np.asarray(got, float)).all()
    assert_equals(got, want)
    assert np.abs(np.asarray(got, float) - in_float64(x, w, gated=True)).max() > 0.1  # SiLU differs


@pytest.mark.usefixtures("checked_interpreter")
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("num_rows", "columns"), [(24, 128), (128, 64)])
def test_a_bias_and_relu(num_rows, columns, relu):
    """Every column has its own bias, added before the only rounding."""
    x, w = arrays(num_rows, 192, 256, gated=False)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(256), jnp.bfloat16)
    got = decode_matmul(x, w, bias, relu=relu, tile=MatmulTile(columns, 3), **INTERPRETED)
    want = in_float64(x, w, bias, gated=False, relu=relu)
    assert_equals(got, want)
    assert not get_races().races_found
    assert_equals(decode_matmul(x, w, bias, relu=relu, backend="xla"), want)


def test_relu_without_a_bias():
    x, w = arrays(8, 64, 64, gated=False)
    got = decode_matmul(x, w, relu=True, tile=SMALL, **INTERPRETED)
    assert_equals(got, in_float64(x, w, gated=False, relu=True))


@pytest.mark.usefixtures("checked_interpreter")
@pytest.mark.parametrize("num_rows", [8, 24, 56])
def test_missing_rows_are_not_read(num_rows):
    """Copies do not read them either: the interpreter rejects copies past an array's end."""
    x, w = arrays(num_rows, 384, 128, gated=False)
    got = decode_matmul(x, w, tile=MatmulTile(64, 3, 128), **INTERPRETED)
    assert_equals(got, in_float64(x, w, gated=False))
    assert not get_races().races_found


@pytest.mark.usefixtures("checked_interpreter")
@pytest.mark.parametrize("tile", [MatmulTile(64, 2, 256), MatmulTile(64, 4, 128)], ids=str)
def test_deeper_blocks_interpreted(tile):
    x, w = arrays(64, 1280, 64, gated=False)
    assert_equals(decode_matmul(x, w, tile=tile, **INTERPRETED), in_float64(x, w, gated=False))
    assert not get_races().races_found


@pytest.mark.parametrize("gated", [False, True])
def test_xla(gated):
    x, w = arrays(5, 96, 40, gated=gated)
    assert_equals(decode_matmul(x, w, gated=gated, backend="xla"), in_float64(x, w, gated=gated))


@pytest.mark.parametrize("num_rows", [1, 128])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_lowers(name, num_rows):
    depth, width, gated = PROJECTIONS[name]
    x, w = SHAPE((num_rows, depth), jnp.bfloat16), SHAPE((depth, width * (1 + gated)), jnp.bfloat16)
    text = lower_for_cuda(lambda x, w: decode_matmul(x, w, gated=gated, backend="pallas_mosaic_gpu"), x, w)
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("num_rows", [1, 128])
def test_a_gate_by_gelu_lowers(num_rows):
    """These are gate and up of Gemma 3 12B."""
    x, w = (SHAPE(shape, jnp.bfloat16) for shape in ((num_rows, 3840), (3840, 2 * 15360)))
    product = functools.partial(decode_matmul, gated=True, activation="gelu_tanh", **KERNEL)
    assert "decode_matmul_gelu_gated_" in lower_for_cuda(product, x, w)


@pytest.mark.parametrize("num_rows", [32, 128])
def test_a_bias_lowers(num_rows):
    """OPT-13B's first projection of the MLP lowers for one warpgroup and for two."""
    x, w, bias = (SHAPE(shape, jnp.bfloat16) for shape in ((num_rows, 5120), (5120, 20480), (20480,)))
    assert "decode_matmul_relu_" in lower_for_cuda(
        functools.partial(decode_matmul, relu=True, **KERNEL), x, w, bias
    )


def test_a_bias_of_other_columns_or_of_another_dtype_is_refused():
    x, w, bias = (jnp.zeros(shape, jnp.bfloat16) for shape in ((8, 64), (64, 128), (64,)))
    with pytest.raises(MatmulArgumentError, match=r"bias is bfloat16\[64\], but must be bfloat16\[128\]"):
        decode_matmul(x, w, bias)
    with pytest.raises(MatmulArgumentError, match=r"bias is float32\[128\], but must be bfloat16\[128\]"):
        decode_matmul(x, w, jnp.zeros(128))
    for arguments in ({"bias": bias}, {"relu": True}):
        with pytest.raises(MatmulArgumentError, match="neither a bias nor relu"):
            decode_matmul(x, w, gated=True, **arguments)


@pytest.mark.parametrize(
    ("name", "num_rows"),
    [
        pytest.param(name, rows, marks=[] if (name, rows) in QUICK else pytest.mark.long)
        for name in PROJECTIONS | PARTS
        for rows in (1, 128)
    ],
)
def test_tiles_of_the_benchmark_lower(name, num_rows):
    """Shared memory has room for all their stages."""
    depth, width, gated = (PROJECTIONS | PARTS)[name]
    x, w = SHAPE((num_rows, depth), jnp.bfloat16), SHAPE((depth, width * (1 + gated)), jnp.bfloat16)
    tiles = matmul_tiles.tiles(num_rows, depth, width, gated=gated)
    assert tiles
    for tile in tiles:
        product = functools.partial(decode_matmul, gated=gated, tile=tile, **KERNEL)
        assert "mosaic_gpu" in lower_for_cuda(product, x, w), tile


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "pallas_mosaic_gpu"),
        ({"num_rows": 136}, "xla"),  # arithmetic is the limit
        ({"num_rows": 100}, "xla"),  # not a multiple of 8
        ({"num_rows": 7}, "pallas_mosaic_gpu"),
        ({"dtype": "float16"}, "xla"),
        ({"depth": 5120 + 32}, "xla"),
        ({"width": 5120 + 32}, "xla"),
        ({"width": 2048}, "xla"),  # too few columns for a whole device
        ({"device": None}, "xla"),
    ],
)
def test_choice_of_the_back_end(changed, expected):
    h200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    what = {"num_rows": 128, "depth": 5120, "width": 5120, "dtype": "bfloat16", "device": h200} | changed
    sizes = [what.pop(name) for name in ("num_rows", "depth", "width")]
    assert choose_backend(*sizes, gated=False, **what) == expected
    assert choose_backend(*sizes, gated=False, **what | {"device": jax.devices()[0]}) == "xla", "no GPU"


def test_tiles():
    assert default_tile(128, 5120, 13824, gated=True) == MatmulTile(128, 4)
    assert default_tile(128, 5120, 64 * 81, gated=True) == MatmulTile(64, 6), "not divided by 128 columns"
    assert default_tile(64, 5120, 128 * 63, gated=True) == MatmulTile(64, 4), "too few programs of 128"
    assert default_tile(64, 5120, 64 * 81, gated=True) == MatmulTile(64, 4), "not divided by 128 columns"
    assert default_tile(64, 5120, 5120, gated=False) == MatmulTile(64, 6, 128)
    assert default_tile(64, 64 * 81, 5120, gated=False) == MatmulTile(64, 10), "not divided by blocks of 128"
    assert default_tile(72, 5120, 5120, gated=False) == MatmulTile(64, 8), "two warpgroups"
    assert default_tile(128, 14336, 8192, gated=False) == MatmulTile(64, 8), "128 programs"
    assert default_tile(32, 18432, 9216, gated=False) == MatmulTile(128, 4, 128), "72 programs, of 64: 144"
    assert default_tile(128, 18432, 9216, gated=False) is None, "144 programs, 12 of them in a second round"
    assert default_tile(32, 9216, 18432, gated=False) is None, "144 programs of 128 columns, 288 of 64"
    assert default_tile(32, 4096, 64 * 201, gated=False) == MatmulTile(64, 6, 128), "two rounds, mostly full"
    assert default_tile(32, 5120, 64 * 63, gated=False) is None, "too few programs"
    assert default_tile(128, 5120, 64 * 132, gated=False) == MatmulTile(64, 8), "all at once"
    assert default_tile(128, 5120, 64 * 133, gated=False) is None, "one in a second round"


@pytest.mark.parametrize(
    ("shapes", "how", "says"),
    [
        (((2, 64), (32, 64)), {}, "x and w are bfloat16.2, 64. and bfloat16.32, 64., but must be"),
        (((0, 64), (64, 64)), {}, "none of them 0"),
        (((2, 64), (64, 65)), {"gated": True}, "as many columns for up as for the gate"),
        (((2, 64), (64, 64)), {"gated": True, "activation": "gelu"}, "activation is 'gelu', but must be one"),
        (((2, 64), (64, 64)), {"backend": "cuda"}, "backend is 'cuda', but must be one of"),
        (((129, 64), (64, 64)), {**KERNEL, "tile": SMALL}, "x is bfloat16.129, 64., but .* up to 128"),
        (((12, 64), (64, 64)), {**KERNEL, "tile": SMALL}, "1 to 8 rows, or a multiple of 8 up to 128"),
        (((2, 64), (64, 96)), {**KERNEL, "tile": SMALL}, "tile is .* columns that divide 96 .* 'xla'"),
        (((2, 64), (64, 64)), KERNEL, "w is bfloat16.64, 64., but .* 64 parts or more"),
        (((2, 64), (64, 64)), {"interpret": True}, "backend is 'auto', but interpret needs"),
        (((2, 192), (192, 64)), {**KERNEL, "tile": MatmulTile(64, 2, 128)}, "a block_k that divides 192"),
        (((2, 64), (64, 64)), {**KERNEL, "tile": MatmulTile(0, 4)}, "must have a multiple of 64 columns"),
        (((2, 64), (64, 80)), {**KERNEL, "tile": MatmulTile(40, 3)}, "a multiple of 64 columns, a block_k"),
        (((2, 96), (96, 64)), {**KERNEL, "tile": MatmulTile(64, 3, 96)}, "a multiple of 64, and two"),
        (((2, 64), (64, 64)), {**KERNEL, "tile": MatmulTile(64, 1)}, "two stages or more"),
        (((64, 64), (64, 64)), {**KERNEL, "tile": MatmulTile(64, 14)}, "which fit in shared memory"),
        (((72, 64), (64, 64)), {**KERNEL, "tile": MatmulTile(64, 9)}, "which fit in shared memory"),
        (((2, 64), (64, 256)), {"gated": True, **KERNEL, "tile": MatmulTile(128, 6)}, "which fit in shared"),
    ],
)
def test_refusals(shapes, how, says):
    x, w = (jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
    with pytest.raises(MatmulArgumentError, match=says):
        decode_matmul(x, w, **how)


@pytest.mark.parametrize(("num_rows", "num_stages"), [(64, 13), (128, 8)])
def test_tiles_that_fit_are_accepted(num_rows, num_stages):
    """One more stage than is accepted would exceed a program's shared memory."""
    tile, more = (MatmulTile(64, num) for num in (num_stages, num_stages + 1))
    assert tile.fits(num_rows, gated=False)
    room = 227 * 1024 - tile.shared_bytes(num_rows, gated=False)
    assert more.shared_bytes(num_rows, gated=False) - tile.shared_bytes(num_rows, gated=False) > room


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 8, 16, 64, 104, 128])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_on_a_gpu(name, num_rows):
    """Results repeat bit for bit, and other rows, even of NaN, do not change them."""
    depth, width, gated = PROJECTIONS[name]
    if (
        choose_backend(num_rows, depth, width, gated=gated, dtype="bfloat16", device=jax.devices()[0])
        == "xla"
    ):
        pytest.skip("the kernel does not run here")
    x, w = arrays(num_rows, depth, width, gated=gated)
    product = jax.jit(lambda x, w: decode_matmul(x, w, gated=gated))
    others = arrays(128, depth, width, gated=gated, seed=1)[0].at[64:].set(jnp.nan).at[0].set(x[0])
    expected = in_float64(x, w, gated=gated)
    first = None
    for _ in range(3):
        # Few rows run with the contents that many rows left in shared memory past their last.
        beside_others = product(others, w)
        got = product(x, w)
        first = got if first is None else first
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2**-8, atol=1e-3)
        np.testing.assert_array_equal(got, first)
        np.testing.assert_array_equal(beside_others[0], got[0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 32, 128])
@pytest.mark.parametrize("relu", [False, True])
def test_a_bias_on_a_gpu(num_rows, relu):
    """These are OPT-13B's first projection of the MLP, or its queries, keys and values."""
    if device_limit(jax.devices()[0]) is not None:
        pytest.skip("the kernel does not run here")
    x, w = arrays(num_rows, 5120, 20480 if relu else 15360, gated=False)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal(w.shape[1]), jnp.bfloat16)
    got = jax.jit(functools.partial(decode_matmul, relu=relu, **KERNEL))(x, w, bias)
    want = in_float64(x, w, bias, gated=False, relu=relu)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [5, 32, 104])
@pytest.mark.parametrize("name", ["gate_up", "out"])
def test_other_tiles_on_a_gpu(name, num_rows):
    """All tiles give the same bits: sums always run along the depth."""
    depth, width, gated = PROJECTIONS[name]
    if device_limit(jax.devices()[0]) is not None:
        pytest.skip("the kernel does not run here")
    x, w = arrays(num_rows, depth, width, gated=gated)
    expected = decode_matmul(x, w, gated=gated, **KERNEL)
    for tile in matmul_tiles.tiles(num_rows, depth, width, gated=gated):
        product = jax.jit(functools.partial(decode_matmul, gated=gated, tile=tile, **KERNEL))
        np.testing.assert_array_equal(product(x, w), expected, err_msg=f"{tile}")
