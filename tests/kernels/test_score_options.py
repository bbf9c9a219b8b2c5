"""Windows, softcap and sinks: the reference, plain XLA, and which back end supports what."""

from __future__ import annotations

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    AttentionHeads,
    build_tiles,
    choose_backend,
    ragged_paged_attention,
    tile_spec,
    xla,
)
from pallas_kernels.ragged_paged_attention.backends import MAX_WINDOW
from pallas_kernels.ragged_paged_attention.page_formats import PageKind
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.batches import (
    Batch,
    Room,
    assert_equals_reference,
    hide_keys,
    hide_pages,
    make_batch,
    random_rows,
    stored,
)
from tests.kernels.planting import plant

SCALE = 0.17
HEADS = Heads(4, 2, 32)
ROWS = [(1, 70), (5, 33), (40, 40), (1, 1), (0, 12), (60, 250), (17, 200), (8, 8)]
ROOM = Room(num_tokens=140, max_num_seqs=9, pages_per_seq=17, num_pages=60)
WINDOWS = (1, 31, 32, 33, 40, 130)
SINKS = np.array([-20, 0, 3, 20], np.float32)
FORMS = ["one_after_another", "together"]


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    """Return attention of one head's queries at the end of its keys, in float64."""
    window, softcap, sink = (options.get(name) for name in ("window", "softcap", "sink"))
    scores = q.astype(np.float64) @ k.T * SCALE
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    visible = (distance >= 0) & (distance < (window or len(k)))
    weights = np.where(visible, np.exp(scores), 0)
    total = weights.sum(axis=1, keepdims=True)
    out = weights @ v / total
    # The result times sigmoid(lse - sink).
    return out if sink is None else out / (1 + np.exp(sink - np.log(total)))


