"""Operations of one thread of a warpgroup in a Mosaic GPU kernel, as MLIR and PTX instructions.

Owns: registers as values of MLIR, the instructions of a lane's program, and the conversion between arrays of
a Pallas kernel and a thread's registers. Does not know: what is computed.
Called by: `mosaic_bytes`, `mosaic_convert`.

Only this file writes assembly. `interpreted_threads` has the same operations under the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, vector

from pallas_kernels.ragged_paged_attention.mosaic_byte_lanes import slot_of

WARPGROUP_THREADS = 128
# f32 or i32[128, n]: row i is the n registers of thread i of the warpgroup.
LAYOUT = plgpu.Layout.TCGEN05_TMEM_NATIVE(1)

_ALL_LANES = 0xFFFFFFFF


def _arithmetic(for_floats: Any, for_integers: Any) -> Callable[[Register, Any], Register]:
    """Return an operator on two registers, or on a register and a constant."""

    def apply(a: Register, b: Any) -> Register:
        return Register((for_floats if a.is_float else for_integers)(a.value, a.like(b)))

    return apply


def _comparison(for_floats: Any, for_integers: Any) -> Callable[[Register, Any], Register]:
    """Return a comparison of two registers, or of a register and a constant; its result is a predicate."""

    def apply(a: Register, b: Any) -> Register:
        compare, predicate = (arith.cmpf, for_floats) if a.is_float else (arith.cmpi, for_integers)
        return Register(compare(predicate, a.value, a.like(b)))

    return apply


class Register:
    """A value of one thread: i32, f32 or a predicate. Python numbers become constants of its type."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    @property
    def is_float(self) -> bool:
        """Whether it is f32."""
        return isinstance(self.value.type, ir.F32Type)

    def like(self, other: Any) -> ir.Value:
        """Return the value of `other`, or a constant of this register's type."""
        if isinstance(other, Register):
            return other.value
        return utils.c(float(other) if self.is_float else int(other), self.value.type)

    def __truediv__(self, other: Register) -> Register:
        """Divide f32, to about 22 bits."""
        found: Register = _assembly("div.full.f32 $0, $1, $2;", ir.F32Type.get(), self, other)
        return found

    __add__ = __radd__ = _arithmetic(arith.addf, arith.addi)
    __mul__ = __rmul__ = _arithmetic(arith.mulf, arith.muli)
    __sub__ = _arithmetic(arith.subf, arith.subi)
    __and__ = _arithmetic(None, arith.andi)
    __xor__ = _arithmetic(None, arith.xori)
    __lshift__ = _arithmetic(None, arith.shli)
    __rshift__ = _arithmetic(None, arith.shrui)  # for non-negative integers
    __gt__ = _comparison(arith.CmpFPredicate.OGT, arith.CmpIPredicate.sgt)
    __ge__ = _comparison(arith.CmpFPredicate.OGE, arith.CmpIPredicate.sge)
    __eq__ = _comparison(arith.CmpFPredicate.OEQ, arith.CmpIPredicate.eq)  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _assembly(text: str, result: Any, *operands: Any, of_warp: bool = False) -> Any:
    """Emit one line of PTX without side effects; `of_warp`: all lanes must take part."""
    like = next(x for x in operands if isinstance(x, Register))
    values = [x.value if isinstance(x, Register) else like.like(x) for x in operands]
    found = utils.inline_ptx(text, *values, result_types=result, convergent=of_warp)
    return [Register(x) for x in found] if isinstance(result, list) else Register(found)


