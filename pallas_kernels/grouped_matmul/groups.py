"""Rows of a mixture of experts, grouped by expert, and the sum of each token's results.

Owns: the order of rows, the list of blocks that kernels walk, and the order of the final sum.
Does not know: weights, products or back ends. Called by: `api`.

Each (token, expert) pair is a row. The rows of an expert are consecutive and in the order of tokens. They
begin at a multiple of 8, since a copy into tiled shared memory must. Rows between two experts repeat token 0,
and nothing reads their results. An expert without tokens has no rows and no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PIECE_ROWS = 8
"""Rows of a piece of shared memory. Every expert's rows begin at a multiple of this."""

NUM_FIELDS = 4
"""Words of a block in the list. They describe all rows of the block's expert: the expert, its first
block, its first row, and its number of rows."""

EXPERT, FIRST_BLOCK, FIRST_ROW, NUM_ROWS = range(NUM_FIELDS)
HEADER_LEN = 1
"""Words before the first block: the number of blocks."""

_SUMMED = 128  # tokens that one matrix product counts


@dataclass(frozen=True)
class GroupSpec:
    """Static sizes.

    Attributes:
      num_tokens: tokens of the batch, with padding.
      num_chosen: experts of each token, all different.
      num_experts: experts in total.
      block_rows: most rows of a block, a multiple of 8.
    """

    num_tokens: int
    num_chosen: int
    num_experts: int
    block_rows: int

    @property
    def _max_groups(self) -> int:
        """Most experts with rows."""
        return min(self.num_experts, self.num_tokens * self.num_chosen)

    @property
    def max_blocks(self) -> int:
        """Most blocks, since each expert with rows has at most one block that is not full."""
        return self._largest(self.block_rows)

    @property
    def num_rows(self) -> int:
        """Rows of all arrays. A block's copy may read past the last expert's rows."""
        return PIECE_ROWS * self._largest(PIECE_ROWS) + self.block_rows - PIECE_ROWS

    @property
    def list_len(self) -> int:
        """Words of the list of blocks."""
        return HEADER_LEN + NUM_FIELDS * self.max_blocks

    def _largest(self, size: int) -> int:
        pairs = self.num_tokens * self.num_chosen
        return (pairs + self._max_groups * (size - 1)) // size


class GroupedRows(NamedTuple):
    """Order of the rows.

    Attributes:
      places: the row of each of a token's experts, in the order of its choices; `num_rows` for a token that
        counts for nothing.
      tokens: the token of each row.
      blocks: the list: the number of blocks, then `NUM_FIELDS` words of each.
    """

    places: Annotated[jax.Array, "i32[num_tokens, num_chosen]"]
    tokens: Annotated[jax.Array, "i32[num_rows]"]
    blocks: Annotated[jax.Array, "i32[list_len]"]


def group_rows(
    spec: GroupSpec,
    experts: Annotated[jax.Array, "i32[num_tokens, num_chosen]"],
    num_counted: Annotated[jax.Array, "i32[]"] | None = None,
) -> GroupedRows:
    """Group the rows of all tokens, or only of the first `num_counted`; later ones are padding.

    No sort is needed. A row's place is its expert's first row plus the number of earlier tokens that chose
    the expert. A matrix product counts these exactly.
    """
    ids = jnp.arange(spec.num_experts, dtype=jnp.int32)
    tokens = jnp.arange(spec.num_tokens, dtype=jnp.int32)
    is_chosen = (experts[:, :, None] == ids).any(axis=1)
    counts_token = None if num_counted is None else tokens < num_counted
    if counts_token is not None:
        is_chosen &= counts_token[:, None]
    before = _exclusive_sums(is_chosen)
    counts = is_chosen.sum(axis=0, dtype=jnp.int32)
    is_earlier = ids[None, :] < ids[:, None]

    def sums_before(sizes: jax.Array) -> jax.Array:
        return jnp.where(is_earlier, sizes, 0).sum(axis=1, dtype=jnp.int32)

    pieces = PIECE_ROWS * -(-counts // PIECE_ROWS)
    first_rows, num_blocks = sums_before(pieces), -(-counts // spec.block_rows)
    first_blocks = sums_before(num_blocks)
    places = jnp.take_along_axis(first_rows + before, experts, axis=1)
    if counts_token is not None:
        places = jnp.where(counts_token[:, None], places, spec.num_rows)
    of_row = jnp.zeros(spec.num_rows, jnp.int32)
    of_row = of_row.at[places].set(jnp.broadcast_to(tokens[:, None], places.shape), mode="drop")

    blocks = jnp.arange(spec.max_blocks, dtype=jnp.int32)
    ends = first_blocks + num_blocks
    # Past the last block this is one too many.
    of_block = jnp.minimum((ends <= blocks[:, None]).sum(axis=1, dtype=jnp.int32), spec.num_experts - 1)
    fields = jnp.stack([of_block, first_blocks[of_block], first_rows[of_block], counts[of_block]], axis=1)
    return GroupedRows(places, of_row, jnp.concatenate([ends[-1:], fields.reshape(-1)]))


def sum_choices(
    spec: GroupSpec,
    results: Annotated[jax.Array, "f[num_rows, width]"],
    places: Annotated[jax.Array, "i32[num_tokens, num_chosen]"],
    weights: Annotated[jax.Array, "f32[num_tokens, num_chosen]"],
) -> Annotated[jax.Array, "f[num_tokens, width]"]:
    """Add up each token's weighted results in float32, in the order of its choices, and round once.

    The order depends on the token alone, so neither its neighbours nor the experts' numbers change a bit. A
    token that counts for nothing gets zeros.
    """
    total = jnp.zeros((spec.num_tokens, results.shape[1]), jnp.float32)
    for choice in range(spec.num_chosen):
        rows = jnp.take(results, places[:, choice], axis=0, mode="clip").astype(jnp.float32)
        total += rows * weights[:, choice, None]
    is_counted = places[:, :1] < spec.num_rows
    return jnp.where(is_counted, total, 0).astype(results.dtype)


def _exclusive_sums(is_chosen: jax.Array) -> jax.Array:
    """Return i32[num_tokens, num_experts]: how many earlier tokens chose each expert.

    Products with triangles of ones count in float32, exactly: 128 tokens at a time, then their totals.
    """
    num_tokens, num_experts = is_chosen.shape
    num_parts = -(-num_tokens // _SUMMED)
    size = min(num_tokens, _SUMMED)
    chosen = jnp.pad(is_chosen.astype(jnp.float32), ((0, num_parts * size - num_tokens), (0, 0)))
    parts = chosen.reshape(num_parts, size, num_experts)
    within = jnp.einsum("ij,pje->pie", _triangle(size), parts, precision=lax.Precision.HIGHEST)
    if num_parts > 1:
        totals = parts.sum(axis=1)
        within += jnp.matmul(_triangle(num_parts), totals, precision=lax.Precision.HIGHEST)[:, None]
    return within.reshape(-1, num_experts)[:num_tokens].astype(jnp.int32)


def _triangle(size: int) -> jax.Array:
    """Return f32[size, size], one below the diagonal."""
    return jnp.tri(size, k=-1, dtype=jnp.float32)
