"""Lossless packed form of a bfloat16 page, in three quarters of its bytes; and the back end for any platform.

Owns: the format, the page shapes that have one, and the arithmetic of one number that both back ends share.
Does not know: pools, or who counts chunks that did not fit. Called by: `packed_copies`, `triton_packing`.

A bfloat16 number has a sign, 8 bits of exponent and 7 of mantissa. A *tile* is the part of a page for one
layer and head row: [page_size, head_dim] numbers. A row is the key or the value of one token and KV head.
Row and column predict an upper bound of the exponent, and 4 bits store the distance below it. A column's
offset is the distance of its largest exponent below the tile's largest. A row's offset is the largest of its
exponents, each increased by its column's offset. So neither channels that are large in all rows nor small
tokens cost other numbers bits. A tile becomes rows of head_dim bytes:

- page_size rows: sign and mantissa of each number.
- page_size / 2 rows: codes, of row i in the low half of a byte and of row i + page_size / 2 in the high half.
  0 to 13 is the distance of the exponent below the row's byte less the column's. 14 is exponent 0: zeros and
  subnormals, so zeros are cheap whatever their neighbours are. 15 is an *escape*.
- The tail: first a byte for each row, then half a byte for each column. Column j has the low half of a byte,
  and column j + head_dim / 2 the high half. The exponents of escapes follow in order of their position. The
  rest is 0.

The order makes indices unnecessary: an escape's place is the number of escapes before it. There is one list
for the whole tile, since escapes cluster. It has places for at least one number in 128. A tile with more
escapes cannot be packed, and `pack` reports this.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# One in 6,000 normally distributed numbers is an escape, with or without large channels. None of thousands of
# tiles of 32 tokens and heads of 128 needed more than 8 of its 32 places.
_NUMBERS_PER_PLACE = 128
_MIN_TOKENS = 2
MAX_BELOW = np.int32(15)
ZERO, ESCAPE = np.int32(14), np.int32(15)
_FARTHEST = np.int32(511)  # above every distance of two exponents, below those of a number and a zero
_FAR_BELOW = np.int32(-1024)


class PackedTile(NamedTuple):
    """Packed layout of the tiles of pages of one shape; static in a program.

    Attributes:
      page_size: rows of a page, an even number.
      head_dim: numbers of a row, and bytes of a packed one; even as well.
    """

    page_size: int
    head_dim: int

    @property
    def first_tail_row(self) -> int:
        """Number of rows before the tail."""
        return self.page_size + self.page_size // 2

    @property
    def num_tail_rows(self) -> int:
        """Number of rows of the tail, which holds exponents."""
        least_places = self.page_size * self.head_dim // _NUMBERS_PER_PLACE
        return -(-(self.first_place + least_places) // self.head_dim)

    @property
    def first_place(self) -> int:
        """Number of bytes of the tail before the exponents of escapes."""
        return self.page_size + self.head_dim // 2

    @property
    def num_rows(self) -> int:
        """Number of rows of bytes; unpacked they would be 2 * page_size."""
        return self.first_tail_row + self.num_tail_rows

    @property
    def num_places(self) -> int:
        """Escapes for which the tail has room."""
        return self.num_tail_rows * self.head_dim - self.first_place

    @property
    def share(self) -> float:
        """Packed bytes divided by the bytes of the page."""
        return self.num_rows / (2 * self.page_size)


def packed_tile(page_size: int, head_dim: int) -> PackedTile | None:
    """Return the packed layout of pages of this shape; None if packing saves nothing."""
    if page_size < _MIN_TOKENS or page_size % 2 or head_dim < 2 or head_dim % 2:
        return None
    tile = PackedTile(page_size, head_dim)
    return tile if tile.num_rows < 2 * page_size else None


# Functions of one number: i32 in and out, also called inside kernels.


def exponents(bits: Any) -> Any:
    """Return the exponents, 0 to 255, of the bits of bfloat16 numbers."""
    return (bits >> np.int32(7)) & np.int32(0xFF)


def signed_mantissas(bits: Any) -> Any:
    """Return one byte each: the sign, then the mantissa."""
    return ((bits >> np.int32(8)) & np.int32(0x80)) | (bits & np.int32(0x7F))


def columns_below(highest: Any) -> Any:
    """Return the columns' offsets from their largest exponents [..., head_dim]."""
    return jnp.minimum(highest.max(axis=-1, keepdims=True) - highest, MAX_BELOW)


def weights_of(exponent: Any, column: Any) -> Any:
    """Return exponents plus column offsets; a row's offset is the largest of these, or 0."""
    return jnp.where(exponent == np.int32(0), _FAR_BELOW, exponent) + column


def codes_of(distance: Any) -> Any:
    """Return the 4-bit codes; `distance` is how far the weights are below their row's offset."""
    far = jnp.where(distance > _FARTHEST, ZERO, ESCAPE)
    return jnp.where(distance < ZERO, distance, far)


