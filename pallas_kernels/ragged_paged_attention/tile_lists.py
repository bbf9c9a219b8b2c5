"""Division of a batch into tiles and merges: pure index arithmetic.

Owns: the fields of both lists, and the rules by which ranges are split. The same code runs on the host with
numpy, where lists have their true length, and inside a jit with jax.numpy, where they have their maximum.
Does not know: devices or kernels. Called by: `metadata`.

A *tile* is up to `rows // group` query tokens of one row against one key range. A long key range is split,
as in flash decoding. The parts write partial results to *slots*, and *merges* combine them, `MERGE_ROWS`
query rows each. Query tokens past the last row form one pseudo row without keys, so that the kernel itself
writes their zeros. With a window, a tile's range begins at the block in which the window of its first token
begins. The tile's later tokens do not see all keys from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.ragged_paged_attention.block_sizes import MAX_NUM_SPLITS, MERGE_ROWS
from pallas_kernels.ragged_paged_attention.scratch_lists import NOT_DECODED
from pallas_kernels.ragged_paged_attention.tile_specs import NUM_FIELDS, NUM_PROGRAMS, TileSpec

_MAX_BLOCKS = 2**15  # blocks of a key range; the order in the list does not distinguish wider ones
# Keys that a program could compute in the time that an item takes besides its keys: a whole tile, a part.
# They follow from the times of eleven lists on an H200, as does the shortest part that is worth its merge.
_WHOLE_KEYS, _PART_KEYS, _LEAST_PART = 256, 512, 512
_MANY = 2**30  # above every sort key of a tile, and every length
# Fields of a tile: row (where the flat array has its pages, if these are decoded), first query token, number
# of tokens, the first one's position, key range, slot or -1.
ROW, TOKEN, NUM_TOKENS, POSITION, KV_BEGIN, KV_END, SLOT = range(7)
# Fields of a merge: the first query token of the tile and its number of tokens. Then the first row of the
# partial results, the number of parts, the rows of the class, and the first query row in this merge. Query
# rows are counted token by token, whatever their order in memory.
MERGE_TOKEN, MERGE_NUM_TOKENS, MERGE_PARTIAL, MERGE_NUM_SPLITS, MERGE_CLASS_ROWS, MERGE_FIRST_ROW = range(6)


def build_lists(
    xp: Any, spec: TileSpec, begins: Any, q_lens: Any, kv_lens: Any, bases: Any = None
) -> tuple[list[Any], list[Any]]:
    """Return the counts for the header, and the entries of every class and, last, of the merges.

    Args:
      xp: numpy or jax.numpy.
      spec: sizes and tile classes.
      begins: i32[num_rows + 1], first query token of each row; the last row is the pseudo row.
      q_lens: i32[num_rows + 1].
      kv_lens: i32[num_rows + 1].
      bases: i32[num_rows + 1], where the flat array has the row's pages in the scratch pool, `NOT_DECODED` if
        they are not there. None without a scratch pool.
    """
    counts, lists, merges = [], [], []
    last, first_long = len(spec.blocks.classes) - 1, spec.first_long_class
    thresholds = [spec.tile_tokens(c) for c in spec.blocks.classes[:first_long]]
    is_pseudo = xp.arange(len(q_lens)) == len(q_lens) - 1
    for index in range(last + 1):
        # A range belongs to the first class that holds it whole, or to that of the scratch pool. The pseudo
        # row belongs to the last class.
        if index > first_long:
            wanted = bases != NOT_DECODED
        else:
            wanted = q_lens > (thresholds[index - 1] if index else 0)
            if index < first_long:
                wanted &= q_lens <= thresholds[index]
            wanted &= ~is_pseudo
            if bases is not None:
                wanted &= bases == NOT_DECODED
        if index == last:
            wanted |= is_pseudo
        class_q_lens = q_lens * wanted
        if xp is np and not class_q_lens[:-1].any():
            lists.append(_pseudo_tiles(int(begins[-1]), int(class_q_lens[-1]), spec, index))
            counts.append(len(lists[-1]))
            continue
        places = xp.where(is_pseudo, 0, bases) if index > first_long else None
        num_tiles, tiles, num_merges, class_merges = _class_lists(
            xp, spec, index, begins, class_q_lens, kv_lens, places
        )
        counts.append(num_tiles)
        lists.append(tiles)
        merges.append((num_merges, class_merges))
    counts.append(sum([n for n, _ in merges]))
    joined = [entries for _, entries in merges] or [_table(np, [np.zeros(0, np.int32)])]
    table = joined[0] if len(joined) == 1 else xp.concatenate(joined)
    if xp is not np:  # move the padding from after the entries of each class to the end
        padding = xp.concatenate([xp.arange(len(entries)) >= n for n, entries in merges])
        table = table[xp.argsort(padding, stable=True)]
    lists.append(table)
    return counts, lists


def _class_lists(
    xp: Any, spec: TileSpec, index: int, begins: Any, q_lens: Any, kv_lens: Any, places: Any
) -> tuple[Any, Any, Any, Any]:
    """Return the number of tiles, the tiles, the number of merges and the merges of one class.

    Tiles are ordered by the width of their key range, the widest first; those of prompts as in `_by_row`,
    unless they fill rounds of programs. `places` are what tiles have as their row, if not its number.
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
    block_kv, num_keys, kv_first = tile_class.block_kv, kv_end, None
    if spec.window is not None:
        # The block in which the first token's window begins. Padding has no keys.
        kv_first = xp.maximum(position - (spec.window - 1), 0) // block_kv * block_kv
        kv_first = xp.minimum(kv_first, kv_end)
        num_keys = kv_end - kv_first
    # Splits: every split range has at most 2 * num_keys / longest slots, so there are always enough slots.
    longest = xp.maximum(tile_class.min_split_kv, -(-2 * num_keys.sum() // spec.max_num_slots[index]))
    num_splits = xp.maximum(xp.minimum(-(-num_keys // longest), MAX_NUM_SPLITS), 1)
    fills: Any = False
    if tile_class.fills_rounds and (fixed or num_keys.max() >= 2 * _LEAST_PART):
        num_splits, fills = _fill_rounds(xp, spec, index, num_keys, num_splits)
    chunk = xp.maximum(-(-num_keys // (num_splits * block_kv)), 1) * block_kv
    num_splits = xp.maximum(-(-num_keys // chunk), 1)
    num_slots = num_splits * (num_splits > 1)
    if fixed:
        num_splits = xp.where(xp.arange(len(row)) < num_q_tiles, num_splits, 0)
    slot_begin = xp.cumsum(num_slots) - num_slots
    token = begins.take(row) + offset
    # Tiles: one per split.
    num_tiles, tile, part = _expand(xp, num_splits, spec.max_num_tiles[index] if fixed else None)
    tile_chunk = chunk.take(tile)
    kv_begin = part * tile_chunk
    if kv_first is not None:
        kv_begin = kv_first.take(tile) + kv_begin
    width = xp.minimum(tile_chunk, kv_end.take(tile) - kv_begin)
    if fixed:
        width = xp.where(xp.arange(len(part)) < num_tiles, width, -block_kv)
    # In 16 bits numpy uses a radix sort, several times faster. Widths are clipped to 16 bits: a larger one
    # would be sorted after the padding, whose width is -1 block.
    narrowness = (-xp.minimum(width // block_kv, _MAX_BLOCKS - 1)).astype(np.int16)
    keys = narrowness
    if 0 < index >= spec.first_long_class and (fixed or not fills):
        keys = _by_row(xp, narrowness, row.take(tile), q_lens, kv_lens)
    if tile_class.fills_rounds and (fixed or fills):
        keys = xp.where(fills, _by_width_and_part(xp, narrowness, width, part), keys)
    order = xp.argsort(keys, stable=True)
    tile, part, kv_begin = tile.take(order), part.take(order), kv_begin.take(order)
    slot = xp.where(num_slots.take(tile) > 0, slot_begin.take(tile) + part, -1)
    # The pseudo row reads no page; row 0 always has one.
    real_row = row * (row < len(q_lens) - 1) if places is None else places.take(row)
    q_tiles = _table(xp, [real_row, token, num_tokens, position])
    tiles = _table(xp, [kv_begin, kv_begin + width.take(order), slot], q_tiles.take(tile, axis=0))
    # Merges: one per MERGE_ROWS query rows of a split tile.
    blocks = (num_slots > 0) * -(-(num_tokens * spec.group) // MERGE_ROWS)
    size = spec.max_num_slots[index] // 2 * -(-tile_class.rows // MERGE_ROWS) if fixed else None
    num_merges, tile, part = _expand(xp, blocks, size)
    if not fixed and not num_merges:
        return num_tiles, tiles, 0, _table(xp, [part])
    partial = spec.partial_begin(index) + slot_begin * (spec.num_kv_heads * tile_class.rows)
    columns = [column.take(tile) for column in (token, num_tokens, partial, num_slots)]
    return num_tiles, tiles, num_merges, _table(xp, [*columns, part * 0 + tile_class.rows, part * MERGE_ROWS])


def _fill_rounds(xp: Any, spec: TileSpec, index: int, num_keys: Any, num_splits: Any) -> tuple[Any, Any]:
    """Return the parts of each tile, and whether they fill rounds of programs; else they are `num_splits`.

    Of the tiles with more than half as many keys as the widest, those that fill whole rounds stay whole, and
    so do narrower ones. The narrowest of the wide tiles, which are left, are cut into as many parts as fill
    some rounds. This is taken if its busiest program has less to do than with `num_splits`, and never for
    ranges that are too short to be cut.
    """
    block_kv, heads = spec.blocks.classes[index].block_kv, spec.num_kv_heads
    per_round = max(NUM_PROGRAMS // heads, 1)
    is_wide = 2 * num_keys > num_keys.max()
    num_wide = is_wide.sum()
    num_rest = num_wide % per_round
    rank = xp.argsort(xp.argsort(-num_keys, stable=True), stable=True)
    is_rest = is_wide & (rank >= num_wide - num_rest)
    width = xp.where(is_rest, num_keys, 0).max()
    slots, num_some = spec.max_num_slots[index], xp.maximum(num_rest, 1)
    rounds = xp.arange(1, max(slots // per_round, 1) + 1)
    most = xp.minimum(xp.minimum(width // _LEAST_PART, MAX_NUM_SPLITS), slots // num_some)
    parts = xp.maximum(xp.minimum(rounds * per_round // num_some, most), 1)
    taken = -(-num_rest * parts // per_round)
    costs = taken * (-(-width // (parts * block_kv)) * block_kv + _PART_KEYS)
    filling = xp.where(is_rest, parts.take(xp.argmin(costs)), 1)
    if xp is np and filling.max() == num_splits.max() == 1:
        return num_splits, False
    busiest = [_busiest_keys(xp, spec, index, num_keys, splits) for splits in (filling, num_splits)]
    fills = (busiest[0] < busiest[1]) & (num_keys.max() >= 2 * _LEAST_PART)
    return xp.where(fills, filling, num_splits), fills


def _busiest_keys(xp: Any, spec: TileSpec, index: int, num_keys: Any, num_splits: Any) -> Any:
    """Return the busiest program's work in keys, if tiles have these parts and the widest come first."""
    block_kv, heads = spec.blocks.classes[index].block_kv, spec.num_kv_heads
    chunk = xp.maximum(-(-num_keys // (num_splits * block_kv)), 1) * block_kv
    num_parts = -(-num_keys // chunk)
    costs = chunk + xp.where(num_parts > 1, _PART_KEYS, _WHOLE_KEYS)
    order = xp.argsort(-costs)
    total = num_parts.sum() * heads
    most = total if xp is np else heads * spec.max_num_tiles[index]
    size = most + -most % NUM_PROGRAMS
    if xp is np:
        items = np.zeros(size, np.int32)
        items[:total] = costs.take(order).repeat(num_parts.take(order) * heads)
    else:
        items = xp.repeat(costs.take(order), num_parts.take(order) * heads, total_repeat_length=size)
        items = xp.where(xp.arange(size) < total, items, 0)
    rounds = items.reshape(-1, NUM_PROGRAMS)
    # As the kernel deals items out: in alternating directions.
    return (rounds[::2].sum(axis=0) + rounds[1::2].sum(axis=0)[::-1]).max()


def _by_width_and_part(xp: Any, narrowness: Any, width: Any, part: Any) -> Any:
    """Return sort keys by which equally wide parts of one position, which read the same keys, are neighbours.

    Tiles without keys come last, and after them the padding, whose width is -1 block.
    """
    keys = narrowness.astype(np.int32) * MAX_NUM_SPLITS + part
    return xp.where(width > 0, keys, xp.where(width < 0, 2, 1) * MAX_NUM_SPLITS)


def _by_row(xp: Any, narrowness: Any, row: Any, q_lens: Any, kv_lens: Any) -> Any:
    """Return sort keys for prompts, which have many tiles each: row after row, the longest row first.

    All but the first tile of a row then find its keys in the L2 cache, which the keys of all rows would not
    fit. In the last row the widest tiles come first, in the row before it last, and so on alternately. So
    neighbours in the list are similar, and dealing them out gives programs equal work. Tiles of less than a
    block come last, and after them the padding, whose width is -1 block.
    """
    # The shortest row gets rank 0, which makes it the last. Rows without such tiles rank above the longest.
    lens = xp.where((q_lens > 0) & (kv_lens > 0), kv_lens, _MANY)
    ranks = xp.argsort(xp.argsort(lens, stable=True), stable=True)
    rank = ranks.take(row).astype(np.int32)
    widths = -narrowness.astype(np.int32)
    keys = xp.where(rank % 2 == 0, _MAX_BLOCKS - widths, widths) - rank * _MAX_BLOCKS
    return xp.where(widths > 0, keys, _MANY - widths)


def _pseudo_tiles(begin: int, q_len: int, spec: TileSpec, index: int) -> np.ndarray:
    """Return the tiles of `_class_lists` for the pseudo row alone, the usual case, in fewer steps."""
    tokens = spec.tile_tokens(spec.blocks.classes[index])
    offsets = np.arange(0, q_len, tokens)
    tiles = np.zeros((len(offsets), NUM_FIELDS), np.int32)
    tiles[:, TOKEN] = offsets + begin
    tiles[:, NUM_TOKENS] = np.minimum(tokens, q_len - offsets)
    tiles[:, POSITION] = offsets - q_len
    tiles[:, SLOT] = -1
    return tiles


def _expand(xp: Any, counts: Any, size: int | None) -> tuple[Any, Any, Any]:
    """Repeat every place of `counts` by its count; return the total, the places, and the index in each place.

    size: length of the result if it must be fixed; entries past the total are meaningless.
    """
    if size is None and counts.max() <= 1:  # one each, as when decoding
        place = np.flatnonzero(counts)
        return len(place), place, np.zeros(len(place), np.int32)
    ends = xp.cumsum(counts)
    places = xp.arange(len(counts))
    place = places.repeat(counts) if size is None else xp.repeat(places, counts, total_repeat_length=size)
    return ends[-1], place, xp.arange(len(place)) - (ends - counts).take(place)


def _table(xp: Any, columns: list[Any], head: Any = None) -> Any:
    """Return i32[len, NUM_FIELDS] of the columns, after the first half of `head` if given."""
    if xp is not np:
        first = [] if head is None else [head[:, : NUM_FIELDS // 2]]
        table = xp.concatenate([*first, xp.stack(columns, axis=1)], axis=1)
        return xp.pad(table, ((0, 0), (0, NUM_FIELDS - table.shape[1]))).astype(np.int32)
    table = np.zeros((len(columns[0]), NUM_FIELDS), np.int32) if head is None else head
    for index, column in enumerate(columns, 0 if head is None else NUM_FIELDS // 2):
        table[:, index] = column
    return table
