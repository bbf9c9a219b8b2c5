"""Compiled copies between pages of the pools and chunks in staging: the device's part of a transfer.

Owns: the executables, one per group of layers, direction and batch size, and the packing during the copy.
Does not know: host memory, or why a chunk moves.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.sharding import KV_PAGES_SPEC
from pallas_kernels.page_copies import (
    choose_backend,
    gather_packed,
    gather_pages,
    scatter_packed,
    scatter_pages,
)
from pensieve_jax.device.kv_storage import DevicePools, KVStorage
from pensieve_jax.device.transfers.copy_batches import CopyBatch, batch_sizes, batches
from pensieve_jax.runtime.compilation import CompilationJob
from pensieve_jax.runtime.program import Program


class Targets(NamedTuple):
    """The pages that chunks are scattered to, divided into batches."""

    batches: list[CopyBatch]
    pages: list[jax.Array]  # i32[size] of every batch


class PackingFailures:
    """The chunks of a gathered batch that could not be packed: counts on their way to the host."""

    def __init__(self, num_unplaced: Sequence[jax.Array]) -> None:
        """Start the copies of `num_unplaced`: for every group of layers, i32[num_devices, size]."""
        self._arrays = num_unplaced
        self._lost: np.ndarray | None = None
        for array in num_unplaced:
            if not _is_on_cpu(array):  # a CPU array is read in place
                array.copy_to_host_async()

    def is_incomplete(self, index: int) -> bool:
        """Return whether a chunk of the batch is incomplete on any device; its gather has ended.

        Raises:
          jax.errors.JaxRuntimeError: the device failed.
        """
        if self._lost is None:
            self._lost = np.stack([np.asarray(array).any(axis=0) for array in self._arrays]).any(axis=0)
        return bool(self._lost[index])


class Gathered(NamedTuple):
    """A chunk in staging.

    Attributes:
      pieces: its arrays, one per group of layers.
      failures: the failures of its batch; None if the chunk is complete for certain.
      index_in_batch: its index in the batch.
    """

    pieces: list[jax.Array]
    failures: PackingFailures | None
    index_in_batch: int

    @property
    def is_lost(self) -> bool:
        """Whether the chunk is incomplete (see `PackingFailures`); then its pieces must not be used."""
        return self.failures is not None and self.failures.is_incomplete(self.index_in_batch)


class PageCopies:
    """Gathers of pages into staging arrays, and scatters back into pages; all dispatched without waiting.

    Attributes:
      sizes: batch sizes, ascending.
      num_executables: the number of `jobs`.
    """

    def __init__(self, storage: KVStorage, pools: DevicePools, max_num_chunks: int) -> None:
        """Compile nothing yet; `max_num_chunks` is the maximum that one call moves."""
        self._storage, self._pools = storage, pools
        self._replicated = NamedSharding(storage.sharding.mesh, PartitionSpec())
        self.sizes = batch_sizes(max_num_chunks)
        self._gathers: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._scatters: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._last_failures: deque[PackingFailures] = deque(maxlen=1)
        weakref.finalize(self, _await_failures, self._last_failures)
        self.num_executables = 2 * len(self.sizes) * len(storage.groups)

    def jobs(self) -> Iterator[CompilationJob]:
        """Yield the compilations that must end before anything moves."""
        storage = self._storage
        shard = storage.sharding.shard_shape(storage.shape)
        mesh = storage.sharding.mesh
        assert isinstance(mesh, Mesh)
        backend = choose_backend(shard[1:], mesh.devices.flat[0])
        for group, pools in enumerate(self._pools.groups):
            shape = storage.chunk_shape(group)
            chunk = jax.ShapeDtypeStruct(shape, storage.chunk_dtype, sharding=storage.sharding)
            for size in self.sizes:
                pages = jax.ShapeDtypeStruct((size,), np.int32, sharding=self._replicated)
                key, suffix = (group, size), f"of {size} chunks, group {group}"
                statics = {"mesh": mesh, "backend": backend, "packed": storage.packing is not None}
                gather = Program(_gather, (pools, pages), statics)
                scatter = Program(_scatter, (pools, [chunk] * size, pages), statics)
                for name, program, kept in (
                    ("gather", gather, self._gathers),
                    ("scatter", scatter, self._scatters),
                ):
                    keep = functools.partial(kept.__setitem__, key)
                    yield CompilationJob(f"{name} {suffix}", program, keep)

    @property
    def temp_bytes(self) -> int:
        """The largest temporary memory of a compiled program on a device, beside pools and staging."""
        compiled = [*self._gathers.values(), *self._scatters.values()]
        stats = [executable.memory_analysis() for executable in compiled]
        return max((each.temp_size_in_bytes for each in stats if each is not None), default=0)

    def gather(self, pages: Sequence[int]) -> list[Gathered]:
        """Return a new array per page and group of layers."""
        chunks: list[Gathered] = []
        is_packed = self._storage.packing is not None
        for start, stop, size in batches(len(pages), self.sizes):
            padded = _padded(pages[start:stop], size)
            groups = [self._gathers[g, size](pools, padded) for g, pools in enumerate(self._pools.groups)]
            failures = PackingFailures([num_unplaced for _, num_unplaced in groups]) if is_packed else None
            if failures is not None:
                self._last_failures.append(failures)
            pieces = zip(*(chunks for chunks, _ in groups), strict=True)
            chunks += [Gathered(list(own), failures, i) for i, own in enumerate(pieces)][: stop - start]
        return chunks

    def stage(self, pages: Sequence[int]) -> Targets:
        """Send page numbers for `scatter` to the device.

        Call this before copying the chunks; otherwise these few bytes arrive after all of them.
        """
        cut = list(batches(len(pages), self.sizes))
        padded = [_padded(pages[start:stop], size) for start, stop, size in cut]
        return Targets(cut, jax.device_put(padded, self._replicated))

    def scatter(self, group: int, chunks: Sequence[jax.Array], targets: Targets) -> None:
        """Write one group's piece of every chunk to its page."""
        for (start, stop, size), pages in zip(targets.batches, targets.pages, strict=True):
            batch = [*chunks[start:stop], *[chunks[start]] * (size - (stop - start))]
            pools = self._pools.groups[group]
            self._pools.groups[group] = self._scatters[group, size](pools, batch, pages)


