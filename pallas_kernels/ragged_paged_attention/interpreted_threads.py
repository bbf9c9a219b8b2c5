"""Interpreter of the operations of `mosaic_threads`, for all threads of a warpgroup, on any device.

Owns: the meaning of a thread's operations, including the fragments of matrix products, as arrays with one
element for each thread. Does not know: what is computed. Called by: `mosaic_bytes`, `mosaic_convert`.

All threads execute every step together, so barriers do nothing. Memory is as the kernel's references show it,
without swizzling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.mosaic_byte_lanes import HEAD_DIM, NUM_WARPS

_THREADS = 128


class InterpretedThreads:
    """All threads of a warpgroup, with the methods of `MosaicThreads`."""

    def __init__(self) -> None:
        thread = jnp.arange(_THREADS, dtype=jnp.int32)
        self.lane, self.warp = thread & 31, thread >> 5
        self.t, self.g = self.lane & 3, self.lane >> 2

    def as_float(self, x: Any) -> Any:
        return jax.lax.bitcast_convert_type(x, jnp.float32)

    def as_int(self, x: Any) -> Any:
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    def magnitude(self, x: Any) -> Any:
        return jnp.abs(x)

    def maximum(self, a: Any, b: Any) -> Any:
        """Return the larger number; NaN if either is NaN."""
        return jnp.maximum(a, b)

    def maximum_int(self, a: Any, b: Any) -> Any:
        return jnp.maximum(a, b)

    def minimum_int(self, a: Any, b: Any) -> Any:
        return jnp.minimum(a, b)

    def divide(self, a: Any, divisor: int) -> Any:
        """Divide a non-negative integer."""
        return jax.lax.div(a, jnp.full_like(a, divisor))

    def select(self, condition: Any, a: Any, b: Any) -> Any:
        """Return `a` where the condition holds, else `b`."""
        return jnp.where(condition, a, b)

    def exp2(self, x: Any) -> Any:
        return jnp.exp2(x)

    def log2(self, x: Any) -> Any:
        return jnp.log2(x)

    def permute_bytes(self, a: Any, b: Any, selector: int) -> Any:
        # As PTX's prmt.b32.
        b = jnp.full_like(a, b) if isinstance(b, int) else b
        places = [selector >> (4 * i) & 7 for i in range(4)]
        columns = jnp.concatenate([_bytes(a), _bytes(b)], axis=1)
        return _words(jnp.concatenate([columns[:, i : i + 1] for i in places], axis=1))

    def subtract_halves(self, a: Any, b: int) -> Any:
        return _joined(_halves(a) - _halves(jnp.full_like(a, _signed(b))))

    def halves_of_e4m3(self, word: Any, which: int) -> Any:
        """Return the first or the last two of four e4m3 numbers as float16."""
        codes = _bytes(word)[:, 2 * which : 2 * which + 2]
        return _joined(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float16))

    def float_of_half(self, pair: Any, which: int) -> Any:
        return _halves(pair)[:, which].astype(jnp.float32)

    def multiply_add_floats(self, a: Any, b: Any, c: Any) -> Any:
        """Return a b + c, rounded twice if XLA does not fuse them."""
        return a * b + c

    def pack_halves(self, low: Any, high: Any) -> Any:
        return _joined(jnp.stack([low, high], axis=1).astype(jnp.float16))

    def pack_bfloat16(self, low: Any, high: Any) -> Any:
        return _joined(jnp.stack([low, high], axis=1).astype(jnp.bfloat16))

    def shuffle_xor(self, x: Any, distance: int) -> Any:
        return self.shuffle(x, self.lane ^ distance)

    def shuffle(self, x: Any, lane: Any) -> Any:
        return x[self.warp * 32 + lane]

    def transpose(self, x: Any) -> Any:
        """Transpose 8 x 8 halves in each warp: lane 4 g + t has row g, columns 2 t and 2 t + 1."""
        matrices = _halves(x).reshape(NUM_WARPS, 8, 8)
        return _joined(matrices.swapaxes(1, 2).reshape(_THREADS, 2))

    def multiply_add(self, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
        """Multiply and add as mma.m16n8k16, with PTX's fragments."""
        # a: rows g, g + 8, g, g + 8, at columns 2 t, 2 t, 2 t + 8, 2 t + 8.
        parts = [_halves(x).reshape(NUM_WARPS, 8, 8) for x in a]
        top, bottom = jnp.concatenate(parts[::2], axis=2), jnp.concatenate(parts[1::2], axis=2)
        left = jnp.concatenate([top, bottom], axis=1).astype(jnp.float32)
        # b: rows 2 t and 2 t + 8, column g.
        right = jnp.concatenate([_halves(x).reshape(NUM_WARPS, 8, 8) for x in b], axis=2)
        found = jnp.einsum("wmk,wnk->wmn", left, right.astype(jnp.float32))
        sums = found.reshape(NUM_WARPS, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(2, 2, _THREADS)
        return [x + sums[i // 2, i % 2] for i, x in enumerate(c)]

    def barrier(self) -> None:
        """Do nothing: all threads execute every step together."""

    def load_codes(self, ref: Any, key: Any, which: int, chunk: Any) -> list[Any]:
        """Load codes of a block without swizzling."""
        return self.load_words(ref, (key * 2 + which) * HEAD_DIM + chunk * 16)

    def load_words(self, ref: Any, start: Any) -> list[Any]:
        words = _words(_flat_bytes(ref[...]).reshape(-1, 4))
        return [words[(start >> 2) + i] for i in range(4)]

    def load_floats(self, ref: Any, place: Any, count: int) -> list[Any]:
        flat = ref[...].reshape(-1)
        return [flat[place + i] for i in range(count)]

    def operand_slot(self, key: Any, chunk: Any) -> Any:
        """Return the byte in rows of 128 elements of 16 bits, without swizzling."""
        return key * (2 * HEAD_DIM) + chunk * 16

    def load_byte(self, ref: Any, start: Any) -> Any:
        return _flat_bytes(ref[...])[start].astype(jnp.int32)

    def store_floats(self, ref: Any, place: Any, values: list[Any], condition: Any) -> None:
        """Store floats where the condition holds."""
        flat = ref[...].reshape(-1)
        for i, value in enumerate(values):
            flat = flat.at[jnp.where(condition, place + i, flat.size)].set(value, mode="drop")
        ref[...] = flat.reshape(ref.shape)

    def store_words(self, ref: Any, start: Any, values: list[Any], condition: Any = True) -> None:
        """Store words of two 16-bit numbers where the condition holds."""
        flat = ref[...].reshape(-1)
        for i, word in enumerate(values):
            pair = jax.lax.bitcast_convert_type(word, flat.dtype)  # [128, 2]
            place = jnp.where(condition, jax.lax.div(start, 2) + 2 * i, flat.size)
            for j in range(2):
                flat = flat.at[place + j].set(pair[:, j], mode="drop")
        ref[...] = flat.reshape(ref.shape)


def run_interpreted(
    program: Callable[..., Any], refs: list[Any], scalars: list[Any], registers: list[Any], result: Any | None
) -> Any:
    """Run `program` as `mosaic_threads.run_threads` does, on references without transforms."""
    arrays = [[x[:, i] for i in range(x.shape[1])] for x in registers]
    found = program(InterpretedThreads(), refs, scalars, arrays)
    if result is None:
        return None
    columns = [jnp.broadcast_to(jnp.asarray(x, result[0]), (_THREADS,)) for x in found]
    return jnp.stack(columns, axis=1)


def _bytes(words: Any) -> Any:
    """Convert i32[n] to u8[n, 4]."""
    return jax.lax.bitcast_convert_type(words, jnp.uint8)


def _words(parts: Any) -> Any:
    """Convert u8[n, 4] to i32[n], without a bitcast: before another bitcast XLA mistakes it for that one."""
    wide = parts.astype(jnp.int32)
    return wide[:, 0] | wide[:, 1] << 8 | wide[:, 2] << 16 | wide[:, 3] << 24


def _halves(words: Any) -> Any:
    """Convert i32[n] to float16[n, 2]."""
    return jax.lax.bitcast_convert_type(words, jnp.float16)


def _joined(halves: Any) -> Any:
    """Convert 16-bit numbers [n, 2] to i32[n]."""
    return jax.lax.bitcast_convert_type(halves, jnp.int32)


def _flat_bytes(array: Any) -> Any:
    """Return the bytes of an array of 8 or 16 bits, flattened."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(-1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
