"""Attention of one query per row over a ring: the kernel and plain XLA against numpy in float64."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model_defs import PRESETS
from pallas_kernels.attention_names import RING_DECODE_BACKENDS
from pallas_kernels.ragged_paged_attention import AttentionArgumentError, AttentionHeads
from pallas_kernels.ragged_paged_attention.shapes import Heads
from pallas_kernels.ring_decode import (
    TABLE,
    DecodeBlock,
    choose_backend,
    default_block,
    device_limit,
    ring_decode_attention,
)
from pallas_kernels.ring_decode.blocks import MAX_NUM_SPLITS
from tests.kernels.cross_lower import lower_for_cuda

SHAPE = jax.ShapeDtypeStruct
SCALE = 0.17
GARBAGE = 3e3
TOLERANCE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
BLOCK = DecodeBlock(16, 4, 2, 3)
XLA, INTERPRETED = {"backend": "xla"}, {"backend": "pallas_triton", "interpret": True}


def short_and_long(every: Iterable[Any], *short: Any) -> list[Any]:
    """Return all cases as parameters of a test; all but a few are marked long."""
    params = [one if isinstance(one, tuple) else (one,) for one in every]
    few = [one if isinstance(one, tuple) else (one,) for one in short]
    assert set(few) <= set(params)
    return [pytest.param(*one, marks=() if one in few else pytest.mark.long) for one in params]


class Ring(NamedTuple):
    """Arrays in which only visible columns are numbers; `place` is an argument of each call."""

    q: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    num_columns: np.ndarray


def seen(num_columns: int, place: int, length: int) -> np.ndarray:
    """Return the places of a row's columns, the oldest first."""
    return (place - num_columns + 1 + np.arange(num_columns)) % length


def make_ring(seed, num_columns, place, heads, length, dtype="float32", garbage=np.nan):
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    batch = len(num_columns)
    q = rng.standard_normal((batch, heads.num_q_heads, heads.head_dim)).astype(dtype)
    pools = [
        rng.standard_normal((batch, heads.num_kv_heads, length, heads.head_dim)).astype(dtype) for _ in "kv"
    ]
    for row, num in enumerate(num_columns):
        free = np.setdiff1d(np.arange(length), seen(num, place, length))
        for pool in pools:
            pool[row][:, free] = garbage
    return Ring(q, *pools, np.array(num_columns, np.int32))


