"""Ragged paged attention in plain XLA, for any device, head size and dtype; the default on a CPU.

Owns: an online softmax over blocks of pages, in two forms. The platform for which a program is lowered
selects one. On accelerators all query tiles advance together, in products of the pages' dtype. On a CPU tiles
run one after another, each to its own end, in blocks that fit a core's cache. The many rows with one query do
not pay for the products of a whole tile. In both forms blocks bound the memory, never rows times context.
Does not know: tile lists, or devices. Called by: `api`.

Slots past a row's keys may hold anything, also NaN, and 0 * NaN is NaN. So values are masked before they are
weighted. For keys the scores are masked, after the product. So are pages before all windows of a tile.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.page_formats import PageKind

_MAX_TILE_TOKENS = 32
# Bound of the temporary memory (K and V, or scores) of tiles that advance together. Large blocks keep their
# number small, since a GPU's loop asks the host after each block whether there is another.
_BLOCK_BYTES = 64 << 20
_MAX_BLOCK_KEYS = 1024
# Bytes of a block of a single tile, in float32; more keys would often be past the row's end.
_CACHE_BYTES = 3 << 19
_MAX_CACHED_KEYS = 256
# Buckets up to this size decode: on a CPU their tiles have one token, which halves the compiled code.
_DECODE_TOKENS = 8
_MASKED = -1e30  # finite: a row that has seen no key yet must not turn into NaN


class _Tiles(NamedTuple):
    """Query tiles, row by row; those from `number` on are padding and have no tokens.

    Attributes:
      number: i32[], number of tiles.
      row: i32[N], row of each tile.
      token: i32[N], first token.
      length: i32[N], number of tokens.
      position: i32[N], position of the first token in its row.
    """

    number: jax.Array
    row: jax.Array
    token: jax.Array
    length: jax.Array
    position: jax.Array


def xla_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
    kind: PageKind,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """See `api.ragged_paged_attention`; arguments are already checked, and `kind` describes the pages."""
    args = (q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, *(() if sinks is None else (sinks,)))
    return _attend(*args, sm_scale=sm_scale, kind=kind, window=window, softcap=softcap)


# A function of its own, so that it is traced once for all layers.
@functools.partial(jax.jit, static_argnames=("sm_scale", "kind", "window", "softcap"))
def _attend(
    *args: jax.Array, sm_scale: float, kind: PageKind, window: int | None, softcap: float | None
) -> jax.Array:
    options: dict[str, Any] = {"sm_scale": sm_scale, "kind": kind, "window": window, "softcap": softcap}
    return lax.platform_dependent(
        *args,
        cpu=functools.partial(one_after_another, **options),
        default=functools.partial(together, **options),
    )


def one_after_another(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    sinks: jax.Array | None = None,
    *,
    sm_scale: float,
    kind: PageKind,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute the form for CPUs: tiles of rows with several queries, then rows with one, without padding."""
    num_tokens, max_num_seqs = q.shape[0], kv_lens.shape[0]
    tile_tokens = 1 if num_tokens <= _DECODE_TOKENS else min(_MAX_TILE_TOKENS, num_tokens)
    q_lens = _q_lens(cu_q_lens, num_seqs)

    def attend(out: jax.Array, tiles: _Tiles, size: int) -> jax.Array:
        """Return `out` with the results of tiles of up to `size` tokens."""
        lanes = jnp.arange(size)

        def body(index: jax.Array, out: jax.Array) -> jax.Array:
            row, token, length, position = (field[index] for field in tiles[1:])
            tokens = jnp.minimum(token + lanes, num_tokens - 1)
            queries = q.at[tokens].get(mode="promise_in_bounds").astype(jnp.float32) * sm_scale
            span = position, position + length
            found = _attend_alone(
                queries, kv_pages, page_indices[row], *span, sinks, kind=kind, window=window, softcap=softcap
            )
            found = jnp.where((lanes < length)[:, None, None], found, 0).astype(q.dtype)
            return lax.dynamic_update_slice_in_dim(out, found, token, 0)

        return lax.fori_loop(0, tiles.number, body, out)

    # The last tile may reach past the last token.
    out = jnp.zeros_like(q, shape=(num_tokens + tile_tokens - 1, *q.shape[1:]))
    if tile_tokens == 1:
        return attend(out, _tiles(q_lens, cu_q_lens, kv_lens, 1, num_tokens), 1)
    # A tile writes zeros past its row's end. Later tiles, of the next rows or of single queries, overwrite
    # them.
    num_tiles = num_tokens // tile_tokens + min(max_num_seqs, num_tokens // 2)
    several = jnp.where(q_lens > 1, q_lens, 0)
    out = attend(out, _tiles(several, cu_q_lens, kv_lens, tile_tokens, num_tiles), tile_tokens)
    single = jnp.where(q_lens == 1, 1, 0)
    out = attend(out, _tiles(single, cu_q_lens, kv_lens, 1, min(max_num_seqs, num_tokens)), 1)
    return out[:num_tokens]


