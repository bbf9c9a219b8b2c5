"""Host slots: the arrays of chunks in pinned memory, by slot.

Owns: the arrays of every slot, the one-time growth of the runtime's pinned allocator, and the refusal of a
size that the machine does not have.
Does not know: which conversation a slot belongs to, or how arrays are copied.

Filling memory that the runtime must pin first is 15 times slower than filling recycled memory. So all of it
is allocated once at start and returned to the runtime, which keeps it. On CPUs nothing is pinned or kept.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import jax
import numpy as np

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.runtime.errors import in_a_line
from pensieve_jax.runtime.host_memory import OWN_LIMIT_GB, VARIABLE, available_bytes

_USABLE_FRACTION = 0.9  # of available memory: pinned memory cannot be swapped, and other processes need some
_CHUNKS_PER_PIECE = 64
_ARRAY_BYTES = 4 * 2**20  # each array takes some 0.1 ms beside its pinning


class HostPool:
    """Arrays of every slot that holds a chunk, one per group of layers; slots are 1 .. num_slots.

    Attributes:
      num_slots: number of slots, `cache.cpu_pages`.
      num_pieces: number of pieces of `grow`; 0 on CPUs, which need none.
    """

    def __init__(
        self, storage: KVStorage, num_slots: int, num_spare: int, cpu_bytes: int | None = None
    ) -> None:
        """Check the size against available memory and allocate nothing yet.

        Args:
          storage: shape and placement of chunks.
          num_slots: number of chunks in all.
          num_spare: number of chunks on their way to a slot whose old memory is not free yet.
          cpu_bytes: the size that `num_slots` was derived from, if any; error messages name it.

        Raises:
          ConfigError: the machine has less memory than that.
        """
        self.num_slots, self._cpu_bytes = num_slots, cpu_bytes
        self._storage = storage
        self._num_chunks = num_slots + num_spare if num_slots else 0
        self.num_pieces = -(-self._num_chunks // _CHUNKS_PER_PIECE) if keeps_host_memory(storage) else 0
        self._arrays: dict[int, list[jax.Array]] = {}
        self._check_memory()

    def grow(self) -> Iterator[str]:
        """Make the runtime allocate the whole pool's memory, if it keeps it; yield after every piece.

        Raises:
          ConfigError: the runtime cannot allocate it.
        """
        storage, taken = self._storage, 0
        held = []
        for piece in range(self.num_pieces):
            num_chunks = min(_CHUNKS_PER_PIECE, self._num_chunks - piece * _CHUNKS_PER_PIECE)
            try:
                for group in range(len(storage.groups)):
                    num_layers, *rest = storage.chunk_shape(group)
                    chunk_bytes = num_layers * math.prod(rest) * np.dtype(storage.chunk_dtype).itemsize
                    per_array = chunks_per_array(chunk_bytes)
                    # The last piece may end with a shorter array, so that no more is pinned than was checked.
                    num_full, rest_size = divmod(num_chunks, per_array)
                    for size, num_arrays in ((per_array, num_full), (rest_size, 1)):
                        if not size or not num_arrays:
                            continue
                        zeros = jax.device_put(
                            np.zeros((size * num_layers, *rest), storage.chunk_dtype), storage.sharding
                        )
                        pinned = jax.device_put([zeros] * num_arrays, storage.host_sharding)
                        held.append(jax.block_until_ready(pinned))
            except jax.errors.JaxRuntimeError as error:
                raise self._refusal(
                    f"less: the runtime could pin {taken:,} of {self._num_bytes:,} bytes of host memory",
                    f"on GPUs it pins at most {os.environ.get(VARIABLE, OWN_LIMIT_GB)} GB here. Set the "
                    f"environment variable {VARIABLE} to 1.2 times the GiB needed before the process "
                    f"starts. The runtime reported: {in_a_line(error)}",
                ) from error
            taken += num_chunks * storage.slot_bytes
            yield f"{taken / 1e9:.1f} GB of host memory"

    def put(self, slot: int, arrays: list[jax.Array]) -> None:
        """Store a chunk in `slot`; `arrays` are in pinned memory, one per group."""
        assert 1 <= slot <= self.num_slots and len(arrays) == len(self._storage.groups)
        self._arrays[slot] = arrays

    def get(self, slot: int) -> list[jax.Array]:
        """Return the arrays of a slot, one per group; the slot must hold a chunk."""
        assert slot in self._arrays, f"slot {slot} holds no chunk"
        return self._arrays[slot]

    def clear(self, slot: int) -> None:
        """Forget the contents of `slot`, if any."""
        self._arrays.pop(slot, None)

    @property
    def _num_bytes(self) -> int:
        return self._num_chunks * self._storage.slot_bytes

    def _check_memory(self) -> None:
        available = available_bytes()
        if not self._num_chunks or available is None or self._num_bytes <= available * _USABLE_FRACTION:
            return
        num_spare = self._num_chunks - self.num_slots
        most = max(int(available * _USABLE_FRACTION) // self._storage.slot_bytes - num_spare, 0)
        sizes = f"{most:,} pages", f"{most * self._storage.slot_bytes:,} bytes"
        size, as_well = sizes if self._cpu_bytes is None else sizes[::-1]
        raise self._refusal(
            f"at most {size} ({as_well}): with {num_spare} pages in transit, of "
            f"{self._storage.slot_bytes:,} bytes each, it takes "
            f"{self._num_bytes:,} bytes, and {_USABLE_FRACTION:.0%} of the {available:,} bytes that are "
            f"available here may be pinned",
            f"lower it{' (or cache.cpu_bytes)' if self._cpu_bytes is None else ''}, or free host memory",
        )

    def _refusal(self, limit: str, hint: str) -> ConfigError:
        if self._cpu_bytes is not None:
            return ConfigError("cache.cpu_bytes", self._cpu_bytes, limit, hint)
        return ConfigError("cache.cpu_pages", self.num_slots, limit, hint)


def chunks_per_array(chunk_bytes: int) -> int:
    """Return how many chunks of a group share an array of `grow`, a power of two."""
    most = min(_ARRAY_BYTES // chunk_bytes, _CHUNKS_PER_PIECE)
    return 1 << max(most, 1).bit_length() - 1


def keeps_host_memory(storage: KVStorage) -> bool:
    """Return whether the runtime keeps freed host memory for later arrays, as GPU runtimes do."""
    return storage.sharding.mesh.devices.flat[0].platform != "cpu"