def in_float64(ring: Ring, place: int) -> np.ndarray:
    group, length = ring.q.shape[1] // ring.keys.shape[1], ring.keys.shape[2]
    out = np.zeros(ring.q.shape)
    for row, num in enumerate(ring.num_columns):
        places = seen(num, place, length)
        for head in range(ring.q.shape[1]):
            keys, values = (
                pool[row, head // group, places].astype(np.float64) for pool in (ring.keys, ring.values)
            )
            scores = SCALE * keys @ ring.q[row, head].astype(np.float64)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values / weights.sum()
    return out


@functools.cache
def attend(**how):
    """Return attention, jitted once per variant, so that places and lengths share a program."""
    return jax.jit(functools.partial(ring_decode_attention, sm_scale=SCALE, **how))


def run(ring: Ring, place: int, **how) -> np.ndarray:
    q, keys, values, num_columns = map(jnp.asarray, ring)
    return np.asarray(attend(**how)(q, keys, values, jnp.int32(place), num_columns))


def check(ring: Ring, place: int, *, largest_score: float = 0.0, **how) -> None:
    """Compare with a tolerance that grows with the scores, whose rounding changes the weights."""
    out, expected = run(ring, place, **how), in_float64(ring, place)
    assert out.dtype == ring.q.dtype
    limit = TOLERANCE[ring.q.dtype.name] + 4 * float(np.finfo(np.float32).eps) * largest_score
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("stride", short_and_long((1, 13), 13))
@pytest.mark.parametrize("how", [XLA, INTERPRETED | {"block": BLOCK}], ids=["xla", "kernel"])
def test_every_place_of_the_wrap(how, stride):
    """Rows have one column, all, or some; free columns hold large numbers for XLA, NaN for the kernel."""
    length, garbage = 40, GARBAGE if how is XLA else np.nan
    for place in range(0, length, stride):
        num_columns = [1, length, 7, 1 + place, length - place]
        check(make_ring(place, num_columns, place, Heads(4, 2, 32), length, garbage=garbage), place, **how)


@pytest.mark.parametrize(
    ("num_splits", "whole_loop"),
    short_and_long([(num, whole) for num in range(1, 9) for whole in (False, True)], (1, False), (8, True)),
)
def test_splits(num_splits, whole_loop):
    """All lengths around the ends of parts and blocks, ten rows at a time."""
    length = 200
    block = DecodeBlock(32, 4, 2, num_splits, whole_loop)
    for first in range(1, length + 1, 37):
        num_columns = [min(length, first + one) for one in (0, 1, 15, 16, 17, 31, 32, 33, 36, 64)]
        place = (11 * first) % length
        ring = make_ring(first, num_columns, place, Heads(2, 1, 32), length)
        check(ring, place, block=block, **INTERPRETED)


@pytest.mark.parametrize(
    ("dtype", "group"),
    short_and_long(
        [(dtype, group) for dtype in TOLERANCE for group in (1, 4, 5, 8, 20)],
        ("float16", 1),
        ("bfloat16", 20),
    ),
)
def test_groups_and_dtypes(dtype, group):
    """The query heads of a KV head are rows of one matrix, for any number of heads."""
    ring = make_ring(group, [1, 90, 64, 33], 20, Heads(2 * group, 2, 64), 96, dtype)
    check(ring, 20, block=DecodeBlock(32, 4, 2, 2), **INTERPRETED)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    short_and_long(
        [(head_dim, dtype) for head_dim in (32, 64, 128, 256) for dtype in TOLERANCE],
        (64, "float32"),
        (256, "bfloat16"),
    ),
)
def test_head_dims_with_the_block_chosen_by_shape(head_dim, dtype):
    ring = make_ring(head_dim, [600, 17], 70, Heads(4, 2, head_dim), 600, dtype)
    check(ring, 70, **INTERPRETED)


@pytest.mark.parametrize("batch", short_and_long(range(1, 11), 10))
def test_batches(batch):
    rng = np.random.default_rng(batch)
    num_columns = rng.integers(1, 65, batch).tolist()
    place = int(rng.integers(64))
    ring = make_ring(batch, num_columns, place, Heads(4, 4, 32), 64)
    check(ring, place, block=BLOCK, **INTERPRETED)
    check(ring._replace(**{name: np.nan_to_num(getattr(ring, name)) for name in ("keys", "values")}), place)


@pytest.mark.parametrize(
    ("block_kv", "length"),
    short_and_long([(size, length) for size in (16, 64, 256) for length in (16, 48)], (64, 48)),
)
def test_blocks_wider_than_a_part_or_the_ring(block_kv, length):
    ring = make_ring(length, [1, length, 9], 3, Heads(2, 2, 32), length)
    check(ring, 3, block=DecodeBlock(block_kv, 4, 1, 2), **INTERPRETED)


def test_free_columns_do_not_matter():
    """Results have the same bits with large, infinite or NaN columns."""
    found = []
    for garbage in (0.0, GARBAGE, np.inf, np.nan):
        ring = make_ring(5, [3, 40, 21], 2, Heads(4, 2, 32), 64, garbage=garbage)
        found.append(run(ring, 2, block=BLOCK, **INTERPRETED))
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])


@pytest.mark.parametrize("num_splits", [1, 3])
def test_invalid_numbers_of_columns_are_clipped(num_splits):
    """A row has at least one and at most all columns; results equal those of the clipped numbers."""
    length, place, how = 40, 11, INTERPRETED | {"block": BLOCK._replace(num_splits=num_splits)}
    ring = make_ring(8, [1, length, 7], place, Heads(4, 2, 32), length)
    expected = run(ring, place, **how)
    for num_columns in ([0, length, 7], [-3, length, 7], [1, length + 5, 7], [1, 2**31 - 1, 7]):
        given = ring._replace(num_columns=np.array(num_columns, np.int32))
        np.testing.assert_array_equal(run(given, place, **how), expected)