class MosaicThreads:
    """A thread: its place in the warpgroup, and its operations. Words are i32."""

    def __init__(self) -> None:
        """Describe the executing thread."""
        thread = Register(arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x)))
        self.lane = thread & 31
        self.warp = (thread >> 5) & 3
        self.t = self.lane & 3
        self.g = self.lane >> 2

    # Arithmetic.

    def as_float(self, x: Register) -> Register:
        """Return the f32 with these bits."""
        return Register(utils.bitcast(x.value, ir.F32Type.get()))

    def as_int(self, x: Register) -> Register:
        """Return the bits of an f32."""
        return Register(utils.bitcast(x.value, _i32()))

    def magnitude(self, x: Register) -> Register:
        """Return the absolute value of an f32."""
        return self.as_float(self.as_int(x) & 0x7FFFFFFF)

    def maximum(self, a: Register, b: Any) -> Register:
        """Return the larger f32; NaN if either is NaN."""
        return Register(arith.maximumf(a.value, a.like(b)))

    def maximum_int(self, a: Register, b: Register) -> Register:
        """Return the larger of two signed integers."""
        return Register(arith.maxsi(a.value, b.value))

    def minimum_int(self, a: Register, b: Register) -> Register:
        """Return the smaller of two signed integers."""
        return Register(arith.minsi(a.value, b.value))

    def divide(self, a: Register, divisor: int) -> Register:
        """Divide a non-negative by a positive integer, without the remainder."""
        return Register(arith.divui(a.value, a.like(divisor)))

    def select(self, condition: Register, a: Any, b: Any) -> Register:
        """Return `a` where the condition holds, else `b`; at least one of them is a register."""
        like = a if isinstance(a, Register) else b
        return Register(arith.select(condition.value, like.like(a), like.like(b)))

    def exp2(self, x: Register) -> Register:
        """Return 2**x to about 22 bits; zero for very negative x."""
        return _assembly("ex2.approx.ftz.f32 $0, $1;", ir.F32Type.get(), x)

    def log2(self, x: Register) -> Register:
        """Return the binary logarithm to about 22 bits."""
        return _assembly("lg2.approx.ftz.f32 $0, $1;", ir.F32Type.get(), x)

    # Bytes and halves of words.

    def permute_bytes(self, a: Register, b: Any, selector: int) -> Register:
        """Return the four bytes that the selector's hexadecimal digits name: 0 to 3 of a, 4 to 7 of b."""
        return _assembly(f"prmt.b32 $0, $1, $2, {selector:#x};", _i32(), a, b)

    def subtract_halves(self, a: Register, b: int) -> Register:
        """Subtract two float16 from two others."""
        return _assembly("sub.rn.f16x2 $0, $1, $2;", _i32(), a, b)

    def halves_of_e4m3(self, word: Register, which: int) -> Register:
        """Return the first or the last two of four e4m3 numbers as float16."""
        part = "low" if which == 0 else "high"
        text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, " + part + "; }"
        return _assembly(text, _i32(), word)

    def float_of_half(self, pair: Register, which: int) -> Register:
        """Return the first or the second of two float16 as f32."""
        part = "low" if which == 0 else "high"
        text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, " + part + "; }"
        return _assembly(text, ir.F32Type.get(), pair)

    def multiply_add_floats(self, a: Register, b: Register, c: Register) -> Register:
        """Return a b + c of f32, rounded once."""
        return _assembly("fma.rn.f32 $0, $1, $2, $3;", ir.F32Type.get(), a, b, c)

    def pack_halves(self, low: Register, high: Register) -> Register:
        """Return two f32 rounded to the nearest float16."""
        return _assembly("cvt.rn.f16x2.f32 $0, $2, $1;", _i32(), low, high)

    def pack_bfloat16(self, low: Register, high: Register) -> Register:
        """Return two f32 rounded to the nearest bfloat16."""
        return _assembly("cvt.rn.bf16x2.f32 $0, $2, $1;", _i32(), low, high)

    # Operations of a warp.

    def shuffle_xor(self, x: Register, distance: int) -> Register:
        """Return the value of the lane whose index differs in this bit."""
        return self._shuffle(x, utils.c(distance, _i32()), nvvm.ShflKind.bfly)

    def shuffle(self, x: Register, lane: Register) -> Register:
        """Return the value of the given lane."""
        return self._shuffle(x, lane.value, nvvm.ShflKind.idx)

    def _shuffle(self, x: Register, place: ir.Value, kind: Any) -> Register:
        mask, clamp = utils.c(_ALL_LANES, _i32()), utils.c(31, _i32())
        return Register(nvvm.shfl_sync(mask, x.value, place, clamp, kind))

    def transpose(self, x: Register) -> Register:
        """Transpose 8 x 8 halves: columns 2 t and 2 t + 1 of row g become these rows of column g."""
        return _assembly("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", _i32(), x, of_warp=True)

    def multiply_add(self, a: list[Register], b: list[Register], c: list[Any]) -> list[Register]:
        """Return f32[16, 8] + float16[16, 16] @ float16[16, 8], in the fragments of mma.m16n8k16."""
        f32 = ir.F32Type.get()
        c = [x if isinstance(x, Register) else Register(utils.c(float(x), f32)) for x in c]
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        found: list[Register] = _assembly(text, [f32] * 4, *a, *b, *c, of_warp=True)
        return found

    def barrier(self) -> None:
        """Wait for the warpgroup; earlier stores are visible after it."""
        utils.warpgroup_barrier()

    # Shared memory, addressed by bytes, f32 or words from its start.

    def load_codes(self, ref: Any, key: Any, which: int, chunk: Any) -> list[Register]:
        """Load four words of a swizzled block: 16 bytes of a key or, if `which` is 1, of its value."""
        return self.load_words(ref, slot_of(key, which, chunk))

    def load_words(self, ref: Any, start: Register) -> list[Register]:
        """Load four words from a byte offset that is a multiple of 16."""
        return self._load(ref, start, _i32(), 4)

    def load_floats(self, ref: Any, place: Register, count: int) -> list[Register]:
        """Load 2 or 4 floats from an index that is a multiple of `count`."""
        return self._load(ref, place << 2, ir.F32Type.get(), count)

    def operand_slot(self, key: Register, chunk: Register) -> Register:
        """Return the byte offset of eight 16-bit elements in swizzled tiles of eight rows and 64 columns.

        Rows have 128 elements. The same columns eight rows further are 2,048 bytes further.
        """
        row, squares = key & 7, (key >> 3 << 1) + (chunk >> 3)
        return (squares << 10) + (row << 7) + (((chunk & 7) ^ row) << 4)

    def load_byte(self, ref: Any, start: Register) -> Register:
        """Return an unsigned byte, 0 to 255, as i32."""
        byte = llvm.load(ir.IntegerType.get_signless(8), _address(ref, start), alignment=1)
        return Register(arith.extui(_i32(), byte))

    def store_floats(self, ref: Any, place: Register, values: list[Register], condition: Register) -> None:
        """Store 2 or 4 floats at an index that is a multiple of their number, where the condition holds."""
        self._store(ref, place << 2, values, condition)

    def store_words(
        self, ref: Any, start: Register, values: list[Register], condition: Register | None = None
    ) -> None:
        """Store 4 words at a byte offset that is a multiple of 16, where the condition holds."""
        self._store(ref, start, values, condition)

    def _load(self, ref: Any, start: Register, element: ir.Type, count: int) -> list[Register]:
        kind = ir.VectorType.get((count,), element)
        found = llvm.load(kind, _address(ref, start), alignment=4 * count)
        return [Register(vector.extract(found, [], [i])) for i in range(count)]

    def _store(self, ref: Any, start: Register, values: list[Register], condition: Register | None) -> None:
        kind = ir.VectorType.get((len(values),), values[0].value.type)
        joined = vector.from_elements(kind, [x.value for x in values])
        with contextlib.nullcontext() if condition is None else utils.when(condition.value):
            llvm.store(joined, _address(ref, start), alignment=4 * len(values))