def _await_failures(last: Iterable[PackingFailures]) -> None:
    """Wait for the last copy, and so for all earlier ones, when gathering or the process ends.

    The thread that finishes a copy to the host needs the interpreter.
    """
    for failures in last:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            failures.is_incomplete(0)


def _is_on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"


def _padded(pages: Sequence[int], size: int) -> np.ndarray:
    """Return i32[size]: `pages`, then page 0, which the kernels treat as padding."""
    padded = np.zeros(size, np.int32)
    padded[: len(pages)] = pages
    return padded


_STATICS = ("mesh", "backend", "packed")
_BY_DEVICE = PartitionSpec("tp")


@functools.partial(jax.jit, static_argnames=_STATICS)
def _gather(
    pools: list[jax.Array], pages: jax.Array, *, mesh: Mesh, backend: str, packed: bool
) -> tuple[list[jax.Array], jax.Array | None]:
    """Return chunks and, if packed, i32[num_devices, len(pages)] that is positive for incomplete chunks."""

    def gather(pools: list[jax.Array], pages: jax.Array) -> tuple[list[jax.Array], jax.Array | None]:
        if not packed:
            return gather_pages(pools, pages, backend=backend), None
        chunks, num_unplaced = gather_packed(pools, pages, backend=backend)
        return chunks, num_unplaced[None]

    run = jax.shard_map(
        gather,
        mesh=mesh,
        in_specs=(KV_PAGES_SPEC, PartitionSpec()),
        out_specs=(KV_PAGES_SPEC, _BY_DEVICE),
        check_vma=False,  # kernels do not declare over which axes their outputs vary
    )
    return run(pools, pages)


@functools.partial(jax.jit, static_argnames=_STATICS, donate_argnames=("pools",))
def _scatter(
    pools: list[jax.Array],
    chunks: list[jax.Array],
    pages: jax.Array,
    *,
    mesh: Mesh,
    backend: str,
    packed: bool,
) -> list[jax.Array]:
    run = jax.shard_map(
        functools.partial(scatter_packed if packed else scatter_pages, backend=backend),
        mesh=mesh,
        in_specs=(KV_PAGES_SPEC, KV_PAGES_SPEC, PartitionSpec()),
        out_specs=KV_PAGES_SPEC,
        check_vma=False,
    )
    return run(pools, chunks, pages)