def _attend_alone(
    queries: jax.Array,
    kv_pages: jax.Array,
    pages: jax.Array,
    position: jax.Array,
    kv_end: jax.Array,
    sinks: jax.Array | None,
    *,
    kind: PageKind,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """Return f32[size, num_q_heads, head_dim], the attention of one tile's scaled queries of this shape.

    The first query is at `position` of the row with these pages; keys from `kv_end` on are hidden.
    """
    size, num_q_heads, head_dim = queries.shape
    page_size, num_combined_heads = kind.page_size, kv_pages.shape[2]
    num_kv_heads, group = num_combined_heads // 2, 2 * num_q_heads // num_combined_heads
    affordable = min(_CACHE_BYTES // (4 * num_combined_heads * head_dim), pages.shape[0] * page_size)
    block_keys = _block_keys(affordable, _MAX_CACHED_KEYS, page_size)
    rows = queries.reshape(size, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    rows = rows.reshape(num_kv_heads, group * size, head_dim)  # rows of the products
    positions = jnp.tile(position + jnp.arange(size), group)
    columns = jnp.arange(block_keys // page_size)
    flat = kv_pages.reshape(kv_pages.shape[0], -1)  # so that whole pages are copied
    firsts = _first_keys(positions, window)

    def body(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, total, acc = carry
        keys = block * block_keys + jnp.arange(block_keys)
        column = jnp.minimum(block * (block_keys // page_size) + columns, pages.shape[0] - 1)
        found = jnp.where(keys[::page_size] < kv_end, pages[column], 0)
        some = flat.at[found].get(mode="promise_in_bounds").reshape(-1, *kv_pages.shape[1:])
        kv = kind.numbers(some).reshape(block_keys, num_kv_heads, 2, head_dim)
        kv = kv.transpose(2, 1, 0, 3).astype(jnp.float32)
        valid = keys < kv_end
        if firsts is not None:
            valid &= keys >= firsts[0]
        values = jnp.where(valid[:, None], kv[1], 0)
        visible = (keys <= positions[:, None]) & (keys < kv_end)
        if firsts is not None:
            visible &= keys >= firsts[:, None]
        scores = _capped(_dot("kmd,ksd->kms", rows, kv[0]), softcap)
        scores = jnp.where(visible, scores, _MASKED)
        m_new = jnp.maximum(m, scores.max(axis=-1))
        weights = jnp.exp(scores - m_new[..., None])
        if firsts is not None:  # otherwise every query sees a key of the first block
            weights = jnp.where(visible, weights, 0)
        alpha = jnp.exp(m - m_new)
        acc = acc * alpha[..., None] + _dot("kms,ksd->kmd", weights, values)
        return m_new, total * alpha + weights.sum(axis=-1), acc

    # Zeros made from q carry its sharding type, which the loop body's results have too.
    zeros = jnp.zeros_like(rows)
    num_blocks = -(-kv_end // block_keys)
    first_block: Any = 0 if firsts is None else jnp.maximum(firsts[0], 0) // block_keys
    carry = (zeros[..., 0] + _MASKED, zeros[..., 0], zeros)
    m, total, acc = lax.fori_loop(first_block, num_blocks, body, carry)
    if sinks is not None:
        total = total + jnp.exp(jnp.repeat(sinks.reshape(num_kv_heads, group), size, axis=1) - m)
    if firsts is not None:
        total = jnp.where(total == 0, 1, total)  # the last tile's padding may see no key
    out = (acc / total[..., None]).reshape(num_kv_heads, group, size, head_dim)
    return out.transpose(2, 0, 1, 3).reshape(queries.shape)


def together(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    sinks: jax.Array | None = None,
    *,
    sm_scale: float,
    kind: PageKind,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute the form for accelerators: all tiles together, up to the end of the longest row."""
    num_tokens, num_q_heads, head_dim = q.shape
    page_size, num_combined_heads = kind.page_size, kv_pages.shape[2]
    num_kv_heads, group = num_combined_heads // 2, 2 * num_q_heads // num_combined_heads
    rows = kv_lens.shape[0]
    tile_tokens = _tile_tokens(num_tokens, rows)
    num_tiles = num_tokens if tile_tokens == 1 else num_tokens // tile_tokens + min(rows, num_tokens)
    tiles = _tiles(_q_lens(cu_q_lens, num_seqs), cu_q_lens, kv_lens, tile_tokens, num_tiles)
    bytes_per_key = max(
        num_combined_heads * head_dim * (4 if kind.kv_dtype else kv_pages.dtype.itemsize),
        4 * tile_tokens * num_q_heads,
    )
    block_keys = _block_keys(_BLOCK_BYTES // (num_tiles * bytes_per_key), _MAX_BLOCK_KEYS, page_size)

    lanes = jnp.arange(tile_tokens)
    tokens = tiles.token[:, None] + lanes  # i32[num_tiles, tile_tokens]
    real = lanes < tiles.length[:, None]
    q_tiles = jnp.where(real[..., None, None], q[jnp.where(real, tokens, 0)], 0)
    q_tiles = q_tiles.reshape(num_tiles, tile_tokens, num_kv_heads, group, head_dim)
    positions = tiles.position[:, None] + lanes
    kv_end = tiles.position + tiles.length  # keys that the tile's last query sees
    firsts = _first_keys(positions, window)
    # With a window, blocks are counted from the page in which that of the tile's first query begins.
    begin = None if firsts is None else jnp.maximum(firsts[:, :1], 0) // page_size * page_size

    def body(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, total, acc = carry
        keys = block * block_keys + jnp.arange(block_keys)
        if begin is not None:
            keys = begin + keys
        valid = keys < kv_end[:, None]  # bool[num_tiles, block_keys]
        kv = _gather(kv_pages, page_indices, tiles.row, keys, valid, kind=kind)
        if firsts is not None:
            valid &= keys >= firsts[:, :1]
        scores = _dot("tqkgd,tskd->tkgqs", q_tiles, kv[:, :, :, 0]) * sm_scale
        scores = _capped(scores, softcap)
        if firsts is not None:
            keys = keys[:, None]
        visible = (keys <= positions[..., None])[:, None, None] & valid[:, None, None, None]
        if firsts is not None:
            visible &= (keys >= firsts[..., None])[:, None, None]
        scores = jnp.where(visible, scores, _MASKED)
        m_new = jnp.maximum(m, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - m_new[..., None]), 0)
        alpha = jnp.exp(m - m_new)
        values = jnp.where(valid[:, :, None, None], kv[:, :, :, 1], 0)
        acc = acc * alpha[..., None] + _dot("tkgqs,tskd->tkgqd", weights.astype(values.dtype), values)
        return m_new, total * alpha + weights.sum(axis=-1), acc

    kv_width = kv_end if begin is None else kv_end - begin[:, 0]
    num_blocks = -(-jnp.max(kv_width, initial=0) // block_keys)
    # Zeros made from q carry its sharding type, which the loop body's results have too.
    zeros = jnp.zeros_like(q_tiles, jnp.float32).transpose(0, 2, 3, 1, 4)
    m, total, acc = lax.fori_loop(0, num_blocks, body, (zeros[..., 0] + _MASKED, zeros[..., 0], zeros))
    if sinks is not None:
        total = total + jnp.exp(sinks.reshape(num_kv_heads, group, 1) - m)
    return _scatter(q, acc / jnp.where(total == 0, 1, total)[..., None], jnp.where(real, tokens, num_tokens))


def _scatter(q: jax.Array, out_tiles: jax.Array, targets: jax.Array) -> jax.Array:
    """Return an array like q with the tiles' results at the tokens `targets`, and 0 elsewhere.

    `out_tiles` is f32[num_tiles, num_kv_heads, group, tile_tokens, head_dim].
    """
    out_tiles = out_tiles.transpose(0, 3, 1, 2, 4).astype(q.dtype)
    return jnp.zeros_like(q).at[targets].set(out_tiles.reshape(*targets.shape, *q.shape[1:]), mode="drop")


def _gather(
    kv_pages: jax.Array,
    page_indices: jax.Array,
    tile_row: jax.Array,
    keys: jax.Array,
    valid: jax.Array,
    *,
    kind: PageKind,
) -> jax.Array:
    """Return keys, values [num_tiles, block_keys, num_kv_heads, 2, head_dim]; arbitrary if not `valid`."""
    page_size, (num_combined_heads, head_dim) = kind.page_size, kv_pages.shape[2:]
    columns = jnp.minimum(keys[..., ::page_size] // page_size, page_indices.shape[1] - 1)
    pages = jnp.where(valid[:, ::page_size], page_indices[tile_row[:, None], columns], 0)
    return kind.numbers(kv_pages[pages]).reshape(*valid.shape, num_combined_heads // 2, 2, head_dim)


def _first_keys(positions: jax.Array, window: int | None) -> jax.Array | None:
    """Return the first key that each query sees, or None without a window; negative numbers mean key 0."""
    return None if window is None else positions - (window - 1)


def _capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Return scaled scores after the softcap, if there is one."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product, accumulated in float32 (16-bit products are exact at the default precision)."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _tile_tokens(num_tokens: int, max_num_seqs: int) -> int:
    """Return the tokens of a tile: about a mean row, so neither padding nor repeated keys dominate."""
    mean = max(num_tokens // max_num_seqs, 1)
    return min(1 << (mean.bit_length() - 1), _MAX_TILE_TOKENS)


def _block_keys(affordable: int, most: int, page_size: int) -> int:
    """Return the keys of a block: as many whole pages as memory allows, at least one."""
    return max(min(affordable, most) // page_size, 1) * page_size


def _q_lens(cu_q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
    """Return the number of queries of each row, i32[max_num_seqs]; 0 for padding."""
    return jnp.where(jnp.arange(cu_q_lens.shape[0] - 1) < num_seqs[0], cu_q_lens[1:] - cu_q_lens[:-1], 0)


def _tiles(
    q_lens: jax.Array, cu_q_lens: jax.Array, kv_lens: jax.Array, tile_tokens: int, num_tiles: int
) -> _Tiles:
    """Return the tiles of rows with `q_lens` queries, padded to `num_tiles`."""
    counts = -(-q_lens // tile_tokens)
    ends = jnp.cumsum(counts)
    ids = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, ids, side="right", method="compare_all"), q_lens.shape[0] - 1)
    offset = (ids - (ends - counts)[row]) * tile_tokens
    length = jnp.where(ids < ends[-1], jnp.minimum(q_lens[row] - offset, tile_tokens), 0)
    position = jnp.where(ids < ends[-1], kv_lens[row] - q_lens[row] + offset, 0)
    return _Tiles(ends[-1], row, cu_q_lens[row] + offset, length, position)
