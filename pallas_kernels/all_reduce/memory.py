"""The memory that devices of one process write to each other, and the tables that say where it is.

Owns: inboxes, flags and counters of every device, as arrays that nobody hands to a program: kernels know
their addresses. Inboxes are bytes, for numbers of any size. Does not know: kernels, or when they run.

A process sees the memory of all its devices at one address each, so an address is all that a peer needs. An
exchange that failed leaves counters that differ from device to device: `renew` makes new ones.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.all_reduce.specs import (
    EMPTY,
    FLAGS,
    handshakes_place,
    peer_buffer_rows,
    peer_buffers_len,
    table_len,
    table_row,
    words_len,
)

_NEVER_WAITED_FOR = 1 << 30  # a count that no launch reaches


class ExchangeMemory:
    """Of the devices of a mesh with one axis.

    Attributes:
      table: i32[devices, 2 * table_len], a row for each device, on it.
      words: i32[devices, words_len], of which the first of a row says that its device lost a peer, or was
        told so; what it was when a program that takes it runs.
      capacity: bytes that a device may leave in another's inbox; who launches must say so many.
    """

    table: jax.Array
    words: jax.Array

    def __init__(self, mesh: Mesh, width: int, dtype: Any, *, num_rows: int | None = None) -> None:
        """Make memory for devices that do not wait yet.

        Args:
          mesh: of one axis.
          width: of a row, a multiple of 8.
          dtype: of its numbers; whatever else has no more bytes may be sent as well.
          num_rows: that are sent at a time; None: as many as `peer_buffer_rows` says.
        """
        (axis,) = mesh.axis_names
        self._num_devices = mesh.devices.size
        self._split = NamedSharding(mesh, PartitionSpec(axis))
        num_rows = peer_buffer_rows(self._num_devices) if num_rows is None else num_rows
        self.capacity = num_rows * width * np.dtype(dtype).itemsize
        shape = self._num_devices, peer_buffers_len(self._num_devices, self.capacity)
        # Filled by each device, since they are large, and once compiled for every time.
        self._new_peer_buffers = jax.jit(lambda: jnp.full(shape, EMPTY, jnp.int8), out_shardings=self._split)
        self.renew(alone=True)

    def renew(self, *, alone: bool = False) -> None:
        """New memory, as if nothing had been exchanged; all that was launched before must have ended.

        Args:
          alone: every device takes itself for all its peers, and so waits for none. To load kernels that way
            first is what lets no device wait for a peer that cannot load, because the first one waits.
        """
        # Freed first: two may not fit, and a table would mislead.
        for name in ("table", "words", "_peer_buffers"):
            vars(self).pop(name, None)
        num = self._num_devices
        self._peer_buffers = self._new_peer_buffers()
        words = np.zeros((num, words_len(num)), np.int32)
        if alone:
            words[:, FLAGS : handshakes_place(num)] = _NEVER_WAITED_FOR
        self.words = jax.device_put(words, self._split)
        jax.block_until_ready((self._peer_buffers, self.words))
        everybody = _addresses(self._peer_buffers), _addresses(self.words)
        rows = [
            table_row(rank, *([[each[rank]] * num for each in everybody] if alone else everybody))
            for rank in range(num)
        ]
        table = np.array(rows, np.int64).view(np.int32)
        assert table.shape == (num, 2 * table_len(num))
        self.table = jax.block_until_ready(jax.device_put(table, self._split))

    @property
    def num_bytes(self) -> int:
        """Bytes that inboxes and words take on each device."""
        num = self._num_devices
        return peer_buffers_len(num, self.capacity) + 4 * words_len(num)


def _addresses(array: jax.Array) -> list[int]:
    """Of every device's part, in the order of the mesh."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [shard.data.unsafe_buffer_pointer() for shard in shards]
