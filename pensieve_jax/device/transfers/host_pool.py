"""Host slots: what chunks hold in pinned memory, by slot.

Owns: the arrays of every slot, and the one-time growth of the runtime's pinned allocator, with the refusal of
a size that the machine does not have.
Does not know: which slot belongs to whom, or how arrays come and go.

Memory that the runtime has to pin first is filled 15 times slower than recycled memory, so all of it is
taken once at the start and given back to the runtime, which keeps it. On CPUs nothing is pinned or kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import jax
import numpy as np

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.runtime.errors import in_a_line
from pensieve_jax.runtime.host_memory import OWN_LIMIT_GB, VARIABLE, available_bytes

_USABLE_FRACTION = 0.9  # of what is available: pinned memory cannot be swapped, and others live here too
_CHUNKS_PER_PIECE = 64


class HostPool:
    """One array per group of layers in every slot that holds a chunk; slots are 1 .. num_slots.

    Attributes:
      num_slots: as many as `cache.cpu_pages`.
      num_pieces: of the growth; 0 on CPUs, which need none.
    """

    def __init__(
        self, storage: KVStorage, num_slots: int, num_spare: int, cpu_bytes: int | None = None
    ) -> None:
        """Hold nothing yet.

        Args:
          storage: shape and placement of chunks.
          num_slots: chunks in all.
          num_spare: chunks that are on their way to a slot whose old memory is not free yet.
          cpu_bytes: what the slots were made of, if they were: refusals name it.

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
        """Have the runtime take the whole pool's memory, where it keeps it; yields after every piece.

        Raises:
          ConfigError: the runtime does not get it.
        """
        storage, taken = self._storage, 0
        held = []
        for piece in range(self.num_pieces):
            num_chunks = min(_CHUNKS_PER_PIECE, self._num_chunks - piece * _CHUNKS_PER_PIECE)
            try:
                for group in range(len(storage.groups)):
                    zeros = jax.device_put(
                        np.zeros(storage.chunk_shape(group), storage.chunk_dtype), storage.sharding
                    )
                    pinned = jax.device_put([zeros] * num_chunks, storage.host_sharding)
                    held.append(jax.block_until_ready(pinned))
            except jax.errors.JaxRuntimeError as error:
                raise self._refusal(
                    f"less: the runtime could pin {taken:,} of {self._num_bytes:,} bytes of host memory",
                    f"on GPUs it pins no more than {os.environ.get(VARIABLE, OWN_LIMIT_GB)} GB here: set the "
                    f"environment variable {VARIABLE} to a fifth more than is needed before the process "
                    f"starts; it reported: {in_a_line(error)}",
                ) from error
            taken += num_chunks * storage.slot_bytes
            yield f"{taken / 1e9:.1f} GB of host memory"

    def put(self, slot: int, arrays: list[jax.Array]) -> None:
        """Let `slot` hold a chunk; `arrays` are in pinned memory, one per group."""
        assert 1 <= slot <= self.num_slots and len(arrays) == len(self._storage.groups)
        self._arrays[slot] = arrays

    def get(self, slot: int) -> list[jax.Array]:
        """The arrays of a slot, one per group; it must hold a chunk."""
        assert slot in self._arrays, f"slot {slot} holds no chunk"
        return self._arrays[slot]

    def clear(self, slot: int) -> None:
        """Forget what `slot` holds, if anything."""
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
            f"{self._num_bytes:,} bytes, and of the {available:,} bytes that are available here "
            f"{_USABLE_FRACTION:.0%} may be pinned",
            f"lower it{' (or cache.cpu_bytes)' if self._cpu_bytes is None else ''}, or free host memory",
        )

    def _refusal(self, limit: str, hint: str) -> ConfigError:
        if self._cpu_bytes is not None:
            return ConfigError("cache.cpu_bytes", self._cpu_bytes, limit, hint)
        return ConfigError("cache.cpu_pages", self.num_slots, limit, hint)


def keeps_host_memory(storage: KVStorage) -> bool:
    """Whether the runtime keeps freed host memory for later arrays, as GPU runtimes keep pinned memory."""
    return storage.sharding.mesh.devices.flat[0].platform != "cpu"
