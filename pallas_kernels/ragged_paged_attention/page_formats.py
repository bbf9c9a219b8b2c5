"""How a page stores keys and values: as the model computes them, or in 8 bits with a scale for each.

Owns: the 8-bit formats, the codes and scales of rows, and where in a page the scales lie. A row is the key or
the value of one token and one KV head.
Does not know: who is in a page, or how attention reads one.

A page in 8 bits is i8[page_size + num_scale_rows, 2 * num_kv_heads, head_dim]: the codes of its tokens, then
their scales. So it is one array of bytes for everybody who only moves pages, and is split over devices by KV
head as others are. A row's scale is the bfloat16 at or just above its largest magnitude over the format's
largest number. Of each KV head's scales the high bytes come first, token by token, then the low ones.

A row's codes depend on that row alone: what is dropped and computed again is stored as it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.errors import AttentionArgumentError

_SCALE_BYTES = 2
# The bits of an e4m3 number, moved to where a float16 has sign, exponent and mantissa, are that number over
# 256: their exponents are biased by 7 and 15.
E4M3_FACTOR = 256.0
_LARGEST: dict[str, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}


class Stored(NamedTuple):
    """Rows in 8 bits: what was, within half a step of the codes, is `codes` as numbers times `scales`."""

    codes: jax.Array  # i8[..., head_dim]: integers, or the bits of e4m3 numbers
    scales: jax.Array  # f32[...], of as many bits as bfloat16 has


class PageKind(NamedTuple):
    """What a pool's pages are; static in a program.

    Attributes:
      page_size: tokens of a page.
      kv_dtype: what they are stored as; None: their dtype.
    """

    page_size: int
    kv_dtype: str | None = None

    def numbers(self, pages: jax.Array) -> jax.Array:
        """[..., page_size, 2 * num_kv_heads, head_dim] that pages hold: in their dtype, or in float32."""
        if self.kv_dtype is None:
            return pages
        return decode(split_pages(pages, self.page_size), self.kv_dtype)


def num_scale_rows(kv_dtype: str | None, page_size: int, head_dim: int) -> int:
    """Rows of a page behind those of its tokens; none where keys and values are stored as they are."""
    return 0 if kv_dtype is None else -(-_SCALE_BYTES * page_size // head_dim)


def page_shape(
    kv_dtype: str | None, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int]:
    """Of one layer's page: (rows, 2 * num_kv_heads, head_dim)."""
    return page_size + num_scale_rows(kv_dtype, page_size, head_dim), 2 * num_kv_heads, head_dim


def page_dtype(kv_dtype: str | None, model_dtype: Any) -> np.dtype:
    """Of a pool: the model's, or bytes."""
    return jnp.dtype(model_dtype if kv_dtype is None else jnp.int8)


def page_size_of(kv_pages: jax.Array, kv_dtype: str | None, page_sizes: tuple[int, ...]) -> int:
    """Tokens of a page of this pool.

    Raises:
      AttentionArgumentError: no page of any of `page_sizes` has so many rows.
    """
    num_rows, head_dim = kv_pages.shape[1], kv_pages.shape[3]
    for page_size in page_sizes:
        if num_rows == page_size + num_scale_rows(kv_dtype, page_size, head_dim):
            return page_size
    rows = tuple(size + num_scale_rows(kv_dtype, size, head_dim) for size in page_sizes)
    raise AttentionArgumentError("page_size", num_rows, f"rows of a page must be one of {rows}")


