"""Arrays of the ring and of parked rows.

Owns: their shapes, dtypes and placement.
Does not know: which query holds a row, or programs.

Each layer has one array for keys and one for values, with heads before length, so that a step appends a
column in place and reads whole rows. A parked row is one array over all layers, since many small copies are
slower than one large one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.config import ModelConfig
from model_defs.sharding import TENSOR_AXIS
from pensieve_jax.rebatching.ring_shapes import RingShape

RING_SPEC = PartitionSpec(None, TENSOR_AXIS, None, None)
ROW_SPEC = PartitionSpec(None, None, TENSOR_AXIS, None, None)


class RingState(NamedTuple):
    """Arrays of the ring, as a pytree.

    Attributes:
      keys, values: one per layer, [batch, num_kv_heads, length, head_dim], split by head over "tp".
      valid: bool[batch, length]: columns that hold a token of their row. None without vector shaping, since
        only shaping leaves holes in rows.
    """

    keys: list[jax.Array]
    values: list[jax.Array]
    valid: jax.Array | None


class RingStorage:
    """Shape and placement of a model's rings and rows."""

    def __init__(self, model: ModelConfig, dtype: jnp.dtype, mesh: Mesh, *, has_holes: bool) -> None:
        """Describe the arrays without allocating them."""
        self.model, self.dtype, self.mesh, self._has_holes = model, dtype, mesh, has_holes
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self._ring_sharding = NamedSharding(mesh, RING_SPEC)
        self.row_sharding = NamedSharding(mesh, ROW_SPEC)
        self.host_sharding = self.row_sharding.with_memory_kind("pinned_host")

    @property
    def token_bytes(self) -> int:
        """Bytes of one column of one row on one device, over all layers."""
        heads = self.model.num_kv_heads // self.mesh.devices.size
        return 2 * self.model.num_layers * heads * self.model.head_dim * self.dtype.itemsize

    def layer(self, shape: RingShape) -> jax.ShapeDtypeStruct:
        """Return the abstract keys, or values, of one layer."""
        sizes = (shape.batch, self.model.num_kv_heads, shape.length, self.model.head_dim)
        return jax.ShapeDtypeStruct(sizes, self.dtype, sharding=self._ring_sharding)

    def ring(self, shape: RingShape) -> RingState:
        """Return the abstract arrays of a ring."""
        layers = [self.layer(shape)] * self.model.num_layers
        valid = jax.ShapeDtypeStruct(shape, np.bool_, sharding=self.replicated) if self._has_holes else None
        return RingState(list(layers), list(layers), valid)  # type: ignore[arg-type]

    def row(self, length: int) -> jax.ShapeDtypeStruct:
        """Return an abstract parked row: keys, then values, of every layer."""
        sizes = (self.model.num_layers, 2, self.model.num_kv_heads, length, self.model.head_dim)
        return jax.ShapeDtypeStruct(sizes, self.dtype, sharding=self.row_sharding)

    def whole(self, *sizes: int, dtype: type[np.generic] = np.int32) -> jax.ShapeDtypeStruct:
        """Return an abstract array that is replicated on every device."""
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=self.replicated)
