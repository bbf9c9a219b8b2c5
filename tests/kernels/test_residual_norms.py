"""Addition and the norm after it: the kernel and plain XLA against numpy in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice

from pallas_kernels.residual_norms import KINDS, NormArgumentError, RowBlock, add_and_norm, choose_backend
from pallas_kernels.residual_norms.specs import MAX_WIDTH, row_block
from tests.kernels.cross_lower import lower_for_cuda

SHAPE = jax.ShapeDtypeStruct
EPS = 1e-5
INTERPRETED = {"backend": "pallas_triton", "interpret": True}
XLA = {"backend": "xla"}
# Tolerances: one rounding to the dtype, and the float32 sums before it.
RELATIVE_ERROR = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
PRESET_WIDTHS = (64, 768, 4096, 5120, 8192, 9216)
# (num_rows, width, dtype of y, dtype of the normed rows and the weights); None: nothing is added
CASES = [
    (1, 64, "float32", "float32"),
    (3, 64, None, "bfloat16"),
    (17, 64, "bfloat16", "bfloat16"),
    (1, 768, "float16", "float16"),
    (17, 768, None, "float32"),
    (128, 768, "bfloat16", "bfloat16"),
    (1, 5120, None, "bfloat16"),
    (3, 5120, "bfloat16", "bfloat16"),
    (17, 5120, "float32", "float32"),
    (128, 5120, "bfloat16", "float32"),
    (3, 1, "float32", "float32"),
    (3, 100, "bfloat16", "bfloat16"),  # masked lanes
    (3, 1600, "float32", "float32"),
    (3, 1600, None, "float16"),
]
SHORT = [
    *((1, 64, "float32", "float32"), (17, 64, "bfloat16", "bfloat16"), (1, 768, "float16", "float16")),
    *((3, 5120, "bfloat16", "bfloat16"), (3, 100, "bfloat16", "bfloat16"), (3, 1600, None, "float16")),
]  # every type, a masked width and the widest


def random_arrays(num_rows, width, y_dtype, dtype, kind, seed=0):
    """Draw a stream with a nonzero mean, and an offset in the scale, so that a wrong mean or scale shows."""
    rng = np.random.default_rng([seed, num_rows, width])
    x = rng.normal(0.5, 3.0, (num_rows, width)).astype(np.float32)
    y = None if y_dtype is None else jnp.asarray(rng.normal(0, 1, (num_rows, width)), y_dtype)
    scale = jnp.asarray(rng.normal(1, 0.3, width), dtype)
    bias = jnp.asarray(rng.normal(0, 1, width), dtype) if kind == "layer" else None
    return x, y, scale, bias


def run(arrays, kind, dtype, **how):
    call = functools.partial(add_and_norm, kind=kind, eps=EPS, dtype=dtype, **how)
    return [np.asarray(part) for part in jax.jit(call)(*arrays)]


def in_float64(x, y, scale, bias, kind):
    wide, y, scale, bias = (
        None if a is None else np.asarray(a).astype(np.float64) for a in (x, y, scale, bias)
    )
    total = wide if y is None else wide + y
    centred = total - total.mean(-1, keepdims=True) if kind == "layer" else total
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPS)
    normed = normed * (1 if scale is None else scale) + (0 if bias is None else bias)
    return total, normed


def check(arrays, kind, dtype, **how):
    """Compare with float64, relative to the terms of the last sum, whose difference may be small."""
    got_total, got = run(arrays, kind, dtype, **how)
    total, normed = in_float64(*arrays, kind)
    assert got_total.dtype == np.float32 and got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(got_total, total.astype(np.float32))
    error = np.abs(got.astype(np.float64) - normed)
    bias = 0 if arrays[3] is None else np.abs(np.asarray(arrays[3]).astype(np.float64))
    limit = RELATIVE_ERROR[dtype] * np.abs(normed) + 4e-6 * (1 + np.abs(normed) + bias)
    assert (error <= limit).all(), float((error / limit).max())


@pytest.mark.parametrize("how", [XLA, INTERPRETED], ids=["xla", "kernel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SHORT else pytest.mark.long) for c in CASES]
)
def test_equals_numpy(case, kind, how):
    check(random_arrays(*case, kind), kind, case[3], **how)


@pytest.mark.parametrize("how", [XLA, INTERPRETED], ids=["xla", "kernel"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_weights(kind, how):
    x, y, _, _ = random_arrays(3, 768, "bfloat16", "float32", kind)
    check((x, y, None, None), kind, "float32", **how)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks(kind):
    """All blocks give the same result, even one that leaves most lanes idle."""
    arrays = random_arrays(3, 768, "bfloat16", "float32", kind)
    for block in (RowBlock(64, 1), RowBlock(512, 4), RowBlock(2048, 16)):
        check(arrays, kind, "float32", block=block, **INTERPRETED)


@pytest.mark.parametrize(("kind", "width"), [("rms", 768), ("layer", 100)])
def test_a_row_depends_on_that_row_alone(kind, width):
    """Its bits depend neither on the number of rows nor on other rows, even of NaN."""
    x, y, scale, bias = random_arrays(17, width, "float32", "float32", kind)
    whole = run((x, y, scale, bias), kind, "float32", **INTERPRETED)
    for begin, end in ((3, 6), (16, 17)):
        few = run((x[begin:end], y[begin:end], scale, bias), kind, "float32", **INTERPRETED)
        for part, all_rows in zip(few, whole, strict=True):
            np.testing.assert_array_equal(part, all_rows[begin:end])
    x[5:], y = np.nan, y.at[7:].set(np.inf)
    for part, all_rows in zip(run((x, y, scale, bias), kind, "float32", **INTERPRETED), whole, strict=True):
        np.testing.assert_array_equal(part[:5], all_rows[:5])
        assert np.isnan(part[5:]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_separate_addition_changes_no_bit(kind):
    """Between groups of layers the sum is computed before the kernel, not in it."""
    x, y, scale, bias = random_arrays(3, 768, "bfloat16", "bfloat16", kind)
    together = run((x, y, scale, bias), kind, "bfloat16", **INTERPRETED)
    apart = run((x + y, None, scale, bias), kind, "bfloat16", **INTERPRETED)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("y_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_those_of_the_xla_form(kind, y_dtype):
    """Training uses the same models."""
    arrays = random_arrays(3, 64, y_dtype, "float32", kind)

    def loss(arrays, how):
        total, normed = add_and_norm(*arrays, kind=kind, eps=EPS, dtype="float32", **how)
        return jnp.sum(jnp.sin(total)) + jnp.sum(normed**3)

    gradients = [jax.jit(jax.grad(functools.partial(loss, how=how)))(arrays) for how in (XLA, INTERPRETED)]
    expected, got = (jax.tree.leaves(tree) for tree in gradients)
    assert len(got) == sum(array is not None for array in arrays)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        pytest.param(kind, width, marks=pytest.mark.long if (i + j) % 2 else ())
        for i, width in enumerate([*PRESET_WIDTHS, 1600, MAX_WIDTH])
        for j, kind in enumerate(KINDS)
    ],
)
def test_lowers_for_cuda(kind, width):
    """All layers share one kernel for each form that a group of layers has.

    JAX distinguishes a stream that is an argument from one that a kernel wrote, so there may be one more.
    """
    vector = SHAPE((width,), jnp.bfloat16)
    bias = vector if kind == "layer" else None

    def layers(x, scale, bias):
        call = functools.partial(
            add_and_norm, kind=kind, eps=EPS, dtype=jnp.bfloat16, backend="pallas_triton"
        )
        x, normed = call(x, None, scale, bias)
        for _ in range(8):
            x, normed = call(x, -normed, scale, bias)
        return x, normed

    text = lower_for_cuda(layers, SHAPE((128, width), jnp.float32), vector, bias)
    assert 2 <= text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") <= 3
    assert text.count("call @triton_add_and_norm") == 9


def test_blocks_avoid_masks_where_possible():
    for width in (*PRESET_WIDTHS, 2560, 7168, 12288):
        lanes = row_block(width).lanes
        assert width % lanes == 0 and (lanes >= 128 or lanes == width)
    for width in (1, 2, 80, 100, 1600, 5121, MAX_WIDTH):
        lanes, num_warps = row_block(width)
        assert lanes & (lanes - 1) == 0 and lanes < 2 * max(width, 512) and num_warps in (1, 2, 4, 8, 16)


def test_the_back_end_is_chosen_by_device_and_width(monkeypatch):
    device = jax.devices("cpu")[0]
    assert choose_backend(5120, device) == "xla"
    assert choose_backend(5120, None) == "xla"
    assert choose_backend(5120, AbstractDevice("NVIDIA H200", None, platform="cuda")) == "pallas_triton"
    assert choose_backend(5120, AbstractDevice("TPU v5", 1, platform="tpu")) == "xla"
    monkeypatch.setattr("pallas_kernels.residual_norms.api.triton_device_limit", lambda device: None)
    assert choose_backend(5120, device) == "pallas_triton"
    assert choose_backend(MAX_WIDTH + 1, device) == "xla"


def test_auto_selects_plain_xla_on_a_cpu():
    arrays = random_arrays(3, 64, "float32", "float32", "rms")
    if jax.default_backend() == "cpu":
        for one, other in zip(
            run(arrays, "rms", "float32"), run(arrays, "rms", "float32", **XLA), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_what_does_not_fit_is_named():
    call = functools.partial(add_and_norm, kind="rms", eps=EPS, dtype="float32")
    x, vector = jnp.zeros((3, 64)), jnp.zeros(64)
    wrong = {
        r"x is bfloat16\[3, 64\]": lambda: call(x.astype(jnp.bfloat16), None),
        r"x is float32\[64\]": lambda: call(vector, None),
        r"x is float32\[0, 64\]": lambda: call(x[:0], None),
        r"y is float32\[2, 64\], but must be \[3, 64\]": lambda: call(x, x[:2]),
        "y is int32": lambda: call(x, x.astype(jnp.int32)),
        r"scale is float32\[63\], but must be \[64\]": lambda: call(x, x, vector[1:]),
        r"bias is float32\[3, 64\], but must be \[64\]": lambda: call(x, x, vector, x),
        "kind is 'batch'": lambda: call(x, x, kind="batch"),
        "dtype is int8": lambda: call(x, x, dtype="int8"),
        "backend is 'cuda'": lambda: call(x, x, backend="cuda"),
        "use backend 'xla' for 16385": lambda: call(jnp.zeros((1, MAX_WIDTH + 1)), None, **INTERPRETED),
    }
    for message, call_it in wrong.items():
        with pytest.raises(NormArgumentError, match=message):
            call_it()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 100, 1600, 5120, 9216])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind, width):
    """All dtypes; rows have the same bits for any number of rows."""
    for y_dtype, dtype in ((None, "float16"), ("float32", "float32")):
        check(random_arrays(17, width, y_dtype, dtype, kind), kind, dtype, backend="pallas_triton")
    arrays = random_arrays(2048, width, "bfloat16", "bfloat16", kind)
    check(arrays, kind, "bfloat16", backend="pallas_triton")
    x, y, scale, bias = arrays
    last = (x[-1:], y[-1:], scale, bias)
    parts = (run(rows, kind, "bfloat16", backend="pallas_triton") for rows in (last, arrays))
    for part, all_rows in zip(*parts, strict=True):
        np.testing.assert_array_equal(part, all_rows[-1:])