@pytest.mark.parametrize(
    "options",
    [dict(zip(("window", "softcap", "sinks"), values, strict=True)) for values in itertools.product(
        (None, 5), (None, 0.7), (None, SINKS))],
    ids=lambda options: "-".join(name for name, value in options.items() if value is not None) or "none",
)  # fmt: skip
def test_reference_equals_the_formulas(options: dict[str, Any]) -> None:
    rows = [(1, 40), (7, 7), (12, 40)]
    batch = make_batch(np.random.default_rng(0), rows, HEADS)
    out = reference_attention(*map(np.asarray, batch), sm_scale=SCALE, **options)
    for row, (q_len, kv_len) in enumerate(rows):
        pages = batch.page_indices[row, : -(-kv_len // 16)]
        kv = np.asarray(batch.kv_pages)[pages].reshape(-1, 2 * HEADS.num_kv_heads, HEADS.head_dim)[:kv_len]
        tokens = slice(int(batch.cu_q_lens[row]), int(batch.cu_q_lens[row]) + q_len)
        for head in range(HEADS.num_q_heads):
            k, v = kv[:, 2 * (head // 2)], kv[:, 2 * (head // 2) + 1]
            sink = None if options["sinks"] is None else float(SINKS[head])
            expected = dense(np.asarray(batch.q[tokens, head]), k, v, **options | {"sink": sink})
            np.testing.assert_allclose(out[tokens, head], expected, rtol=1e-5, atol=1e-6)


@functools.cache
def compiled_form(form: str, window: int | None, softcap: float | None = None, kv_dtype: Any = None) -> Any:
    """Return one form of the back end `xla`; it takes a batch and, if there are any, sinks."""
    attend = functools.partial(getattr(xla, form), sm_scale=SCALE, kind=PageKind(16, kv_dtype))
    return jax.jit(lambda batch, *sinks: attend(*batch, *sinks, window=window, softcap=softcap))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "window", [pytest.param(window, marks=() if window == 33 else pytest.mark.long) for window in WINDOWS]
)
def test_xla_with_windows(window: int, form: str) -> None:
    """Keys and values before all windows of a row hold NaN, then whole pages of another index as well."""
    batch = make_batch(np.random.default_rng(window), ROWS, HEADS, room=ROOM)
    out = compiled_form(form, window)(batch)
    assert_equals_reference(out, batch, SCALE, window=window)
    np.testing.assert_array_equal(compiled_form(form, window)(hide_keys(batch, window)), out)
    hidden = hide_pages(batch, window, dummy=unused_page(batch))
    np.testing.assert_array_equal(compiled_form(form, window)(hidden), out)


def unused_page(batch: Batch) -> int:
    """Return a page of NaN that no row has."""
    pages = np.asarray(batch.kv_pages)
    free = np.flatnonzero(np.isnan(pages).all(axis=(1, 2, 3)))
    return int(free[0])


@pytest.mark.parametrize("form", FORMS)
def test_xla_with_all_options(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have two pages, so that windows begin in the middle of a loop."""
    monkeypatch.setattr(xla, "_MAX_CACHED_KEYS", 32)
    monkeypatch.setattr(xla, "_MAX_BLOCK_KEYS", 32)
    batch = make_batch(np.random.default_rng(3), ROWS, HEADS, room=ROOM)
    options: dict[str, Any] = {"window": 40, "softcap": 0.6}
    attend = compiled_form.__wrapped__(form, *options.values())
    assert_equals_reference(attend(batch, SINKS), batch, SCALE, sinks=SINKS, **options)
    assert_equals_reference(attend(hide_keys(batch, 40), SINKS), batch, SCALE, sinks=SINKS, **options)


FORM = "the function that computes a form"
FIRST = "positions - (window - 1)"
BUGS: dict[str, tuple[str, str, str]] = {
    "a key too many": ("_first_keys", FIRST, "positions - window"),
    "a key too few": ("_first_keys", FIRST, "positions - (window - 2)"),
    "softcap after the mask": (
        FORM, "scores = jnp.where(visible, scores, _MASKED)",
        "scores = _capped(jnp.where(visible, scores, _MASKED), softcap)",
    ),
    "no sinks": (FORM, "total = total + jnp.exp(", "total + jnp.exp("),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_show(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(np.random.default_rng(0), ROWS, HEADS, room=ROOM)
    function, old, new = BUGS[name]
    if function == FORM:
        function = {"one_after_another": "_attend_alone", "together": "together"}[form]
    plant(monkeypatch, xla, function, old, new)
    out = compiled_form.__wrapped__(form, 40, 0.6)(batch, SINKS)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equals_reference(out, batch, SCALE, window=40, softcap=0.6, sinks=SINKS)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_of_all_keys_changes_no_bit(form: str) -> None:
    batch = make_batch(np.random.default_rng(4), ROWS, HEADS, room=ROOM)
    whole = np.asarray(compiled_form(form, None)(batch))
    for window in (250, MAX_WINDOW):
        np.testing.assert_array_equal(np.asarray(compiled_form(form, window)(batch)), whole)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_batches_with_a_window(form: str, seed: int) -> None:
    """One program, whose window is shorter than some ranges of queries and longer than others."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, random_rows(rng, ROOM, 16, 90), HEADS, room=ROOM)
    assert_equals_reference(compiled_form(form, 33)(hide_keys(batch, 33)), batch, SCALE, window=33)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.long)])
def test_xla_over_pages_in_8_bits(kv_dtype: str, form: str) -> None:
    batch = stored(make_batch(np.random.default_rng(5), ROWS, HEADS, room=ROOM), kv_dtype)
    out = compiled_form(form, 40, None, kv_dtype)(hide_pages(batch, 40))
    assert_equals_reference(out, batch, SCALE, page_size=16, kv_dtype=kv_dtype, window=40)


def test_sinks_are_split_over_devices() -> None:
    batch = make_batch(np.random.default_rng(5), ROWS[:4], HEADS, room=ROOM)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    heads, none = jax.sharding.PartitionSpec(None, "tp"), jax.sharding.PartitionSpec()
    in_specs = (heads, jax.sharding.PartitionSpec(None, None, "tp"), none, none, none, none)
    sharded = jax.shard_map(
        lambda sinks, *batch: ragged_paged_attention(
            *batch, sm_scale=SCALE, window=40, softcap=3.0, sinks=sinks, backend="xla"
        ),
        mesh=mesh, in_specs=(jax.sharding.PartitionSpec("tp"), *in_specs), out_specs=heads,
    )  # fmt: skip
    options: dict[str, Any] = {"window": 40, "softcap": 3.0, "sinks": SINKS}
    assert_equals_reference(jax.jit(sharded)(jnp.asarray(SINKS), *batch), batch, SCALE, **options)


def test_reference_is_a_backend_with_options() -> None:
    batch = make_batch(np.random.default_rng(0), ROWS[:3], HEADS)
    options: dict[str, Any] = {"window": 7, "softcap": 2.0, "sinks": jnp.asarray(SINKS)}
    out = ragged_paged_attention(*batch, sm_scale=SCALE, backend="reference", **options)
    assert_equals_reference(out, batch, SCALE, **options | {"sinks": SINKS})


SPEC: dict[str, Any] = dict(
    num_tokens=8, max_num_seqs=4, num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=16, dtype="float32"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, f"window = 0: must be None or an integer from 1 to {MAX_WINDOW}"),
        ({"window": 2**31}, "window = 2147483648: must be None or"),
        ({"window": 32.0}, r"window = 32\.0: must be None or"),
        ({"softcap": 0.0}, r"softcap = 0\.0: must be None, or positive and finite"),
        ({"softcap": float("inf")}, "softcap = inf: must be"),
        ({"backend": "jax_triton", "window": 8}, "window = 8: jax_triton does not support it; use backend"),
        ({"backend": "jax_triton", "has_sinks": True}, "sinks = True: jax_triton does not support it"),
        ({"backend": "pallas_mosaic_gpu", "dtype": "bfloat16", "head_dim": 128, "softcap": 30.0},
         r"softcap = 30\.0: pallas_mosaic_gpu does not support it; use backend 'pallas_triton' or 'xla'"),
    ],
)  # fmt: skip
def test_options_that_are_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # as with the extra 'triton'
    with pytest.raises(AttentionArgumentError, match=message):
        tile_spec(**{**SPEC, **changes})


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (np.zeros(3, np.float32), r"sinks\.shape = \(3,\): must be \(4,\)"),
        (np.zeros(4, np.float16), r"sinks\.dtype = 'float16': must be float32"),
    ],
)
def test_sinks_of_another_shape_are_refused(sinks: np.ndarray, message: str) -> None:
    batch = make_batch(np.random.default_rng(0), [(1, 5)], HEADS)
    with pytest.raises(AttentionArgumentError, match=message):
        ragged_paged_attention(*batch, sm_scale=1.0, sinks=jnp.asarray(sinks))