def _address(ref: Any, start: Register) -> ir.Value:
    pointer = utils.memref_ptr(ref)
    return utils.getelementptr(pointer, [start.value], ir.IntegerType.get_signless(8))


def run_threads(
    program: Callable[..., Any],
    refs: list[tuple[Any, tuple[Any, ...]]],
    scalars: list[Any],
    registers: list[Any],
    result: Any | None,
) -> Any:
    """Call `program(threads, refs, scalars, registers)` in every thread of a warpgroup, within a kernel.

    Args:
      program: returns registers for `result`, or None.
      refs: references to shared memory, with their transforms.
      scalars: i32[] values.
      registers: arrays f32 or i32[128, n] of `LAYOUT`; the program gets lists of n registers.
      result: dtype and number of registers of the returned array; None if nothing is returned.
    """
    splat = plgpu.Layout.WG_SPLAT(())
    arg_types: list[Any] = [plgpu.RefType(transforms) for _, transforms in refs]
    arg_types += [splat] * len(scalars) + [LAYOUT] * len(registers)
    return_type = None
    if result is not None:
        dtype, count = result
        return_type = plgpu.ShapeDtypeStruct((WARPGROUP_THREADS, count), dtype, layout=LAYOUT)

    def body(_context: Any, *args: Any) -> Any:
        some, others = args[: len(refs)], args[len(refs) :]
        numbers = [Register(x.registers.item()) for x in others[: len(scalars)]]
        arrays = [_split(x) for x in others[len(scalars) :]]
        found = program(MosaicThreads(), some, numbers, arrays)
        return None if result is None else _joined(found, dtype)

    inline = plgpu.inline_mgpu(arg_types=tuple(arg_types), return_type=return_type)
    return inline(body)(*(ref for ref, _ in refs), *scalars, *registers)


def _split(array: Any) -> list[Register]:
    return [Register(vector.extract(x, [], [0])) for x in array.registers.flatten()]


def _joined(registers: list[Any], dtype: Any) -> Any:
    """Return a fragmented array of registers or constants."""
    element = utils.dtype_to_ir_type(dtype)
    kind = ir.VectorType.get((1,), element)
    values = [x.value if isinstance(x, Register) else utils.c(x, element) for x in registers]
    layout = LAYOUT.to_mgpu()
    shape = layout.registers_shape((WARPGROUP_THREADS, len(values)))
    found = np.empty(len(values), dtype=object)
    found[:] = [vector.broadcast(kind, value) for value in values]
    is_signed = utils.is_signed(dtype)
    return mgpu.FragmentedArray(_registers=found.reshape(shape), _layout=layout, _is_signed=is_signed)
