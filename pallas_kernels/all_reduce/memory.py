"""Memory through which the devices of one process exchange data, and the tables of its addresses.

Owns: the peer buffers, flags and counters of every device. They are arrays, but no program takes them as
arguments: kernels use their addresses. Peer buffers are bytes, for numbers of any size.
Does not know: kernels, or when they run.

All devices of a process share one address space, so a peer needs only an address. A failed exchange leaves
counters that differ between devices: `renew` creates new ones.
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
    handshakes_index,
    peer_buffer_rows,
    peer_buffers_len,
    table_len,
    table_row,
    words_len,
)

_NEVER_WAITED_FOR = 1 << 30  # a count that no launch reaches


class ExchangeMemory:
    """Exchange memory of the devices of a mesh with one axis.

    Attributes:
      table: i32[devices, 2 * table_len], one row on each device.
      words: i32[devices, words_len]. The first word of a row is nonzero if its device lost a peer or was
        notified of a loss. A program that takes this array reads the value at the time it runs.
      capacity: bytes that a device may write to a peer's buffer; every launch must pass this value.
    """

    table: jax.Array
    words: jax.Array

    def __init__(self, mesh: Mesh, width: int, dtype: Any, *, num_rows: int | None = None) -> None:
        """Allocate memory in which devices do not wait yet: see `renew` with `alone`.

        Args:
          mesh: mesh of one axis.
          width: numbers of a row, a multiple of 8.
          dtype: dtype of the numbers; any data of no more bytes may be sent as well.
          num_rows: rows sent at a time; None means `peer_buffer_rows`.
        """
        (axis,) = mesh.axis_names
        self._num_devices = mesh.devices.size
        self._split = NamedSharding(mesh, PartitionSpec(axis))
        num_rows = peer_buffer_rows(self._num_devices) if num_rows is None else num_rows
        self.capacity = num_rows * width * np.dtype(dtype).itemsize
        shape = self._num_devices, peer_buffers_len(self._num_devices, self.capacity)
        # Each device fills its own, since they are large. Compiled once for all calls of `renew`.
        self._new_peer_buffers = jax.jit(lambda: jnp.full(shape, EMPTY, jnp.int8), out_shardings=self._split)
        self.renew(alone=True)

    def renew(self, *, alone: bool = False) -> None:
        """Replace the memory by new memory. All earlier launches must have finished.

        Args:
          alone: every device is its own peer, and so waits for no other. Load kernels this way first.
            Otherwise the first device that runs waits for a peer whose loading waits for the first device.
        """
        # Freed first: two may not fit, and a table would mislead.
        for name in ("table", "words", "_peer_buffers"):
            vars(self).pop(name, None)
        num = self._num_devices
        self._peer_buffers = self._new_peer_buffers()
        words = np.zeros((num, words_len(num)), np.int32)
        if alone:
            words[:, FLAGS : handshakes_index(num)] = _NEVER_WAITED_FOR
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
        """Bytes of peer buffers and words on each device."""
        num = self._num_devices
        return peer_buffers_len(num, self.capacity) + 4 * words_len(num)


def _addresses(array: jax.Array) -> list[int]:
    """Return the address of each device's part, in mesh order."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [shard.data.unsafe_buffer_pointer() for shard in shards]