@pytest.mark.parametrize(("made", "given_"), [(5, None), (None, 5), (5, 6)])
def test_the_window_of_other_metadata_is_refused(made: int | None, given_: int | None) -> None:
    batch = make_batch(np.random.default_rng(0), [(1, 5)], HEADS)
    spec = tile_spec(**SPEC | {"num_tokens": len(batch.q), "window": made})
    tiles = build_tiles(spec, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)
    with pytest.raises(ValueError, match=f"window = {given_}: must be {made}, the window of the metadata"):
        ragged_paged_attention(*batch, sm_scale=1.0, window=given_, metadata=(spec, jnp.asarray(tiles)))


H200 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"window": 128}, "pallas_mosaic_gpu", "in bfloat16, window 128 on NVIDIA H200"),
        ({"has_sinks": True}, "pallas_mosaic_gpu", "in bfloat16, sinks on NVIDIA H200"),
        ({"window": 128, "softcap": 50.0}, "pallas_triton", "not pallas_mosaic_gpu: softcap = 50.0: pallas_"),
    ],
)
def test_auto_selects_a_back_end_with_the_options(options: dict[str, Any], name: str, reason: str) -> None:
    choice = choose_backend("auto", AttentionHeads(40, 10, 128, "bfloat16", **options), H200)
    assert choice.name == name and reason in choice.reason
