"""Compiled copies between pages of the pools and chunks in staging: the device's half of a transfer.

Owns: the executables, one per group of layers, direction and batch size, and how a number of chunks is cut
into batches of those sizes.
Does not know: host memory, or why a chunk moves.
Called by: `outgoing` and `incoming`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.sharding import KV_PAGES_SPEC
from pallas_kernels.page_copies import choose_backend, gather_pages, scatter_pages
from pensieve_jax.device.device_pools import DevicePools
from pensieve_jax.device.kv_storage import KVStorage
from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program

_BATCH_SIZES = (4, 16, 64)
_LEAST_FILL = 0.75  # a batch with a larger share of padding is cut into smaller ones


class Targets(NamedTuple):
    """Where chunks go, cut into batches."""

    batches: list[tuple[int, int, int]]  # first and last + 1 chunk, and the size of the executable
    pages: list[jax.Array]  # i32[size] of every batch


class PageCopies:
    """Gathers pages into staging arrays, and scatters such arrays into pages; all dispatched, never waiting.

    Attributes:
      sizes: of batches, ascending.
      num_executables: the number of `jobs`.
    """

    def __init__(self, storage: KVStorage, pools: DevicePools, max_num_chunks: int) -> None:
        """Compile nothing yet; `max_num_chunks` is the most that one call will move."""
        self._storage, self._pools = storage, pools
        self._replicated = NamedSharding(storage.sharding.mesh, PartitionSpec())
        self.sizes = tuple(size for size in _BATCH_SIZES if size <= max_num_chunks) or (max_num_chunks,)
        self._gathers: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._scatters: dict[tuple[int, int], jax.stages.Compiled] = {}
        self.num_executables = 2 * len(self.sizes) * len(storage.groups)

    def jobs(self) -> Iterator[CompilationJob]:
        """Everything that is to be compiled before anything moves."""
        storage = self._storage
        shard = storage.sharding.shard_shape(storage.shape)
        mesh = storage.sharding.mesh
        assert isinstance(mesh, Mesh)
        backend = choose_backend(shard[1:], mesh.devices.flat[0])
        for group, pools in enumerate(self._pools.groups):
            chunk = jax.ShapeDtypeStruct(storage.chunk_shape(group), storage.dtype, sharding=storage.sharding)
            for size in self.sizes:
                pages = jax.ShapeDtypeStruct((size,), np.int32, sharding=self._replicated)
                key, suffix = (group, size), f"of {size} chunks, group {group}"
                statics = {"mesh": mesh, "backend": backend}
                gather = Program(_gather, (pools, pages), statics)
                scatter = Program(_scatter, (pools, [chunk] * size, pages), statics)
                for name, program, kept in (
                    ("gather", gather, self._gathers),
                    ("scatter", scatter, self._scatters),
                ):
                    keep = functools.partial(kept.__setitem__, key)
                    yield CompilationJob(f"{name} {suffix}", program, keep)

    def gather(self, pages: Sequence[int]) -> list[list[jax.Array]]:
        """A new array per page and group of layers: [page][group]."""
        chunks: list[list[jax.Array]] = []
        for start, stop, size in self._batches(len(pages)):
            padded = _padded(pages[start:stop], size)
            groups = [self._gathers[g, size](pools, padded) for g, pools in enumerate(self._pools.groups)]
            chunks += [list(pieces) for pieces in zip(*groups, strict=True)][: stop - start]
        return chunks

    def stage(self, pages: Sequence[int]) -> Targets:
        """Pages for `scatter`, on their way to the device.

        Their few bytes must be on the way before the chunks are, or they arrive behind all of them.
        """
        batches = list(self._batches(len(pages)))
        padded = [_padded(pages[start:stop], size) for start, stop, size in batches]
        return Targets(batches, jax.device_put(padded, self._replicated))

    def scatter(self, group: int, chunks: Sequence[jax.Array], targets: Targets) -> None:
        """Write one group's piece of every chunk to its page."""
        for (start, stop, size), pages in zip(targets.batches, targets.pages, strict=True):
            batch = [*chunks[start:stop], *[chunks[start]] * (size - (stop - start))]
            pools = self._pools.groups[group]
            self._pools.groups[group] = self._scatters[group, size](pools, batch, pages)

    def _batches(self, num_chunks: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, size of the executable) of every batch."""
        start = 0
        while start < num_chunks:
            rest = num_chunks - start
            fitting = [size for size in self.sizes if rest >= size * _LEAST_FILL]
            size = fitting[-1] if fitting else self.sizes[0]
            yield start, min(start + size, num_chunks), size
            start += size


def _padded(pages: Sequence[int], size: int) -> np.ndarray:
    """i32[size]: `pages`, then page 0, which the kernels take for padding."""
    padded = np.zeros(size, np.int32)
    padded[: len(pages)] = pages
    return padded


@functools.partial(jax.jit, static_argnames=("mesh", "backend"))
def _gather(pools: list[jax.Array], pages: jax.Array, *, mesh: Mesh, backend: str) -> list[jax.Array]:
    run = jax.shard_map(
        functools.partial(gather_pages, backend=backend),
        mesh=mesh,
        in_specs=(KV_PAGES_SPEC, PartitionSpec()),
        out_specs=KV_PAGES_SPEC,
        check_vma=False,  # kernels do not declare over which axes their outputs vary
    )
    return run(pools, pages)


@functools.partial(jax.jit, static_argnames=("mesh", "backend"), donate_argnames=("pools",))
def _scatter(
    pools: list[jax.Array], chunks: list[jax.Array], pages: jax.Array, *, mesh: Mesh, backend: str
) -> list[jax.Array]:
    run = jax.shard_map(
        functools.partial(scatter_pages, backend=backend),
        mesh=mesh,
        in_specs=(KV_PAGES_SPEC, KV_PAGES_SPEC, PartitionSpec()),
        out_specs=KV_PAGES_SPEC,
        check_vma=False,
    )
    return run(pools, chunks, pages)
