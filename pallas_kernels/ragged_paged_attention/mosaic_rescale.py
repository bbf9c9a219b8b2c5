"""Rescaling of sums by the warps that need it, in the Mosaic kernel for prompts.

Owns: a branch around the multiplications, which a warp takes if no row of it has a new maximum.
Does not know: when a maximum is replaced. Called by: `mosaic_compute`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector

_LAYOUT = plgpu.Layout.WGMMA
_ALL_LANES = 0xFFFFFFFF


def rescale_if_needed(acc: Any, alpha: Any) -> Any:
    """Return acc f32[64, n] times alpha f32[64], row by row; warps whose factors are all 1 do nothing."""
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=_LAYOUT)
    inline = plgpu.inline_mgpu(arg_types=(_LAYOUT, _LAYOUT.reduce(1)), return_type=result)
    return inline(_rescale)(acc, alpha)


def _rescale(_context: Any, acc: Any, alpha: Any) -> Any:
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    one, is_any = utils.c(1.0, f32), None
    for register in alpha.registers.flatten():
        factor = vector.extract(register, [], [0]) if isinstance(register.type, ir.VectorType) else register
        differs = arith.cmpf(arith.CmpFPredicate.UNE, factor, one)
        is_any = differs if is_any is None else arith.ori(is_any, differs)
    needed = nvvm.vote_sync(utils.c(_ALL_LANES, i32), is_any, "any")
    old = list(acc.registers.flatten())
    # Its stub describes the generated class, which has no such argument.
    branch = scf.IfOp(needed, [x.type for x in old], has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(branch.then_block):
        scaled = acc * alpha.broadcast_in_dim(acc.shape, (0,), acc.layout)
        scf.yield_(list(scaled.registers.flatten()))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(old)
    found = np.empty(acc.registers.size, dtype=object)
    found[:] = list(branch.results)
    registers = found.reshape(acc.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)
