"""Addition and norm through Pallas' Triton back end, for NVIDIA GPUs from Ampere on.

Owns: the kernel and its launch. Does not know: what a row means. Called by: `api`.
Upstream has deprecated this back end, so nothing outside this file imports from it.

XLA compiles this to a reduction and an elementwise kernel, and reads the rows twice. Here one program owns
one row. It keeps the row in registers, in pieces that are powers of two, and issues all loads before the
first sum. A row's arithmetic does not depend on the number or the contents of the other rows. So a token has
the same norm, bit for bit, in every bucket.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.residual_norms.specs import NormSpec, RowBlock


@functools.partial(jax.jit, static_argnames=("spec", "block", "interpret"))  # lowered once for all layers
def triton_add_and_norm(
    x: jax.Array,
    y: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    spec: NormSpec,
    block: RowBlock,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See `api.add_and_norm`; arguments are already checked."""
    manual = jax.typeof(x).manual_axis_type
    normed = jax.ShapeDtypeStruct(x.shape, spec.dtype, manual_axis_type=manual)
    total = jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=manual)
    written = pl.pallas_call(
        functools.partial(_kernel, spec=spec, lanes=block.lanes),
        out_shape=(normed,) if y is None else (normed, total),
        grid=(x.shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=block.num_warps, num_stages=1),
        interpret=interpret,
        name=f"{'norm' if y is None else 'add_and_norm'}_{spec.kind}",
    )(x, y, scale, bias)
    return x if y is None else written[1], written[0]


def _kernel(
    x_ref: Any, y_ref: Any, scale_ref: Any, bias_ref: Any, *out_refs: Any, spec: NormSpec, lanes: int
) -> None:
    """Norm one row. Refs of missing arrays are None; the second output, if there is one, is the sum."""
    width = x_ref.shape[1]
    pieces = [start + jnp.arange(lanes) for start in range(0, width, lanes)]
    masks = [columns < width if width % lanes else None for columns in pieces]
    row = jnp.full((lanes,), pl.program_id(0))

    def load(ref: Any, *rows: Any) -> list[Any]:
        if ref is None:
            return [None] * len(pieces)
        return [
            plgpu.load(ref.at[*rows, columns], mask=mask, other=None if mask is None else 0.0)
            for columns, mask in zip(pieces, masks, strict=True)
        ]

    def store(ref: Any, values: list[Any]) -> None:
        for columns, mask, value in zip(pieces, masks, values, strict=True):
            plgpu.store(ref.at[row, columns], value.astype(ref.dtype), mask=mask)

    wide, ys, scales, biases = load(x_ref, row), load(y_ref, row), load(scale_ref), load(bias_ref)
    if y_ref is not None:
        wide = [piece + y.astype(jnp.float32) for piece, y in zip(wide, ys, strict=True)]
        store(out_refs[1], wide)
    if spec.kind == "layer":
        mean = jnp.sum(_added(wide)) / width
        # Lanes past the end were zero; after the subtraction they must not count in the second sum.
        wide = [
            piece - mean if mask is None else jnp.where(mask, piece - mean, 0.0)
            for piece, mask in zip(wide, masks, strict=True)
        ]
    inverse = jax.lax.rsqrt(jnp.sum(_added([piece * piece for piece in wide])) / width + spec.eps)
    wide = [piece * inverse for piece in wide]
    if scale_ref is not None:
        wide = [piece * scale.astype(jnp.float32) for piece, scale in zip(wide, scales, strict=True)]
    if bias_ref is not None:
        wide = [piece + bias.astype(jnp.float32) for piece, bias in zip(wide, biases, strict=True)]
    store(out_refs[0], wide)


def _added(pieces: list[Any]) -> Any:
    """Add the pieces lane by lane, so that one sum over lanes follows instead of one for each piece."""
    return functools.reduce(lambda a, b: a + b, pieces)