def exponents_of(codes: Any, reference: Any, escaped: Any) -> Any:
    """Invert `codes_of`: return the exponents of codes. `escaped` is used where the code is ESCAPE."""
    near = jnp.where(codes == ZERO, np.int32(0), reference - codes)
    return jnp.where(codes == ESCAPE, escaped, near)


def bits_of(exponent: Any, signed_mantissa: Any) -> Any:
    """Return the bits of bfloat16 numbers."""
    sign = (signed_mantissa & np.int32(0x80)) << np.int32(8)
    return sign | (exponent << np.int32(7)) | (signed_mantissa & np.int32(0x7F))


def as_bits(numbers: Any) -> Any:
    """Return the bits of bfloat16 numbers, as i32."""
    return jax.lax.bitcast_convert_type(numbers, jnp.uint16).astype(jnp.int32)


def as_numbers(bits: Any) -> Any:
    """Return the bfloat16 numbers that have these bits, i32."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


# Whole pages, on any platform


def num_escapes(tiles: jax.Array) -> jax.Array:
    """Return i32[...], the number of escapes of each tile bf16[..., page_size, head_dim]."""
    exponent = exponents(as_bits(tiles))
    column = columns_below(exponent.max(axis=-2))[..., None, :]
    weights = weights_of(exponent, column)
    codes = codes_of(weights.max(axis=-1, keepdims=True, initial=0) - weights)
    return (codes == ESCAPE).sum(axis=(-2, -1), dtype=jnp.int32)


def pack(pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return packed pages, and for each page the number of escapes without a place in its worst tile.

    Args:
      pages: bf16[num_pages, page_size, heads, head_dim], of a shape that `packed_tile` supports.

    Returns:
      u8[num_pages, num_rows, heads, head_dim], and i32[num_pages], which is 0 for a complete page.
    """
    num_pages, page_size, num_heads, head_dim = pages.shape
    tile = PackedTile(page_size, head_dim)
    bits = as_bits(jnp.swapaxes(pages, 1, 2)).reshape(-1, page_size, head_dim)
    exponent = exponents(bits)
    column = columns_below(exponent.max(axis=1))
    weights = weights_of(exponent, column[:, None])
    row = weights.max(axis=-1, initial=0)
    codes = codes_of(row[..., None] - weights)
    half, half_row = page_size // 2, head_dim // 2
    nibbles = codes[:, :half] | (codes[:, half:] << 4)
    num_before = jnp.cumsum((codes == ESCAPE).reshape(len(bits), -1).astype(jnp.int32), axis=-1)
    # Searching the number for each place is far cheaper than searching the place for each number.
    ranks = jnp.arange(1, tile.num_places + 1, dtype=jnp.int32)
    found = jax.vmap(lambda counts: jnp.searchsorted(counts, ranks))(num_before)
    flat = exponent.reshape(len(bits), -1)
    escaped = jnp.take_along_axis(flat, jnp.minimum(found, flat.shape[1] - 1), axis=-1)
    needed = num_before[:, -1:]
    columns = column[:, :half_row] | (column[:, half_row:] << 4)
    tail = jnp.concatenate([row, columns, jnp.where(ranks <= needed, escaped, 0)], axis=-1)
    rows = [signed_mantissas(bits), nibbles, tail.reshape(-1, tile.num_tail_rows, head_dim)]
    packed = jnp.concatenate(rows, axis=1).astype(jnp.uint8)
    packed = jnp.swapaxes(packed.reshape(num_pages, num_heads, tile.num_rows, head_dim), 1, 2)
    num_unplaced = jnp.maximum(needed - tile.num_places, 0).reshape(num_pages, num_heads)
    return packed, num_unplaced.max(axis=-1)


def unpack(packed: jax.Array, page_size: int) -> jax.Array:
    """Return bf16[num_pages, page_size, heads, head_dim] from the packed pages of `pack`."""
    num_pages, num_rows, num_heads, head_dim = packed.shape
    tile = PackedTile(page_size, head_dim)
    rows = jnp.swapaxes(packed, 1, 2).reshape(-1, num_rows, head_dim).astype(jnp.int32)
    mantissas, nibbles = rows[:, :page_size], rows[:, page_size : tile.first_tail_row]
    tail = rows[:, tile.first_tail_row :].reshape(len(rows), -1)
    codes = jnp.concatenate([nibbles & 0xF, nibbles >> 4], axis=1)
    is_escape = (codes == ESCAPE).reshape(len(rows), -1).astype(jnp.int32)
    places = tile.first_place - 1 + jnp.cumsum(is_escape, axis=-1)
    escaped = jnp.take_along_axis(tail, places, axis=-1).reshape(codes.shape)
    columns = tail[:, page_size : tile.first_place]
    column = jnp.concatenate([columns & 0xF, columns >> 4], axis=-1)
    exponent = exponents_of(codes, tail[:, :page_size, None] - column[:, None], escaped)
    numbers = as_numbers(bits_of(exponent, mantissas))
    return jnp.swapaxes(numbers.reshape(num_pages, num_heads, page_size, head_dim), 1, 2)
