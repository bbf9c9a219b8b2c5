"""Annotations of kernels and models give the shapes that calls have."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import pytest

from model_defs import DenseAttention, load_model, make_mesh
from model_defs.decoder import Decoder
from pallas_kernels.decode_matmul import decode_matmul
from pallas_kernels.page_copies import gather_pages, scatter_pages
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.residual_norms import add_and_norm
from pallas_kernels.ring_decode import ring_decode_attention
from pallas_kernels.sampling_cutoffs import cutoffs
from tests.kernels.annotated_shapes import mismatches

SHAPE = jax.ShapeDtypeStruct
F32, I32, U32, BF16 = jnp.float32, jnp.int32, jnp.uint32, jnp.bfloat16
POOLS = [SHAPE((9, 16, 4, 64), BF16)] * 3
CASES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (
        ragged_paged_attention,
        (
            *(SHAPE((7, 4, 64), F32), SHAPE((9, 16, 4, 64), F32), SHAPE((3,), I32)),
            *(SHAPE((3, 5), I32), SHAPE((4,), I32), SHAPE((1,), I32)),
        ),
        {"sm_scale": 1.0, "backend": "xla"},
    ),
    (decode_matmul, (SHAPE((3, 32), F32), SHAPE((32, 48), F32), SHAPE((48,), F32)), {"backend": "xla"}),
    (decode_matmul, (SHAPE((3, 32), F32), SHAPE((32, 96), F32)), {"backend": "xla", "gated": True}),
    (
        add_and_norm,
        (SHAPE((3, 32), F32), SHAPE((3, 32), BF16), SHAPE((32,), BF16), None),
        {"kind": "rms", "eps": 1e-6, "dtype": BF16, "backend": "xla"},
    ),
    (
        ring_decode_attention,
        (
            *(SHAPE((3, 4, 64), F32), SHAPE((3, 2, 32, 64), F32), SHAPE((3, 2, 32, 64), F32)),
            *(SHAPE((), I32), SHAPE((3,), I32)),
        ),
        {"sm_scale": 1.0, "backend": "xla"},
    ),
    (
        cutoffs,
        (SHAPE((3, 50), U32), SHAPE((3, 50), U32), SHAPE((3,), I32), SHAPE((3,), F32)),
        {"backend": "xla"},
    ),
    (gather_pages, (POOLS, SHAPE((5,), I32)), {}),
    (scatter_pages, (POOLS, [SHAPE((3, 16, 4, 64), BF16)] * 5, SHAPE((5,), I32)), {}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CASES)
def test_a_kernel_has_its_annotated_shapes(function: Any, args: Any, kwargs: Any) -> None:
    result = jax.eval_shape(functools.partial(function, **kwargs), *args)
    assert not mismatches(function, *args, result=result, **kwargs)


def test_a_model_has_its_annotated_shapes() -> None:
    model = load_model("random:llama-tiny", dtype="bfloat16", mesh=make_mesh(1))
    ids, attention, config = jnp.arange(7, dtype=I32), DenseAttention(), model.config
    embedded = model.embed_tokens(ids, ids)
    run = functools.partial(model.run_layers, embedded, ids, attention, 0, config.num_layers)
    hidden = model(ids, ids, attention)
    q, k = jnp.zeros((7, config.num_heads, 16), BF16), jnp.zeros((7, config.num_kv_heads, 16), BF16)
    assert not mismatches(Decoder.embed_tokens, model, ids, ids, result=embedded)
    assert not mismatches(Decoder.run_layers, model, embedded, ids, attention, 0, 1, result=run())
    assert not mismatches(Decoder.normalize, model, embedded, result=model.normalize(embedded))
    assert not mismatches(Decoder.compute_logits, model, hidden, result=model.compute_logits(hidden))
    assert not mismatches(DenseAttention.__call__, attention, 0, q, k, k, result=attention(0, q, k, k))


def wrong(x: Annotated[jax.Array, "f[rows, width]"]) -> Annotated[jax.Array, "i32[rows, 2 * width]"]:
    return x


def test_another_shape_or_dtype_is_found() -> None:
    x, right = SHAPE((2, 3), F32), SHAPE((2, 6), I32)
    assert not mismatches(wrong, x, result=right)
    assert mismatches(wrong, x, result=SHAPE((2, 3), I32)) and mismatches(wrong, x, result=SHAPE((2, 6), F32))
    assert mismatches(wrong, SHAPE((2, 3), I32), result=right)
    with pytest.raises(TypeError, match="no annotated arrays"):
        mismatches(len, [], result=0)
