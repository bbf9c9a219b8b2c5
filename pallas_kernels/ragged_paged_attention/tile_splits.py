"""How the key ranges of a class's tiles are cut, and in which order the parts come.

Owns: both ways of cutting: each tile by itself, or the keys of all tiles into pieces of equally many blocks.
The same lines run with numpy and with jax.numpy. Does not know: tokens, slots or merges.
Called by: `tile_lists`.

A program of a Mosaic kernel takes what it is dealt, one KV head at a time. Tiles by themselves are dealt the
widest first, and some programs get one more: 32 alike of 10 heads are 320 items, three for some of 132
programs and two for others. Of pieces, 13 for each head keep 130 programs busy for one round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.block_sizes import MAX_NUM_SPLITS, NUM_PROGRAMS, TileClass

_MAX_ROUNDS = 4
_MAX_BLOCKS = 2**15  # of a key range
_MANY = 2**30  # above every key of a tile, every length and every piece


class Parts(NamedTuple):
    """The parts of all tiles, in the order of the list; i32[num_parts] each, but the number.

    Attributes:
      tile: whose part it is.
      part: which of its tile's.
      kv_begin: first key.
      width: number of keys.
      num_pieces: which the parts make up; 0: each is dealt by itself.
      piece_end: how many parts come before the end of the n-th piece, for every n.
    """

    tile: Any
    part: Any
    kv_begin: Any
    width: Any
    num_pieces: Any
    piece_end: Any


class _Numbers(NamedTuple):
    """How single numbers are computed with."""

    of: Callable[[Any], Any]
    lower: Callable[[Any, Any], Any]
    higher: Callable[[Any, Any], Any]
    choose: Callable[[Any, Any, Any], Any]


# Numbers of Python on the host: numpy takes a microsecond for each of its own.
_ON_HOST = _Numbers(int, min, max, lambda condition, one, other: one if condition else other)
_TRACED = _Numbers(jnp.asarray, jnp.minimum, jnp.maximum, jnp.where)


class Chunks:
    """Each tile is cut by itself, where it is long.

    Attributes:
      num_splits: i32[num_q_tiles], parts of each tile.
    """

    def __init__(
        self, xp: Any, tile_class: TileClass, *, max_num_slots: int, kv_end: Any, rank: Any = None
    ) -> None:
        """Cuts the key ranges 0 to `kv_end` of tiles, i32[num_q_tiles].

        `rank` is that of each tile's row, i32[num_q_tiles], for parts row by row; None: the widest first.
        """
        self._xp, self._block_kv, self._kv_end, self._rank = xp, tile_class.block_kv, kv_end, rank
        # Every split range has at most 2 * kv_end / longest slots, so that the slots always suffice.
        longest = xp.maximum(tile_class.min_split_kv, -(-2 * kv_end.sum() // max_num_slots))
        num_splits = xp.maximum(xp.minimum(-(-kv_end // longest), MAX_NUM_SPLITS), 1)
        self._chunk = xp.maximum(-(-kv_end // (num_splits * self._block_kv)), 1) * self._block_kv
        self.num_splits = xp.maximum(-(-kv_end // self._chunk), 1)

    def parts(self, tile: Any, part: Any, num_parts: Any) -> Parts:
        """The widest first, or row by row: see `_by_row`.

        Args:
          tile: whose part each is.
          part: which of its tile's.
          num_parts: where entries past it are padding; None: there are none.
        """
        xp = self._xp
        chunk = self._chunk.take(tile)
        kv_begin = part * chunk
        width = xp.minimum(chunk, self._kv_end.take(tile) - kv_begin)
        if num_parts is not None:
            width = xp.where(xp.arange(len(part)) < num_parts, width, -self._block_kv)
        # In blocks a width fits 16 bits, which numpy sorts by radix, several times faster.
        narrowness = (-(width // self._block_kv)).astype(np.int16)
        if self._rank is not None:
            narrowness = _by_row(xp, narrowness, self._rank.take(tile))
        order = xp.argsort(narrowness, stable=True)
        tile, part, kv_begin, width = (x.take(order) for x in (tile, part, kv_begin, width))
        return Parts(tile, part, kv_begin, width, 0, part * 0)


class Pieces:
    """The blocks of all tiles, one tile after the other, in pieces of as many; one more or less.

    A piece may begin and end inside a tile and have whole ones between. Tiles without keys, which come behind
    all others as they are the pseudo row's, are a last piece.

    Attributes:
      num_splits: i32[num_q_tiles], parts of each tile; one where it has no keys.
    """

    def __init__(self, xp: Any, tile_class: TileClass, *, num_heads: int, max_num: int, kv_end: Any) -> None:
        """Cuts the key ranges 0 to `kv_end` of tiles, i32[num_q_tiles], into at most `max_num` pieces."""
        self._xp, self._block_kv, self._kv_end = xp, tile_class.block_kv, kv_end
        blocks = -(-kv_end // tile_class.block_kv)
        self._ends = xp.cumsum(blocks)
        self._begins = self._ends - blocks
        numbers = self._numbers = _ON_HOST if xp is np else _TRACED
        self._total, longest = (numbers.of(x) for x in (self._ends[-1], blocks.max()))
        most = numbers.lower(max_num, self._total * tile_class.block_kv // tile_class.min_split_kv)
        # A tile of the most blocks has two parts more than pieces fit into it, at most.
        most = numbers.lower(most, (MAX_NUM_SPLITS - 2) * self._total // numbers.higher(longest, 1))
        # Pieces with keys; 0 without any.
        num = self._best_num(NUM_PROGRAMS * tile_class.num_pairs, num_heads, most)
        self._num = numbers.lower(num, self._total)
        self._first = xp.where(blocks > 0, self._piece_of(self._begins), self._num)
        last = xp.where(blocks > 0, self._piece_of(self._ends - 1), self._num)
        self.num_splits = last - self._first + 1

    def parts(self, tile: Any, part: Any, num_parts: Any) -> Parts:
        """In the order of the tiles; arguments as of `Chunks.parts`."""
        xp, places = self._xp, self._xp.arange(len(tile))
        piece, begin, end = self._first.take(tile) + part, self._begins.take(tile), self._ends.take(tile)
        kv_begin = (xp.maximum(self._cut(piece), begin) - begin) * self._block_kv
        kv_end = (xp.minimum(self._cut(piece + 1), end) - begin) * self._block_kv
        width = xp.minimum(kv_end, self._kv_end.take(tile)) - kv_begin
        has_keys = begin < end
        if num_parts is not None:
            piece = xp.where(places < num_parts, piece, _MANY)
        num_pieces = self._num + (piece == self._num).any()  # parts without keys are one more
        ends = xp.searchsorted(piece, places, side="right")
        return Parts(tile, part, kv_begin * has_keys, width * has_keys, num_pieces, ends)

    def _best_num(self, num_programs: int, num_heads: int, most: Any) -> Any:
        """So many that the fullest program has least to do; the fewest of those, up to `most`."""
        numbers, best, least = self._numbers, 1, _MANY
        for rounds in range(1, _MAX_ROUNDS + 1):
            num = numbers.higher(numbers.lower(max(rounds * num_programs // num_heads, 1), most), 1)
            # In halves of a block; a piece costs about one, for the part that it adds.
            cost = -(-num * num_heads // num_programs) * (2 * -(-self._total // num) + 1)
            best, least = numbers.choose(cost < least, num, best), numbers.lower(cost, least)
        return best

    def _cut(self, piece: Any) -> Any:
        """The first block of a piece, counted over all tiles."""
        return piece * self._total // self._numbers.higher(self._num, 1)

    def _piece_of(self, block: Any) -> Any:
        """The last piece that begins at a block or before it."""
        return ((block + 1) * self._num - 1) // self._numbers.higher(self._total, 1)


def row_ranks(xp: Any, q_lens: Any, kv_lens: Any) -> Any:
    """Of every row, the shortest 0, which makes it the last; rows without tiles are behind the longest."""
    lens = xp.where((q_lens > 0) & (kv_lens > 0), kv_lens, _MANY)
    return xp.argsort(xp.argsort(lens, stable=True), stable=True).astype(np.int32)


def _by_row(xp: Any, narrowness: Any, rank: Any) -> Any:
    """Keys for prompts, which have many tiles each: row after row, the longest first.

    Then the keys of one row come from the L2 cache for all but the first of its tiles, where those of all
    rows would not fit. In the last row the widest tiles come first, in the one before it last, and so on:
    neighbours in the list are alike, which is what dealing them out evenly takes. Tiles of less than a
    block come last, and padding, whose width is -1 block, behind everything.
    """
    widths = -narrowness.astype(np.int32)
    keys = xp.where(rank % 2 == 0, _MAX_BLOCKS - widths, widths) - rank * _MAX_BLOCKS
    return xp.where(widths > 0, keys, _MANY - widths)
