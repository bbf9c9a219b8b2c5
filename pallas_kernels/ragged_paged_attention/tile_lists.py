"""How a batch becomes tiles and merges: pure index arithmetic.

Owns: the fields of both lists. The same lines run on the host with numpy, where lists have their true length,
and inside a jit with jax.numpy, where they have their maximum. Does not know: devices or kernels, nor where
ranges are cut (`tile_splits`). Called by: `metadata`; the field names also by the kernels.

A *tile* is up to `rows // group` query tokens of one row against one key range. A long key range is split,
as in flash decoding; the parts leave partial results in *slots*, and *merges* add them up, `MERGE_ROWS`
query rows each. Query tokens past the last row form one pseudo row without keys, so that the kernel itself
writes their zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.ragged_paged_attention.block_sizes import MERGE_ROWS
from pallas_kernels.ragged_paged_attention.tile_specs import HEADER_LEN, NUM_FIELDS, TileSpec
from pallas_kernels.ragged_paged_attention.tile_splits import Chunks, Pieces, row_ranks

# Fields of a tile: row, first query token, number of tokens, the first one's position, key range, slot or -1.
# The n-th entry of an `even` class says besides where the n-th piece ends: how many entries come before.
ROW, TOKEN, NUM_TOKENS, POSITION, KV_BEGIN, KV_END, SLOT, PIECE_END = range(8)
# Fields of a merge: the tile's first query token and their number, the row where its partial results begin,
# the number of its parts, the class's rows, and where this merge begins among the tile's query rows, counted
# token by token wherever they lie.
MERGE_TOKEN, MERGE_NUM_TOKENS, MERGE_PARTIAL, MERGE_NUM_SPLITS, MERGE_CLASS_ROWS, MERGE_FIRST_ROW = range(6)


def build_lists(
    xp: Any, spec: TileSpec, begins: Any, q_lens: Any, kv_lens: Any
) -> tuple[list[Any], list[Any]]:
    """The header, and the entries of every class and, last, of the merges.

    Args:
      xp: numpy or jax.numpy.
      spec: sizes and tile classes.
      begins: i32[num_rows + 1], first query token of each row; the last row is the pseudo row.
      q_lens: i32[num_rows + 1].
      kv_lens: i32[num_rows + 1].
    """
    counts, num_pieces, lists, merges = [], [], [], []
    thresholds = [spec.tile_tokens(c) for c in spec.blocks.classes[:-1]]
    is_pseudo = xp.arange(len(q_lens)) == len(q_lens) - 1
    for index, tile_class in enumerate(spec.blocks.classes):
        # A range goes to the first class that holds it whole, the pseudo row to the last.
        wanted = q_lens > (thresholds[index - 1] if index else 0)
        if index < len(thresholds):
            wanted &= (q_lens <= thresholds[index]) & ~is_pseudo
        else:
            wanted |= is_pseudo
        class_q_lens = q_lens * wanted
        if xp is np and not class_q_lens[:-1].any():
            lists.append(_pseudo_tiles(int(begins[-1]), int(class_q_lens[-1]), spec, index))
            counts.append(len(lists[-1]))
            num_pieces.append(min(counts[-1], int(tile_class.even)))
            continue
        num_tiles, tiles, class_pieces, num_merges, class_merges = _class_lists(
            xp, spec, index, begins, class_q_lens, kv_lens
        )
        counts.append(num_tiles)
        num_pieces.append(class_pieces)
        lists.append(tiles)
        merges.append((num_merges, class_merges))
    counts.append(sum([n for n, _ in merges]))
    header = counts + [0] * (HEADER_LEN - len(counts))
    for index, number in enumerate(num_pieces):
        header[spec.pieces_place(index)] = number
    joined = [entries for _, entries in merges] or [_table(np, [np.zeros(0, np.int32)])]
    table = joined[0] if len(joined) == 1 else xp.concatenate(joined)
    if xp is not np:  # padding behind the entries of each class: move it behind them all
        padding = xp.concatenate([xp.arange(len(entries)) >= n for n, entries in merges])
        table = table[xp.argsort(padding, stable=True)]
    lists.append(table)
    return header, lists


def _class_lists(
    xp: Any, spec: TileSpec, index: int, begins: Any, q_lens: Any, kv_lens: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """Tiles of one class, their pieces' number, and its merges; tiles and merges with their counts.

    Tiles come piece by piece, or the widest key range first, or (prompts) row by row.
    """
    tile_class, tokens = spec.blocks.classes[index], spec.tile_tokens(spec.blocks.classes[index])
    fixed = xp is not np
    # Query tiles.
    num_q_tiles, row, part = _expand(xp, -(-q_lens // tokens), spec.max_num_q_tiles[index] if fixed else None)
    offset = part * tokens
    q_len = q_lens.take(row)
    num_tokens = xp.minimum(tokens, q_len - offset)
    position = kv_lens.take(row) - q_len + offset
    kv_end = xp.maximum(position + num_tokens, 0)
    if fixed:
        kv_end = xp.where(xp.arange(len(row)) < num_q_tiles, kv_end, 0)
    if tile_class.even:
        most = spec.max_num_slots[index] // 2  # each cut within a tile adds a slot to it, the first one two
        splits: Chunks | Pieces = Pieces(
            xp, tile_class, num_heads=spec.num_kv_heads, max_num=most, kv_end=kv_end
        )
    else:
        is_prompts = 0 < index == len(spec.blocks.classes) - 1
        rank = row_ranks(xp, q_lens, kv_lens).take(row) if is_prompts else None
        splits = Chunks(xp, tile_class, max_num_slots=spec.max_num_slots[index], kv_end=kv_end, rank=rank)
    num_splits = splits.num_splits
    num_slots = num_splits * (num_splits > 1)
    if fixed:
        num_splits = xp.where(xp.arange(len(row)) < num_q_tiles, num_splits, 0)
    slot_begin = xp.cumsum(num_slots) - num_slots
    token = begins.take(row) + offset
    # Tiles: one per split.
    num_tiles, tile, part = _expand(xp, num_splits, spec.max_num_tiles[index] if fixed else None)
    parts = splits.parts(tile, part, num_tiles if fixed else None)
    tile, part = parts.tile, parts.part
    slot = xp.where(num_slots.take(tile) > 0, slot_begin.take(tile) + part, -1)
    real_row = row * (row < len(q_lens) - 1)  # the pseudo row reads no page; row 0 always has some
    q_tiles = _table(xp, [real_row, token, num_tokens, position])
    columns = [parts.kv_begin, parts.kv_begin + parts.width, slot, parts.piece_end]
    tiles = _table(xp, columns, q_tiles.take(tile, axis=0))
    # Merges: one per MERGE_ROWS query rows of a split tile.
    blocks = (num_slots > 0) * -(-(num_tokens * spec.group) // MERGE_ROWS)
    size = spec.max_num_slots[index] // 2 * -(-tile_class.rows // MERGE_ROWS) if fixed else None
    num_merges, tile, part = _expand(xp, blocks, size)
    if not fixed and not num_merges:
        return num_tiles, tiles, parts.num_pieces, 0, _table(xp, [part])
    partial = spec.partial_begin(index) + slot_begin * (spec.num_kv_heads * tile_class.rows)
    columns = [column.take(tile) for column in (token, num_tokens, partial, num_slots)]
    columns += [part * 0 + tile_class.rows, part * MERGE_ROWS]
    return num_tiles, tiles, parts.num_pieces, num_merges, _table(xp, columns)


def _pseudo_tiles(begin: int, q_len: int, spec: TileSpec, index: int) -> np.ndarray:
    """What `_class_lists` makes of the pseudo row alone, the usual case, in a few steps."""
    tokens = spec.tile_tokens(spec.blocks.classes[index])
    offsets = np.arange(0, q_len, tokens)
    tiles = np.zeros((len(offsets), NUM_FIELDS), np.int32)
    tiles[:, TOKEN] = offsets + begin
    tiles[:, NUM_TOKENS] = np.minimum(tokens, q_len - offsets)
    tiles[:, POSITION] = offsets - q_len
    tiles[:, SLOT] = -1
    tiles[:, PIECE_END] = len(offsets) * spec.blocks.classes[index].even  # all of them are one piece
    return tiles


def _expand(xp: Any, counts: Any, size: int | None) -> tuple[Any, Any, Any]:
    """The total of `counts`, and for each of its items the place it counts for and its index there.

    size: length of the result where it must be fixed; entries past the total mean nothing.
    """
    if size is None and counts.max() <= 1:  # one each, as when decoding
        place = np.flatnonzero(counts)
        return len(place), place, np.zeros(len(place), np.int32)
    ends = xp.cumsum(counts)
    places = xp.arange(len(counts))
    place = places.repeat(counts) if size is None else xp.repeat(places, counts, total_repeat_length=size)
    return ends[-1], place, xp.arange(len(place)) - (ends - counts).take(place)


def _table(xp: Any, columns: list[Any], head: Any = None) -> Any:
    """i32[len, NUM_FIELDS] with the columns side by side, behind the first half of `head` if given."""
    if xp is not np:
        first = [] if head is None else [head[:, : NUM_FIELDS // 2]]
        table = xp.concatenate([*first, xp.stack(columns, axis=1)], axis=1)
        return xp.pad(table, ((0, 0), (0, NUM_FIELDS - table.shape[1]))).astype(np.int32)
    table = np.zeros((len(columns[0]), NUM_FIELDS), np.int32) if head is None else head
    for index, column in enumerate(columns, 0 if head is None else NUM_FIELDS // 2):
        table[:, index] = column
    return table