def test_a_row_depends_on_that_row_alone():
    """Its bits depend neither on the number of rows nor on other rows."""
    ring = make_ring(6, [30, 12, 64], 50, Heads(4, 2, 32), 64)
    whole = run(ring, 50, block=BLOCK, **INTERPRETED)
    one = Ring(*(array[1:2] for array in ring))
    np.testing.assert_array_equal(run(one, 50, block=BLOCK, **INTERPRETED), whole[1:2])
    others = ring._replace(num_columns=np.array([1, 12, 1], np.int32))
    np.testing.assert_array_equal(run(others, 50, block=BLOCK, **INTERPRETED)[1], whole[1])


def test_scores_far_from_zero():
    """The maximum is subtracted before the exponential, in parts and in their merge."""
    ring = make_ring(7, [64, 40], 9, Heads(2, 2, 32), 64)
    far = ring._replace(q=ring.q * 300)
    scores = SCALE * np.einsum("bhd,bhcd->bhc", far.q.astype(np.float64), far.keys)
    largest_score = float(np.nanmax(np.abs(scores)))
    assert largest_score > 500  # exp(500) is more than float32 holds
    check(far, 9, largest_score=largest_score, block=BLOCK, **INTERPRETED)


@pytest.mark.parametrize("num_splits", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    ("heads", "dtype"),
    short_and_long(
        [
            (Heads(32, 32, 128), "bfloat16"),
            (Heads(64, 8, 128), "float16"),
            (Heads(10, 2, 64), "float32"),
            (Heads(16, 2, 256), "bfloat16"),
            (Heads(4, 4, 256), "float32"),
        ],
        (Heads(64, 8, 128), "float16"),
        (Heads(10, 2, 64), "float32"),
    ),
    ids=str,
)
def test_lowers_for_cuda(heads, dtype, num_splits):
    """All layers share one kernel, and a merge if there are parts."""
    batch, length = 8, 8192
    block = default_block(
        batch=batch,
        num_kv_heads=heads.num_kv_heads,
        length=length,
        head_dim=heads.head_dim,
        itemsize=jnp.dtype(dtype).itemsize,
    )._replace(num_splits=num_splits)

    def layers(q, keys, values, place, num_columns):
        call = functools.partial(ring_decode_attention, sm_scale=SCALE, backend="pallas_triton", block=block)
        for _ in range(3):
            q = call(q, keys, values, place, num_columns)
        return q

    q = SHAPE((batch, heads.num_q_heads, heads.head_dim), dtype)
    pool = SHAPE((batch, heads.num_kv_heads, length, heads.head_dim), dtype)
    text = lower_for_cuda(layers, q, pool, pool, SHAPE((), jnp.int32), SHAPE((batch,), jnp.int32))
    num_kernels = text.count("stablehlo.custom_call @__gpu$xla.gpu.triton")
    per_call = 1 if num_splits == 1 else 2
    # JAX distinguishes a query that is an argument from one that a kernel wrote, so there may be two of each.
    assert per_call <= num_kernels <= 2 * per_call
    assert text.count("call @triton_ring_decode") == 3


@pytest.mark.parametrize("name", PRESETS)
def test_the_kernel_of_a_preset_lowers_for_cuda(name, offsets):
    """Supported models lower; in a ring of more than 2**31 elements offsets have 64 bits."""
    model = PRESETS[name]
    heads = AttentionHeads(model.num_heads, model.num_kv_heads, model.head_dim, jnp.bfloat16)
    device = jax.devices()[0]
    try:
        choose_backend("pallas_triton", heads, device)
    except AttentionArgumentError as error:
        assert error.field == "head_dim"
        return
    q = SHAPE((16, model.num_heads, model.head_dim), jnp.bfloat16)
    length = 2**32 // (16 * model.num_kv_heads * model.head_dim)
    pool = SHAPE((16, model.num_kv_heads, length, model.head_dim), jnp.bfloat16)
    assert pool.size > 2**31
    call = functools.partial(ring_decode_attention, sm_scale=SCALE, backend="pallas_triton")
    text = lower_for_cuda(call, q, pool, pool, SHAPE((), jnp.int32), SHAPE((16,), jnp.int32))
    assert "xla.gpu.triton" in text
    block = default_block(
        batch=16, num_kv_heads=model.num_kv_heads, length=length, head_dim=model.head_dim, itemsize=2
    )
    # Keys and values, with and without masks; no other array is that large.
    assert (
        offsets.count(f"tensor<{block.block_kv}x{model.head_dim}xi64>") == 4 == "".join(offsets).count("i64")
    )


