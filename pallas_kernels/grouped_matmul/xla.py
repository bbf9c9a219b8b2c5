"""Experts in plain XLA: the reference of the kernel's tests, and the path of every other device and dtype.

Owns: the loop over blocks. Does not know: which back end is faster. Called by: `api`.

A block of 8 rows of one expert is one product of fixed shape. So a row's bits depend neither on its
neighbours nor on the number of tokens, which does not hold for `lax.ragged_dot` on a CPU. The loop runs over
the blocks that exist, and reads each expert's weights for its own blocks alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.groups import FIRST_BLOCK, FIRST_ROW, HEADER_LEN, NUM_FIELDS, GroupSpec


def xla_expert_mlp(
    spec: GroupSpec, rows: jax.Array, blocks: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Return the MLP f[num_rows, hidden_size] of every row, computed in float32 and rounded after each
    product.

    Args:
      spec: sizes.
      rows: f[num_rows, hidden_size], grouped by expert.
      blocks: i32[list_len], the list.
      gate_up: f[num_experts, 2, width, hidden_size], the gate first.
      down: f[num_experts, hidden_size, width].
    """
    fields = blocks[HEADER_LEN:].reshape(-1, NUM_FIELDS)
    hidden_size = rows.shape[1]

    def compute_block(number: jax.Array, results: jax.Array) -> jax.Array:
        block = fields[number]
        first = block[FIRST_ROW] + (number - block[FIRST_BLOCK]) * spec.block_rows
        x = lax.dynamic_slice(rows, (first, 0), (spec.block_rows, hidden_size))
        both = _product(x, gate_up[block[0]].reshape(-1, hidden_size))
        gate, up = jnp.split(both, 2, axis=1)
        y = _product((jax.nn.silu(gate) * up).astype(x.dtype), down[block[0]])
        # Rows after the expert's last are overwritten by the next block, which comes later.
        return lax.dynamic_update_slice(results, y.astype(x.dtype), (first, 0))

    return lax.fori_loop(0, blocks[0], compute_block, jnp.zeros_like(rows))


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return x @ w.T in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = ((1,), (1,)), ((), ())
    return lax.dot_general(x, w, contract, precision=precision, preferred_element_type=jnp.float32)
