"""Annotations of kernels and models give the shapes that calls have."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import pytest

from model_defs import DenseAttention, load_model, make_mesh, preset, random_model
from model_defs.all_reduce import AllReduce, PartialSums, SumSpec, finish_sum, summing
from model_defs.decoder import Decoder
from model_defs.layers import Embedding, FusedQKV, Linear, Norm
from pallas_kernels.all_reduce import Affine, sum_and_norm, sum_and_norm_of_shares, sum_over_devices
from pallas_kernels.decode_matmul import decode_matmul
from pallas_kernels.page_copies import gather_pages, scatter_pages
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.residual_norms import NormSpec, add_and_norm
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


TABLE = jnp.zeros((2, 14), I32)  # no call below reads its addresses


@pytest.mark.parametrize(
    ("function", "stream_rows"), [(sum_over_devices, None), (sum_and_norm, 6), (sum_and_norm_of_shares, 3)]
)
def test_an_all_reduce_has_its_annotated_shapes(function: Any, stream_rows: int | None) -> None:
    """Shapes are those of one device."""
    wrong: list[list[str]] = []
    kwargs: dict[str, Any] = {"axis": "tp", "capacity": 16 * 6 * 32, "backend": "xla"}
    row = jnp.zeros(32, BF16)
    rest: tuple[Any, ...] = ()
    if stream_rows is not None:
        rest = (jnp.zeros((stream_rows, 32), F32), Affine(row, row, row))
        kwargs["norm"] = NormSpec("layer", 1e-5, jnp.dtype(BF16))

    def run(table: jax.Array) -> jax.Array:
        args = jnp.zeros((6, 32), BF16), table, *rest
        result = function(*args, **kwargs)
        wrong.append(mismatches(function, *args, result=result, **kwargs))
        return table

    split = jax.P("tp")
    jax.shard_map(run, mesh=make_mesh(2), in_specs=split, out_specs=split, check_vma=False)(TABLE)
    assert wrong == [[]]


def test_layers_have_their_annotated_shapes() -> None:
    config, mesh = preset("llama-tiny", attention_bias=True), make_mesh(2)
    model: Any = random_model(config, dtype="bfloat16", mesh=mesh)
    layer, ids, x = model.layers[0], jnp.arange(6, dtype=I32), jnp.zeros((6, config.hidden_size), F32)
    heads = jnp.zeros((6, config.num_heads, config.head_dim), BF16)
    out, up = layer.out, layer.mlp.gate_up
    sums = AllReduce(SumSpec("xla", 2**16), TABLE, mesh)
    assert not mismatches(Embedding.__call__, model.embed, ids, result=model.embed(ids))
    assert not mismatches(Embedding.logits, model.embed, x, result=model.embed.logits(x))
    assert not mismatches(FusedQKV.__call__, layer.qkv, x, result=layer.qkv(x))
    assert not mismatches(Linear.__call__, out, heads, result=out(heads))
    assert not mismatches(Linear.activated, out, heads, "relu", result=out.activated(heads, "relu"))
    assert not mismatches(Linear.gated, up, x, "silu", result=up.gated(x, "silu"))
    assert not mismatches(Linear.deferred, out, heads, result=out.deferred(heads))
    with summing(sums):
        parts = out.deferred(heads)
    assert isinstance(parts, PartialSums) and not mismatches(Linear.deferred, out, heads, result=parts)
    args = out._product, (heads, out.kernel[...]), out._specs
    assert not mismatches(AllReduce.partial, sums, *args, result=parts.parts)
    assert not mismatches(AllReduce.total, sums, parts, result=sums.total(parts))
    assert not mismatches(finish_sum, parts, result=finish_sum(parts))
    for term in (None, parts, finish_sum(parts)):
        assert not mismatches(Norm.add, layer.mlp_norm, x, term, result=layer.mlp_norm.add(x, term))
    assert not mismatches(Norm.__call__, layer.mlp_norm, x, result=layer.mlp_norm(x))
    norm = NormSpec("rms", 1e-5, jnp.dtype(BF16))
    scale = jnp.ones(config.hidden_size, BF16)
    both = sums.total_and_norm(x, parts, scale, None, norm=norm)
    assert not mismatches(AllReduce.total_and_norm, sums, x, parts, scale, None, norm=norm, result=both)


def wrong(x: Annotated[jax.Array, "f[rows, width]"]) -> Annotated[jax.Array, "i32[rows, 2 * width]"]:
    return x


def test_another_shape_or_dtype_is_found() -> None:
    x, right = SHAPE((2, 3), F32), SHAPE((2, 6), I32)
    assert not mismatches(wrong, x, result=right)
    assert mismatches(wrong, x, result=SHAPE((2, 3), I32)) and mismatches(wrong, x, result=SHAPE((2, 6), F32))
    assert mismatches(wrong, SHAPE((2, 3), I32), result=right)
    with pytest.raises(TypeError, match="no annotated arrays"):
        mismatches(len, [], result=0)


def wrong_rows(x: Annotated[jax.Array, "f[T, *rest]"], y: Affine) -> Annotated[jax.Array, "f[*rest, width]"]:
    return x


def test_stars_and_fields_are_compared() -> None:
    x, right = SHAPE((2, 3, 4), F32), SHAPE((3, 4, 5), F32)
    assert not mismatches(wrong_rows, x, Affine(), result=right)
    assert not mismatches(wrong_rows, x, Affine(scale=SHAPE((5,), F32)), result=right)
    assert mismatches(wrong_rows, x, Affine(scale=SHAPE((6,), F32)), result=right)
    assert mismatches(wrong_rows, x, Affine(), result=SHAPE((4, 3, 5), F32))
