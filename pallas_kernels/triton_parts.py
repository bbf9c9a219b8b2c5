"""Shared operations of the attention kernels in Pallas' Triton language: a load, a product, a power of two.

Owns: these operations, their precision and their instructions.
Does not know: what attention reads, or where it is stored.
Upstream has deprecated this back end. Only this file and the files named `pallas_triton` import from it, and
only those files import this one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu


def load(ref: Any, mask: Any) -> Any:
    """Load from `ref`, with zeros where `mask` is False. A mask of None loads everything without a test."""
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)


def dot(a: Any, b: Any, *, contract_b: int) -> Any:
    """Return the product over the last dimension of `a` and dimension `contract_b` of `b`, in float32."""
    # HIGHEST is IEEE float32; the default would be TF32. It does not affect 16-bit operands.
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def exp2(x: Any, *, interpret: bool) -> Any:
    """Return 2**x in float32; on a GPU denormal results become zero."""
    if interpret:
        return jnp.exp2(x)
    # One instruction. The library function spends three more on denormal results, which the sums cannot show.
    [y] = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )  # fmt: skip
    return y
