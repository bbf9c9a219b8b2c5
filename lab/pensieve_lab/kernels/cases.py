"""Inputs of one attention case on the device, and the expected answer.

Owns: pages, queries and lengths, and the decode and the prompt part of a batch over the same pool. Also owns
which rows one call over contiguous keys can serve, the expected answer, and the error of another one.
Does not know: which kernels there are, or how they are timed.
Called by the kernel benchmarks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention import page_dtype, page_shape, ragged_paged_attention, write_kv
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.shapes import Case, draw_metadata
from pensieve_lab.steps.bounds import Operation

TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}
# Pages of distinct values; a prime, so that no power-of-two stride meets the same page twice.
_NUM_DISTINCT_PAGES = 1021
# Tokens of the row that numpy computes. A prompt's last tokens see all of its keys, and computing the whole
# prompt takes a minute.
_MAX_DENSE_TOKENS = 128


class MismatchError(Exception):
    """A kernel's answer differs from the references."""


class Inputs(NamedTuple):
    """One batch: queries and pages on the device, its rows on the host as the kernels take them."""

    case: Case
    q: jax.Array  # [num_tokens, num_q_heads, head_dim]
    pool: jax.Array  # [num_pages, page_size, 2 * num_kv_heads, head_dim], or as `page_formats` has it
    kv_lens: np.ndarray  # i32[num_rows]
    page_indices: np.ndarray  # i32[num_rows, pages_per_row]
    cu_q_lens: np.ndarray  # i32[num_rows + 1]
    kv_dtype: str | None = None  # storage format of pages; None: q's dtype

    @property
    def sm_scale(self) -> float:
        """Scale of the attention scores."""
        return 1 / math.sqrt(self.case.heads.head_dim)

    @property
    def rows(self) -> tuple[np.ndarray, ...]:
        """kv_lens, page_indices, cu_q_lens and num_seqs, as `ragged_paged_attention` takes them."""
        num_seqs = np.array([len(self.kv_lens)], np.int32)
        return self.kv_lens, self.page_indices, self.cu_q_lens, num_seqs

    @property
    def readable_pages(self) -> np.ndarray:
        """page_indices with valid pages in unused entries, which external kernels may read."""
        counts = -(-self.kv_lens // self.case.page_size)
        used = np.arange(self.page_indices.shape[1]) < counts[:, None]
        return np.where(used, self.page_indices, self.page_indices[:, :1])

    @property
    def work(self) -> Operation:
        """Bytes and FLOP that any kernel must at least move and compute."""
        num_kept = self.case.kv_bytes // 2  # numbers; `kv_bytes` counts 16 bits each
        kept_bytes = num_kept * self.pool.dtype.itemsize
        if self.kv_dtype is not None:
            kept_bytes += num_kept // self.case.heads.head_dim * 2  # scales
        return Operation(
            self.case.name, kept_bytes + 2 * self.q.size * self.q.dtype.itemsize, self.case.flops
        )


class Group(NamedTuple):
    """Rows with the same number of queries, which one call over contiguous keys serves."""

    rows: np.ndarray  # i64[num_rows]
    tokens: np.ndarray  # i64[num_rows, q_len]
    kv_lens: np.ndarray  # i32[num_rows]

    @property
    def q_len(self) -> int:
        """Number of queries in every row."""
        return self.tokens.shape[1]

    @property
    def kv_len(self) -> int:
        """Number of keys in the longest row."""
        return int(self.kv_lens.max())


class Expected(NamedTuple):
    """Answer of the `xla` back end to everything, and of numpy to some tokens."""

    whole: jax.Array
    tokens: slice
    dense: np.ndarray

    def difference(self, out: jax.Array) -> float:
        """Return the larger of the two largest differences; NaN if any value is not finite."""
        pairs = ((out, self.whole), (out[self.tokens], self.dense))
        return float(np.max([largest_difference(a, b) for a, b in pairs]))


def make_inputs(case: Case, dtype: str, seed: int, kv_dtype: str | None = None) -> Inputs:
    """Return random pages of a pool whose page 0 is the only unused one and holds NaN."""
    kv_lens, page_indices, cu_q_lens, _, num_pages = draw_metadata(case, np.random.default_rng(seed))
    heads = case.heads

    @jax.jit
    def values(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        key_q, key_kv = jax.random.split(key)
        q = jax.random.normal(key_q, (case.num_tokens, heads.num_q_heads, heads.head_dim), dtype)
        num_distinct = min(_NUM_DISTINCT_PAGES, num_pages)
        new = (2, num_distinct * case.page_size, heads.num_kv_heads, heads.head_dim)
        keys, values = jax.random.normal(key_kv, new, dtype)
        page = page_shape(kv_dtype, case.page_size, heads.num_kv_heads, heads.head_dim)
        empty = jnp.zeros((num_distinct, *page), page_dtype(kv_dtype, dtype))
        slots = jnp.arange(new[1])
        distinct = write_kv(empty, keys, values, slots, page_size=case.page_size, kv_dtype=kv_dtype)
        nothing = jnp.nan if kv_dtype is None else -1  # as scales, -1 is NaN too
        pool = distinct[jnp.arange(num_pages) % num_distinct].at[0].set(nothing)
        return q, pool

    q, pool = values(jax.random.key(seed))
    return Inputs(case, q, pool, kv_lens, page_indices, cu_q_lens, kv_dtype)


def parts(inputs: Inputs) -> dict[str, Inputs]:
    """Return the decode rows and the other rows over the same pages; empty for a batch of one kind."""
    is_decode = np.diff(inputs.cu_q_lens) == 1
    if is_decode.all() or not is_decode.any():
        return {}
    return {
        name: _only(inputs, name, np.flatnonzero(keep))
        for name, keep in (("decodes", is_decode), ("prompts", ~is_decode))
    }


def _only(inputs: Inputs, name: str, rows: np.ndarray) -> Inputs:
    case = inputs.case
    chosen = tuple(case.rows[row] for row in rows)
    part = replace(case, name=f"{case.name}:{name}", rows=chosen)
    tokens = np.concatenate([_tokens(inputs, row) for row in rows])
    kv_lens, page_indices = inputs.kv_lens[rows], inputs.page_indices[rows]
    cu_q_lens = np.cumsum([0] + [q_len for q_len, _ in part.rows]).astype(np.int32)
    return inputs._replace(
        case=part, q=inputs.q[tokens], kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens
    )


def groups(inputs: Inputs, *, ragged_decodes: bool) -> list[Group]:
    """Group rows by query length and context; if `ragged_decodes`, all rows of one token form one group."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for row, (q_len, kv_len) in enumerate(inputs.case.rows):
        shape = (1, 0) if ragged_decodes and q_len == 1 else (q_len, kv_len)
        by_shape.setdefault(shape, []).append(row)
    return [
        Group(np.array(rows), np.stack([_tokens(inputs, row) for row in rows]), inputs.kv_lens[rows])
        for rows in by_shape.values()
    ]


def _tokens(inputs: Inputs, row: int) -> np.ndarray:
    return np.arange(inputs.cu_q_lens[row], inputs.cu_q_lens[row + 1])


def expected_answer(inputs: Inputs) -> Expected:
    """Return the answer on which two independent references agree; raises MismatchError."""

    @jax.jit
    def attend(q: jax.Array, pool: jax.Array, *rows: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            q, pool, *rows, sm_scale=inputs.sm_scale, backend="xla", kv_dtype=inputs.kv_dtype,
            window=inputs.case.window,
        )  # fmt: skip

    whole = attend(inputs.q, inputs.pool, *inputs.rows)
    tokens, dense = dense_answer(inputs, int(inputs.kv_lens.argmax()))
    expected = Expected(whole, tokens, dense)
    difference = expected.difference(whole)
    if not difference < TOLERANCE[whole.dtype.name]:
        raise MismatchError(f"{inputs.case.name}: xla and the dense reference differ by {difference:.1e}")
    return expected


def dense_answer(inputs: Inputs, row: int, max_tokens: int = _MAX_DENSE_TOKENS) -> tuple[slice, np.ndarray]:
    """Return the last tokens of a row, at most `max_tokens`, and the dense reference's answer to them."""
    end = int(inputs.cu_q_lens[row + 1])
    tokens = slice(max(int(inputs.cu_q_lens[row]), end - max_tokens), end)
    num_pages = -(-int(inputs.kv_lens[row]) // inputs.case.page_size)
    dense = reference_attention(
        np.asarray(inputs.q[tokens]),
        np.asarray(inputs.pool[jnp.asarray(inputs.page_indices[row, :num_pages])]),
        inputs.kv_lens[row : row + 1],
        np.arange(num_pages, dtype=np.int32)[None],
        np.array([0, tokens.stop - tokens.start], np.int32),
        np.array([1], np.int32),
        sm_scale=inputs.sm_scale,
        page_size=inputs.case.page_size,
        kv_dtype=inputs.kv_dtype,
        window=inputs.case.window,
    )
    return tokens, dense


@jax.jit
def largest_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the largest difference, relative for values above 1; NaN if any is not finite."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    difference = jnp.abs(a - b) / jnp.maximum(1, jnp.abs(b))
    # A plain maximum may skip a NaN, because XLA uses fast-math maxima on CPUs.
    return jnp.where(jnp.isfinite(difference).all(), difference.max(), jnp.nan)