def encode(rows: jax.Array, kv_dtype: str) -> Stored:
    """Rows in 8 bits, each number the nearest of the format.

    A row with an infinity or a NaN comes back as no finite numbers, one of magnitudes below 1e-35 perhaps as
    zeros. Also called inside kernels, with "int8".

    Args:
      rows: [..., head_dim], of any floating-point dtype.
      kv_dtype: the format.
    """
    wide = rows.astype(jnp.float32)
    largest = jnp.where(jnp.isnan(wide), np.float32(np.inf), jnp.abs(wide)).max(axis=-1)
    scales = _at_least(largest / _LARGEST[kv_dtype])
    ratios = wide / jnp.where(scales > 0, scales, np.float32(1))[..., None]
    if kv_dtype == "int8":
        nearest = jnp.floor(ratios + np.float32(0.5))  # Triton has no other rounding
        codes = jnp.minimum(jnp.maximum(nearest, np.float32(-127)), np.float32(127)).astype(jnp.int8)
    else:
        codes = jax.lax.bitcast_convert_type(ratios.astype(jnp.float8_e4m3fn), jnp.int8)
    return Stored(codes, scales)


def decode(stored: Stored, kv_dtype: str) -> jax.Array:
    """f32[..., head_dim]: what attention reads."""
    numbers = code_numbers(stored.codes, kv_dtype).astype(jnp.float32)
    return numbers * (stored.scales * code_factor(kv_dtype))[..., None]


def stored_as(rows: jax.Array, kv_dtype: str | None) -> jax.Array:
    """`rows` as they come back from a page: float32 with a format, else as they are."""
    return rows if kv_dtype is None else decode(encode(rows, kv_dtype), kv_dtype)


def code_numbers(codes: jax.Array, kv_dtype: str) -> jax.Array:
    """Codes as numbers that every floating-point dtype of a model holds exactly, to be times `code_factor`.

    Also called on a block of codes inside kernels; integers for "int8", float16 for others.
    """
    if kv_dtype == "int8":
        return codes
    bits = codes.astype(jnp.int16)  # the sign goes along
    halves = (bits & np.int16(-(2**15))) | ((bits & np.int16(0x7F)) << np.int16(7))
    return jax.lax.bitcast_convert_type(halves, jnp.float16)


def code_factor(kv_dtype: str) -> float:
    """What `code_numbers` are short of, which goes to the scales."""
    return 1.0 if kv_dtype == "int8" else E4M3_FACTOR


def scale_bytes(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """i8[...] high and i8[...] low bytes of scales, also inside kernels."""
    bits = jax.lax.bitcast_convert_type(scales, jnp.int32)
    return (bits >> np.int32(24)).astype(jnp.int8), (bits >> np.int32(16)).astype(jnp.int8)


def scales_of_bytes(high: Any, low: Any) -> Any:
    """f32[...] scales of their bytes, also inside kernels."""
    high, low = high.astype(jnp.int32), low.astype(jnp.int32)
    bits = (high << np.int32(24)) | ((low & np.int32(0xFF)) << np.int32(16))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_places(offsets: Any, page_size: int, head_dim: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(row of the page, lane) of the high and of the low byte of the scales of tokens at `offsets`.

    Also called inside kernels.
    """
    indices = [offsets + byte * page_size for byte in range(_SCALE_BYTES)]
    high, low = [(page_size + jax.lax.div(i, head_dim), jax.lax.rem(i, head_dim)) for i in indices]
    return high, low


def split_pages(pages: jax.Array, page_size: int) -> Stored:
    """Codes i8[..., page_size, heads, head_dim] and scales f32[..., page_size, heads] of whole pages."""
    codes, rest = pages[..., :page_size, :, :], pages[..., page_size:, :, :]
    flat = jnp.moveaxis(rest, -2, -3).reshape(*rest.shape[:-3], rest.shape[-2], -1)  # [..., heads, bytes]
    high, low = flat[..., :page_size], flat[..., page_size : 2 * page_size]
    return Stored(codes, jnp.swapaxes(scales_of_bytes(high, low), -1, -2))


def _at_least(values: jax.Array) -> jax.Array:
    """The smallest number that is no less and that bfloat16 has, of f32[...] >= 0; infinity stays."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    least = jnp.where(bits < np.int32(0x7F800000), bits + np.int32(0xFFFF), bits) & np.int32(-(2**16))
    return jax.lax.bitcast_convert_type(least, jnp.float32)
