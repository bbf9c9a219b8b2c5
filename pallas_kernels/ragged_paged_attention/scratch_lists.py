"""Choice of the pages in 8 bits that are decoded before attention reads them.

Owns: which rows of a step read decoded pages, and two parts of the flat array: the pages to decode, and where
each row finds its own. Does not know: tiles, or how pages are decoded.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.ragged_paged_attention.tile_specs import NUM_DECODED, TileSpec

# Tiles of a row from which decoding its pages saves time. A tile that converts codes itself takes about 0.02
# us longer per page and layer on an H200, and decoding a page takes at most 0.075 us.
_LEAST_TILES = 4
NOT_DECODED = -(2**31)


def fill_scratch_lists(
    spec: TileSpec, q_lens: np.ndarray, kv_lens: np.ndarray, page_indices: np.ndarray, out: np.ndarray
) -> np.ndarray:
    """Write the pages to decode and the rows' table to `out`, and return where each row begins in `out`.

    Rows with the most tiles come first; those that do not fit are left to the kernel that converts codes. A
    page of several rows is decoded once. With a window, a row's table begins at the page in which that of its
    first token begins; where few tiles read a page, none is decoded.

    Args:
      spec: a spec with a scratch pool.
      q_lens: i32[num_rows + 1], the pseudo row last.
      kv_lens: i32[num_rows + 1].
      page_indices: i32[max_num_seqs, pages_per_seq].
      out: i32[tiles_len], the flat array.

    Returns:
      i32[num_rows + 1], where `out` has the page of the row's key 0 or would have it; `NOT_DECODED` for rows
      that are not in the scratch pool.
    """
    bases = np.full(len(q_lens), NOT_DECODED, np.int32)
    tile_tokens = spec.tile_tokens(spec.blocks.classes[-1])
    least_tokens = (_LEAST_TILES - 1) * tile_tokens
    if q_lens[:-1].max(initial=0) <= least_tokens:
        return bases
    if spec.window is not None and spec.window < least_tokens:
        return bases
    num_tiles = -(-q_lens[:-1] // tile_tokens)
    num_tiles[kv_lens[:-1] <= 0] = 0
    rows, used = [], 0
    for row in np.argsort(-num_tiles, kind="stable")[: np.count_nonzero(num_tiles >= _LEAST_TILES)].tolist():
        end = -(-int(kv_lens[row]) // spec.page_size)
        first = 0
        if spec.window is not None:
            first = max(int(kv_lens[row] - q_lens[row]) + 1 - spec.window, 0) // spec.page_size
        if used + end - first <= spec.scratch_pages:
            bases[row] = spec.table_offset + used - first
            rows.append(page_indices[row, first:end])
            used += end - first
    if not rows:
        return bases
    pages = np.concatenate(rows)
    order = np.arange(used, dtype=np.int32)
    place = np.empty(int(pages.max()) + 1, np.int32)
    place[pages] = order  # of a page that several rows have, the last place
    places = place[pages]
    is_last = places == order
    table = (np.cumsum(is_last, dtype=np.int32) - 1)[places]
    decoded = pages[is_last]
    out[NUM_DECODED] = len(decoded)
    out[spec.decoded_offset : spec.decoded_offset + len(decoded)] = decoded
    out[spec.table_offset : spec.table_offset + used] = table
    return bases
