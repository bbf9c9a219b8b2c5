"""Ragged paged attention in plain XLA: any device, any head size, any dtype; the CPU's default.

Owns: an online softmax over blocks of pages that all query tiles walk together, so that memory is bounded by
tiles times one block, never by rows times context. Does not know: tile lists, devices. Called by: `api`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Keys gathered at once, over all tiles: bounds the temporary memory (float32, K and V).
_BLOCK_BYTES = 64 << 20
_MAX_BLOCK_KEYS = 256
_MAX_TILE_TOKENS = 32
_MASKED = -1e30  # finite: a row that has seen no key yet must not turn into NaN


def xla_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float,
) -> jax.Array:
    """See `api.ragged_paged_attention`; arguments are already checked."""
    num_tokens, num_q_heads, head_dim = q.shape
    _, page_size, num_combined_heads, _ = kv_pages.shape
    num_kv_heads, group = num_combined_heads // 2, 2 * num_q_heads // num_combined_heads
    tile_tokens = _tile_tokens(num_tokens, kv_lens.shape[0])
    tile_row, tile_token, tile_len, tile_position = _tiles(
        cu_q_lens, kv_lens, num_seqs, num_tokens, tile_tokens
    )
    num_tiles = tile_row.shape[0]
    block_keys = _block_keys(num_tiles, page_size, num_combined_heads * head_dim)

    lanes = jnp.arange(tile_tokens)
    tokens = tile_token[:, None] + lanes  # i32[num_tiles, tile_tokens]
    real = lanes < tile_len[:, None]
    q_tiles = (
        jnp.where(real[..., None, None], q[jnp.where(real, tokens, 0)], 0).astype(jnp.float32) * sm_scale
    )
    q_tiles = q_tiles.reshape(num_tiles, tile_tokens, num_kv_heads, group, head_dim)
    positions = tile_position[:, None] + lanes
    kv_end = tile_position + tile_len  # keys that the tile's last query sees

    def body(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, total, acc = carry
        keys = block * block_keys + jnp.arange(block_keys)
        valid = keys < kv_end[:, None]  # bool[num_tiles, block_keys]
        kv = _gather(kv_pages, page_indices, tile_row, keys, valid)
        scores = _dot("tqkgd,tskd->tkgqs", q_tiles, kv[:, :, :, 0])
        visible = (keys <= positions[..., None])[:, None, None] & valid[:, None, None, None]
        scores = jnp.where(visible, scores, _MASKED)
        m_new = jnp.maximum(m, scores.max(axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - m_new[..., None]), 0)
        alpha = jnp.exp(m - m_new)
        acc = acc * alpha[..., None] + _dot("tkgqs,tskd->tkgqd", weights, kv[:, :, :, 1])
        return m_new, total * alpha + weights.sum(axis=-1), acc

    num_blocks = -(-jnp.max(kv_end, initial=0) // block_keys)
    # Zeros made from q carry its sharding type, which the loop body's results have too.
    zeros = jnp.zeros_like(q_tiles).transpose(0, 2, 3, 1, 4)
    _, total, acc = jax.lax.fori_loop(0, num_blocks, body, (zeros[..., 0] + _MASKED, zeros[..., 0], zeros))
    return _scatter(q, acc / jnp.where(total == 0, 1, total)[..., None], jnp.where(real, tokens, num_tokens))


def _scatter(q: jax.Array, out_tiles: jax.Array, targets: jax.Array) -> jax.Array:
    """Like q: f32[num_tiles, num_kv_heads, group, tile_tokens, head_dim] at the tokens `targets`, else 0."""
    out_tiles = out_tiles.transpose(0, 3, 1, 2, 4).astype(q.dtype)
    return jnp.zeros_like(q).at[targets].set(out_tiles.reshape(*targets.shape, *q.shape[1:]), mode="drop")


def _gather(
    kv_pages: jax.Array, page_indices: jax.Array, tile_row: jax.Array, keys: jax.Array, valid: jax.Array
) -> jax.Array:
    """f32[num_tiles, block_keys, num_kv_heads, 2, head_dim] of every tile's keys; zero where not `valid`."""
    _, page_size, num_combined_heads, head_dim = kv_pages.shape
    columns = jnp.minimum(keys[::page_size] // page_size, page_indices.shape[1] - 1)
    pages = jnp.where(valid[:, ::page_size], page_indices[tile_row[:, None], columns], 0)
    kv = kv_pages[pages].reshape(*valid.shape, num_combined_heads // 2, 2, head_dim).astype(jnp.float32)
    # Slots past a row's keys may hold anything, NaN too, and 0 * NaN is NaN.
    return jnp.where(valid[:, :, None, None, None], kv, 0)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)


def _tile_tokens(num_tokens: int, max_num_seqs: int) -> int:
    """Query tokens of a tile: about the mean row, so that neither padding nor repeated keys dominate."""
    mean = max(num_tokens // max_num_seqs, 1)
    return min(1 << (mean.bit_length() - 1), _MAX_TILE_TOKENS)


def _block_keys(num_tiles: int, page_size: int, elements_per_key: int) -> int:
    """Keys of a block: whole pages, as many as the memory bound allows, at least one."""
    affordable = _BLOCK_BYTES // (4 * num_tiles * elements_per_key)
    return max(min(affordable, _MAX_BLOCK_KEYS) // page_size, 1) * page_size


def _tiles(
    cu_q_lens: jax.Array, kv_lens: jax.Array, num_seqs: jax.Array, num_tokens: int, tile_tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Row, first token, number of tokens and first position of every tile; padding tiles have no tokens."""
    max_num_seqs = kv_lens.shape[0]
    num_tiles = num_tokens if tile_tokens == 1 else num_tokens // tile_tokens + min(max_num_seqs, num_tokens)
    q_lens = jnp.where(jnp.arange(max_num_seqs) < num_seqs[0], cu_q_lens[1:] - cu_q_lens[:-1], 0)
    ends = jnp.cumsum(-(-q_lens // tile_tokens))
    ids = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, ids, side="right"), max_num_seqs - 1)
    counts = -(-q_lens // tile_tokens)
    offset = (ids - (ends - counts)[row]) * tile_tokens
    tile_len = jnp.where(ids < ends[-1], jnp.minimum(q_lens[row] - offset, tile_tokens), 0)
    position = jnp.where(ids < ends[-1], kv_lens[row] - q_lens[row] + offset, 0)
    return row, cu_q_lens[row] + offset, tile_len, position
