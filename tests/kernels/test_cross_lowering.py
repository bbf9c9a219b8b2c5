"""The attention of every preset lowers for an H200 on a machine without a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from model_defs import PRESETS
from pallas_kernels.ragged_paged_attention import ragged_paged_attention, tile_spec, write_kv
from pallas_kernels.ragged_paged_attention.shapes import Heads
from tests.kernels.cross_lower import lower_for_cuda

SHAPE = jax.ShapeDtypeStruct
# Every preset on one device; some share their heads.
MODEL_HEADS = {
    Heads(config.num_heads, config.num_kv_heads, config.head_dim): name for name, config in PRESETS.items()
}


def lower(
    heads: Heads,
    num_tokens: int,
    max_num_seqs: int,
    dtype: str,
    page_size: int = 32,
    num_pages: int = 4000,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> str:
    spec = tile_spec(
        num_tokens=num_tokens, max_num_seqs=max_num_seqs, num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=page_size, dtype=dtype,
        backend="pallas_triton", window=window,
    )  # fmt: skip

    def attend(sinks: jax.Array, *args: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *args[:-1], sm_scale=0.1, metadata=(spec, args[-1]), window=window, softcap=softcap,
            sinks=sinks if has_sinks else None,
        )  # fmt: skip

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return SHAPE(shape, jnp.int32)

    pool = SHAPE((num_pages, page_size, 2 * heads.num_kv_heads, heads.head_dim), dtype)
    q = SHAPE((num_tokens, heads.num_q_heads, heads.head_dim), dtype)
    rows = (array(max_num_seqs), array(max_num_seqs, 128), array(max_num_seqs + 1), array(1))
    sinks = SHAPE((heads.num_q_heads,), jnp.float32)
    return lower_for_cuda(attend, sinks, q, pool, *rows, array(spec.tiles_len))


@pytest.mark.parametrize(
    ("heads", "num_tokens", "max_num_seqs"),
    [  # each of them once, and in the other size in the long tests
        pytest.param(heads, *sizes, id=f"{name}-{kind}", marks=pytest.mark.long if (i + j) % 2 else ())
        for i, (heads, name) in enumerate(MODEL_HEADS.items())
        for j, (kind, sizes) in enumerate({"decode": (64, 64), "prefill": (2048, 256)}.items())
    ],
)
def test_presets(heads: Heads, num_tokens: int, max_num_seqs: int) -> None:
    text = lower(heads, num_tokens, max_num_seqs, "bfloat16")
    # The tiles of every class, and the merge.
    assert text.count("xla.gpu.triton") in ((2, 3) if max_num_seqs == 64 else (3,))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "page_size"),
    [(32, "float32", 16), (64, "float16", 64), (256, "bfloat16", 16), (256, "float32", 32)],
)
def test_dtypes_and_sizes(head_dim: int, dtype: str, page_size: int) -> None:
    lower(Heads(12, 4, head_dim), 512, 32, dtype, page_size)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        (128, "bfloat16", {"window": 4096}),
        (64, "bfloat16", {"window": 128, "has_sinks": True}),
        (256, "bfloat16", {"window": 4096, "softcap": 50.0}),
        (64, "float32", {"window": 33, "softcap": 50.0, "has_sinks": True}),
    ],
)
def test_score_options(head_dim: int, dtype: str, options: dict[str, Any]) -> None:
    text = lower(Heads(16, 4, head_dim), 512, 32, dtype, **options)
    assert text.count("xla.gpu.triton") == (2 if dtype == "float32" else 3)


def test_pool_beyond_32_bits() -> None:
    lower(Heads(40, 10, 128), 64, 64, "bfloat16", num_pages=40000)


def test_float32_is_ieee(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dot of a float32 kernel asks for TF32."""
    from jax._src.lib.triton import dialect

    seen = []
    dot = dialect.dot
    monkeypatch.setattr(dialect, "dot", lambda *a, **k: (seen.append(k["input_precision"]), dot(*a, **k))[1])
    lower(Heads(4, 2, 64), 64, 8, "float32")
    assert seen and set(seen) == {dialect.InputPrecision.IEEE}


def test_write_kv() -> None:
    new = SHAPE((64, 10, 128), jnp.bfloat16)
    pool = SHAPE((40000, 32, 20, 128), jnp.bfloat16)
    assert "scatter" in lower_for_cuda(functools.partial(write_kv), pool, new, new, SHAPE((64,), jnp.int32))