@pytest.fixture
def offsets(monkeypatch):
    """Record the types of the offsets that lowered kernels add to addresses."""
    from jax._src.lib.triton import dialect

    found: list[str] = []
    addptr = dialect.addptr
    monkeypatch.setattr(
        dialect,
        "addptr",
        lambda result, ptr, offset: (found.append(str(offset.type)), addptr(result, ptr, offset))[1],
    )
    return found


def test_float32_is_ieee(monkeypatch):
    """No dot of a float32 kernel asks for TF32."""
    from jax._src.lib.triton import dialect

    seen_precisions = []
    dot = dialect.dot
    monkeypatch.setattr(
        dialect, "dot", lambda *a, **k: (seen_precisions.append(k["input_precision"]), dot(*a, **k))[1]
    )
    q, pool = SHAPE((2, 6, 64), jnp.float32), SHAPE((2, 2, 512, 64), jnp.float32)
    call = functools.partial(ring_decode_attention, sm_scale=SCALE, backend="pallas_triton")
    lower_for_cuda(call, q, pool, pool, SHAPE((), jnp.int32), SHAPE((2,), jnp.int32))
    assert seen_precisions and set(seen_precisions) == {dialect.InputPrecision.IEEE}


@pytest.mark.parametrize("batch", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
@pytest.mark.parametrize("length", [16, 512, 8192, 12288])
def test_programs_fill_the_device_a_few_times(batch, num_kv_heads, length):
    """This holds where rows are long enough to be split."""
    block = default_block(batch=batch, num_kv_heads=num_kv_heads, length=length, head_dim=128, itemsize=2)
    num_programs = batch * num_kv_heads * block.num_splits
    assert 1 <= block.num_splits <= MAX_NUM_SPLITS
    assert block.num_splits == 1 or num_programs < 4 * 132
    can_be_cut = 2 * block.num_splits <= min(MAX_NUM_SPLITS, length // 256)
    assert num_programs >= 2 * 132 or not can_be_cut


def gpu(capability: str) -> Any:
    return SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="some")


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_blocks_fit_into_shared_memory(head_dim, itemsize):
    """Unknown GPUs have 99 KiB. Other devices have the blocks measured on Hopper."""
    of_ring = {"batch": 8, "num_kv_heads": 8, "length": 8192, "head_dim": head_dim, "itemsize": itemsize}
    rows = [("8.0", 163), ("8.6", 99), ("8.7", 99), ("8.9", 99), ("9.0", 227), ("10.0", 227), ("12.0", 99)]
    for capability, kib in [*rows, ("12.1", 99), ("13.0", 99)]:
        block = default_block(**of_ring, device=gpu(capability))
        held = 2 * block.num_stages * block.block_kv * head_dim * itemsize
        assert held <= (kib - 2) * 1024, (capability, block)
        assert block.num_splits == default_block(**of_ring).num_splits
    measured = default_block(**of_ring, device=gpu("9.0"))
    assert measured == default_block(**of_ring) == default_block(**of_ring, device=jax.devices("cpu")[0])
    if (head_dim, itemsize) == (128, 2):
        assert measured[:3] == (128, 4, 2) and default_block(**of_ring, device=gpu("8.9"))[:3] == (32, 2, 4)


def test_the_back_end_is_chosen_by_device_and_heads(monkeypatch):
    device = jax.devices("cpu")[0]
    heads = AttentionHeads(32, 8, 128, jnp.bfloat16)
    choice = choose_backend("auto", heads, device)
    assert choice.name == "xla" and "NVIDIA GPU" in choice.reason
    assert "NVIDIA GPU" in device_limit("pallas_triton", device)
    assert device_limit("auto", device) is device_limit("xla", device) is None
    assert choose_backend("pallas_triton", heads, device, named_in="x").reason == "named in x"
    supported = TABLE["pallas_triton"]._replace(device_limit=lambda device: None)
    monkeypatch.setitem(TABLE, "pallas_triton", supported)
    assert choose_backend("auto", heads, device).name == "pallas_triton"
    for unsupported in (
        AttentionHeads(32, 8, 80, jnp.bfloat16),
        AttentionHeads(65, 1, 128, jnp.bfloat16),
        AttentionHeads(32, 8, 128, jnp.float8_e4m3fn),
    ):
        assert choose_backend("auto", unsupported, device).name == "xla"
    assert set(RING_DECODE_BACKENDS) == {"auto", *TABLE}


def test_what_does_not_fit_is_named():
    q, pool = jnp.zeros((2, 4, 32)), jnp.zeros((2, 2, 48, 32))
    place, num_columns = jnp.int32(0), jnp.ones(2, jnp.int32)
    good = {"q": q, "keys": pool, "values": pool, "place": place, "num_columns": num_columns}
    wrong = [
        ("q", {"q": q[0]}),
        ("q", {"q": q[:0]}),
        ("keys", {"keys": pool[:1]}),
        ("keys", {"keys": pool[..., :16]}),
        ("keys", {"keys": pool.astype(jnp.bfloat16)}),
        ("keys", {"keys": pool[:, :, :0]}),
        ("values", {"values": pool[:, :, :16]}),
        ("values", {"values": pool.astype(jnp.float16)}),
        ("place", {"place": num_columns}),
        ("place", {"place": jnp.float32(0)}),
        ("num_columns", {"num_columns": place}),
        ("num_columns", {"num_columns": jnp.ones(2)}),
        ("num_q_heads", {"q": q[:, :3]}),
        ("sm_scale", {"sm_scale": 0.0}),
        ("sm_scale", {"sm_scale": float("inf")}),
        ("backend", {"backend": "pallas_mosaic_gpu"}),
        ("block.block_kv", {"block": DecodeBlock(48, 4, 2, 1), **INTERPRETED}),
        ("block.block_kv", {"block": DecodeBlock(8, 4, 2, 1), **INTERPRETED}),
        ("block.num_splits", {"block": DecodeBlock(16, 4, 2, 0), **INTERPRETED}),
        ("block.num_splits", {"block": DecodeBlock(16, 4, 2, 33), **INTERPRETED}),
        ("head_dim", {"q": q[..., :8], "keys": pool[..., :8], "values": pool[..., :8], **INTERPRETED}),
        ("num_q_heads / num_kv_heads", {"q": jnp.zeros((2, 130, 32)), **INTERPRETED}),
    ]
    for field, changes in wrong:
        with pytest.raises(AttentionArgumentError) as caught:
            ring_decode_attention(**({"sm_scale": SCALE} | good | changes))
        assert caught.value.field == field, caught.value


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "heads",
    [Heads(4, 4, 32), Heads(10, 2, 64), Heads(32, 32, 128), Heads(32, 8, 128), Heads(16, 2, 256)],
    ids=str,
)
def test_on_a_gpu(heads, dtype):
    """Many windows with NaN around them; repeated runs give the same bits."""
    length = 1536
    for seed in range(6):
        rng = np.random.default_rng(seed)
        num_columns = [1, length, *rng.integers(1, length, 4).tolist()]
        place = int(rng.integers(length))
        ring = make_ring(seed, num_columns, place, heads, length, dtype)
        expected = in_float64(ring, place)
        for num_splits in (None, 1, 5):
            block = None
            if num_splits is not None:
                block = default_block(
                    batch=6,
                    num_kv_heads=heads.num_kv_heads,
                    length=length,
                    head_dim=heads.head_dim,
                    itemsize=ring.q.dtype.itemsize,
                )._replace(num_splits=num_splits)
            out = run(ring, place, backend="pallas_triton", block=block)
            limit = TOLERANCE[dtype]
            np.testing.assert_allclose(out.astype(np.float64), expected, rtol=limit, atol=limit)
            np.testing.assert_array_equal(run(ring, place, backend="pallas_triton", block=block), out)
