"""Attention of a padded batch over the ring.

Owns: `RingAttention`, which writes new columns, masks the columns of each row, and computes attention.
Does not know: which query holds a row, positions, or programs.

Softmax does not depend on the order of columns, and keys are stored rotated, so attention reads the ring
without reordering it. A step of one token per row without holes calls `pallas_kernels.ring_decode`, which can
read only each row's own columns. Every other step is plain XLA over the whole ring. It masks scores with a
finite number, and free columns hold finite numbers: placeholders of -inf, as in section 4.2 of Baton, would
turn values into NaN.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from model_defs.attention import FULL, AttentionOptions, refuse_options
from model_defs.sharding import TENSOR_AXIS, AnyMesh
from pallas_kernels.ring_decode import masked_attention, ring_decode_attention
from pensieve_jax.rebatching.device.ring_state import RING_SPEC, RingState

_HEADS_SPEC = PartitionSpec(None, TENSOR_AXIS, None)
_BLOCK = 128  # queries of a row whose scores are in memory at once


class RingAttention:
    """Implements `model_defs.Attention` for B rows of Q queries each, row by row.

    Attributes:
      state: the ring, with the new columns after the model has run. `valid` must mark them beforehand.
    """

    def __init__(
        self,
        state: RingState,
        place: jax.Array,
        num_new: jax.Array,
        num_columns: jax.Array,
        *,
        mesh: AnyMesh | None = None,
        backend: str = "xla",
    ) -> None:
        """Store what all layers share.

        Args:
          state: the ring. The call takes ownership of it.
          place: i32[], place of the first new column.
          num_new: i32[], new columns, at most Q.
          num_columns: i32[B], columns of each row, from its first to the last new one.
          mesh: devices that the heads are split over. A kernel needs it, plain XLA does not.
          backend: resolved back end of `ring_decode_attention`, for steps of one token per row without holes.
        """
        self.state, self._mesh, self._backend = state, mesh, backend
        self._place, self._num_new, self._num_columns = place, num_new, num_columns

    def __call__(
        self,
        layer_index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        options: AttentionOptions = FULL,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Write the new columns and compute attention, as in `Attention` with T = B * Q.

        Raises:
          UnsupportedModelError: attention is not plain.
        """
        refuse_options(options, sinks is not None, "padded batches")
        batch, num_kv_heads, length, head_dim = self.state.keys[layer_index].shape
        num_queries = q.shape[0] // batch
        new = (batch, num_queries, num_kv_heads, head_dim)
        keys = self._write(self.state.keys[layer_index], k.reshape(new))
        values = self._write(self.state.values[layer_index], v.reshape(new))
        self.state.keys[layer_index], self.state.values[layer_index] = keys, values
        if num_queries == 1 and self.state.valid is None:
            return self._decode(q, keys, values)
        rows = q.reshape(batch, num_queries, num_kv_heads, -1, head_dim)
        # Distance of each place from the last new column, in columns.
        age = (self._place + self._num_new - 1 - jnp.arange(length)) % length
        if num_queries == 1:
            out = self._attend(rows, keys, values, age, jnp.zeros(1, jnp.int32))
        else:
            out = self._attend_in_blocks(rows, keys, values, age)
        return out.reshape(q.shape).astype(q.dtype)

    def _decode(self, q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        """Compute attention of one query per row over its row's columns up to the new one."""
        attend = functools.partial(ring_decode_attention, sm_scale=q.shape[-1] ** -0.5, backend=self._backend)
        if self._backend != "xla":  # the partitioner cannot split a kernel
            assert self._mesh is not None
            attend = jax.shard_map(
                attend,
                mesh=self._mesh,
                in_specs=(_HEADS_SPEC, RING_SPEC, RING_SPEC, PartitionSpec(), PartitionSpec()),
                out_specs=_HEADS_SPEC,
                check_vma=False,  # kernels do not declare the axes over which their outputs vary
            )
        return attend(q, keys, values, self._place, self._num_columns)

    def _write(self, pool: jax.Array, new: jax.Array) -> jax.Array:
        """Write new columns [B, Q, K, D] into a pool [B, K, L, D]."""
        length, num_queries = pool.shape[2], new.shape[1]
        columns = new.astype(pool.dtype).swapaxes(1, 2)
        if num_queries == 1:
            return lax.dynamic_update_slice_in_dim(pool, columns, self._place, axis=2)
        index = jnp.arange(num_queries)
        # Padding follows the prompt. It must not be written, since other rows may have live columns there.
        places = jnp.where(index < self._num_new, (self._place + index) % length, length)
        return pool.at[:, :, places].set(columns, mode="drop", unique_indices=True)

    def _attend_in_blocks(
        self, rows: jax.Array, keys: jax.Array, values: jax.Array, age: jax.Array
    ) -> jax.Array:
        """Compute attention of queries [B, Q, K, G, D], `_BLOCK` queries at a time; same shape."""
        num_queries = rows.shape[1]
        size = min(_BLOCK, num_queries)
        num_padded = -(-num_queries // size) * size
        padded = jnp.pad(rows, ((0, 0), (0, num_padded - num_queries), (0, 0), (0, 0), (0, 0)))

        def block(number: jax.Array) -> jax.Array:
            some = lax.dynamic_slice_in_dim(padded, number * size, size, axis=1)
            return self._attend(some, keys, values, age, number * size + jnp.arange(size))

        blocks = lax.map(block, jnp.arange(num_padded // size))  # [N, B, size, K, G, D]
        out = blocks.swapaxes(0, 1).reshape(padded.shape)
        return out[:, :num_queries]

    def _attend(
        self, rows: jax.Array, keys: jax.Array, values: jax.Array, age: jax.Array, index: jax.Array
    ) -> jax.Array:
        """Return f32[B, Q, K, G, D] for queries of this shape; query i is new token `index[i]` of its row."""
        behind = jnp.maximum(self._num_new - 1 - index, 0)  # new columns after each query; padding sees all
        visible = (age >= behind[:, None]) & (age < self._num_columns[:, None, None])
        if self.state.valid is not None:
            visible &= self.state.valid[:, None]
        return masked_attention(rows, keys, values, visible, sm_scale=rows.shape[-1] ** -0.5)
