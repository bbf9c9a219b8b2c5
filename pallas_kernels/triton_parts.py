"""What attention kernels in Pallas' Triton language share: a load, a product, and a power of two.

Owns: the three, and which precision and which instruction they take.
Does not know: what is attended to, or where it lies.
Upstream has deprecated this back end: beside files of that
name this is the only one that imports from it, and only they import this.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu


def load(ref: Any, mask: Any) -> Any:
    """What `ref` points to, zero where `mask` is false; a mask of None: all of it, without a test."""
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0)


def dot(a: Any, b: Any, *, contract_b: int) -> Any:
    """The product over the last dimension of `a` and dimension `contract_b` of `b`, in float32."""
    # HIGHEST: IEEE float32 where the default would be TF32; 16-bit operands are not affected.
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (contract_b,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def exp2(x: Any, *, interpret: bool) -> Any:
    """Return 2**x for float32; on a GPU denormal results become zero."""
    if interpret:
        return jnp.exp2(x)
    # One instruction; the library function spends three more on denormal results, which the sums cannot show.
    [y] = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )  # fmt: skip
    return y
