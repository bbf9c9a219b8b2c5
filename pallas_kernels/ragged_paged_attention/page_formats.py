"""Page formats of keys and values: the model's dtype, or 8 bits with a scale for each row.

Owns: the 8-bit formats, the codes and scales of rows, and the place of the scales in a page. A row is the key
or the value of one token and one KV head.
Does not know: which sequence a page belongs to, or how attention reads one.

A page in 8 bits is i8[page_size + num_scale_rows, 2 * num_kv_heads, head_dim]: the codes of its tokens, then
their scales. So code that only moves pages sees one array of bytes, which is split over devices by KV head
like other pages. A row's scale is its largest magnitude divided by the format's largest number, rounded up to
bfloat16. For each KV head the high bytes of the scales come first, token by token, then the low bytes.

A row's codes depend on that row alone: after a drop and a recomputation the same codes are stored.
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
    """Rows in 8 bits: `codes` as numbers times `scales` is the original within half a step of the codes."""

    codes: jax.Array  # i8[..., head_dim]: integers, or the bits of e4m3 numbers
    scales: jax.Array  # f32[...] with bfloat16 values


class PageKind(NamedTuple):
    """Size and format of a pool's pages; static in a program.

    Attributes:
      page_size: tokens of a page.
      kv_dtype: 8-bit format; None means that pages hold numbers in the pool's dtype.
    """

    page_size: int
    kv_dtype: str | None = None

    def numbers(self, pages: jax.Array) -> jax.Array:
        """Return the numbers in pages, [..., page_size, 2 * num_kv_heads, head_dim].

        Their dtype is that of the pages, or float32 for an 8-bit format.
        """
        if self.kv_dtype is None:
            return pages
        return decode(split_pages(pages, self.page_size), self.kv_dtype)


def num_scale_rows(kv_dtype: str | None, page_size: int, head_dim: int) -> int:
    """Return the rows of a page after those of its tokens; 0 without an 8-bit format."""
    return 0 if kv_dtype is None else -(-_SCALE_BYTES * page_size // head_dim)


def page_shape(
    kv_dtype: str | None, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int]:
    """Return the shape of one layer's page: (rows, 2 * num_kv_heads, head_dim)."""
    return page_size + num_scale_rows(kv_dtype, page_size, head_dim), 2 * num_kv_heads, head_dim


def page_dtype(kv_dtype: str | None, model_dtype: Any) -> np.dtype:
    """Return the dtype of a pool: the model's, or int8 for an 8-bit format."""
    return jnp.dtype(model_dtype if kv_dtype is None else jnp.int8)


def page_size_of(kv_pages: jax.Array, kv_dtype: str | None, page_sizes: tuple[int, ...]) -> int:
    """Return the tokens of a page of this pool.

    Raises:
      AttentionArgumentError: none of `page_sizes` gives this number of rows.
    """
    num_rows, head_dim = kv_pages.shape[1], kv_pages.shape[3]
    for page_size in page_sizes:
        if num_rows == page_size + num_scale_rows(kv_dtype, page_size, head_dim):
            return page_size
    rows = tuple(size + num_scale_rows(kv_dtype, size, head_dim) for size in page_sizes)
    raise AttentionArgumentError("page_size", num_rows, f"rows of a page must be one of {rows}")


def encode(rows: jax.Array, kv_dtype: str) -> Stored:
    """Return rows in 8 bits, each number rounded to the nearest of the format.

    A row with an infinity or a NaN decodes to no finite numbers; one with magnitudes below 1e-35 may decode
    to zeros. Also called inside kernels, with "int8".

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
    """Return the numbers that attention reads, f32[..., head_dim]."""
    numbers = code_numbers(stored.codes, kv_dtype).astype(jnp.float32)
    return numbers * (stored.scales * code_factor(kv_dtype))[..., None]


def stored_as(rows: jax.Array, kv_dtype: str | None) -> jax.Array:
    """Return `rows` as read back from a page: in float32 with a format, otherwise unchanged."""
    return rows if kv_dtype is None else decode(encode(rows, kv_dtype), kv_dtype)


def code_numbers(codes: jax.Array, kv_dtype: str) -> jax.Array:
    """Return codes as numbers that every floating-point dtype of a model represents exactly.

    They must still be multiplied by `code_factor`. They are integers for "int8", float16 otherwise. Also
    called on a block of codes inside kernels.
    """
    if kv_dtype == "int8":
        return codes
    bits = codes.astype(jnp.int16)  # the sign goes along
    halves = (bits & np.int16(-(2**15))) | ((bits & np.int16(0x7F)) << np.int16(7))
    return jax.lax.bitcast_convert_type(halves, jnp.float16)


def code_factor(kv_dtype: str) -> float:
    """Return the factor missing from `code_numbers`; callers multiply the scales by it."""
    return 1.0 if kv_dtype == "int8" else E4M3_FACTOR


def scale_bytes(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the high and low bytes of scales, i8[...] each; also called inside kernels."""
    bits = jax.lax.bitcast_convert_type(scales, jnp.int32)
    return (bits >> np.int32(24)).astype(jnp.int8), (bits >> np.int32(16)).astype(jnp.int8)


def scales_of_bytes(high: Any, low: Any) -> Any:
    """Return the scales f32[...] from their bytes; also called inside kernels."""
    high, low = high.astype(jnp.int32), low.astype(jnp.int32)
    bits = (high << np.int32(24)) | ((low & np.int32(0xFF)) << np.int32(16))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def scale_places(offsets: Any, page_size: int, head_dim: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return (row of the page, lane) of the high and of the low byte of the scales of tokens at `offsets`.

    Also called inside kernels.
    """
    indices = [offsets + byte * page_size for byte in range(_SCALE_BYTES)]
    high, low = [(page_size + jax.lax.div(i, head_dim), jax.lax.rem(i, head_dim)) for i in indices]
    return high, low


def split_pages(pages: jax.Array, page_size: int) -> Stored:
    """Split pages into codes i8[..., page_size, heads, head_dim] and scales f32[..., page_size, heads]."""
    codes, rest = pages[..., :page_size, :, :], pages[..., page_size:, :, :]
    flat = jnp.moveaxis(rest, -2, -3).reshape(*rest.shape[:-3], rest.shape[-2], -1)  # [..., heads, bytes]
    high, low = flat[..., :page_size], flat[..., page_size : 2 * page_size]
    return Stored(codes, jnp.swapaxes(scales_of_bytes(high, low), -1, -2))


def _at_least(values: jax.Array) -> jax.Array:
    """Round f32[...] >= 0 up to bfloat16 values; infinity is unchanged."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    least = jnp.where(bits < np.int32(0x7F800000), bits + np.int32(0xFFFF), bits) & np.int32(-(2**16))
    return jax.lax.bitcast_convert_type(least, jnp.float32)
