"""Variants of the kernels that pack pages, measured without engine, weights or link.

Owns: the variants, their check and their time.
Does not know: which variant is best; it returns all.
Called by `programs.benchmark_packing`.

A call moves pages that no earlier call moved, until all were moved, so that caches do not help. Before
timing, chunks are compared byte by byte with XLA's packing, and pages with their original contents.
"""

from __future__ import annotations

import functools
import itertools
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_copies import gather_packed, gather_pages, scatter_pages
from pallas_kernels.page_copies.triton_packing import Launches, triton_pack, triton_unpack
from pensieve_lab.common.spread import Spread
from pensieve_lab.steps.device_trace import trace_kernels

_CUTS = [
    Launches(numbers_per_warp, max_chunks)
    for max_chunks, numbers_per_warp in itertools.product((16, 4), (1024, 512, 2048))
]
_NAMES = ("gather_pages", "scatter_pages", "pack_pages", "unpack_pages")  # prefixes of the kernels' names


class Shape(NamedTuple):
    """Pools of a group of layers, and the number of chunks per call.

    Attributes:
      num_pools: layers of the group.
      num_sets: number of calls with separate pages.
    """

    num_pools: int
    page_size: int
    num_heads: int
    head_dim: int
    num_chunks: int
    num_sets: int = 6


class Variant(NamedTuple):
    """One variant of one operation; `call` takes pools, chunks and pages."""

    name: str
    call: Callable[..., Any]
    is_scatter: bool


def variants(interpret: bool, cuts: list[Launches]) -> Iterator[Variant]:
    """Yield the variants, plain copies first."""
    backend = "xla" if interpret else "pallas_triton"
    gather = functools.partial(gather_pages, backend=backend)
    scatter = functools.partial(scatter_pages, backend=backend)
    yield Variant("gather", lambda pools, chunks, pages: gather(pools, pages), False)
    yield Variant("scatter", scatter, True)
    for cut in cuts:
        pack = functools.partial(triton_pack, interpret=interpret, cut=cut)
        unpack = functools.partial(triton_unpack, interpret=interpret, cut=cut)
        text = f"{cut.numbers_per_warp} a warp, {cut.max_chunks} chunks a launch"
        yield Variant(f"pack, {text}", _packing(pack), False)
        yield Variant(f"unpack, {text}", unpack, True)


def _packing(pack: Callable[..., Any]) -> Callable[..., Any]:
    return lambda pools, chunks, pages: pack(pools, pages)


class _Pages:
    """Pools, the sets of pages that calls move one after the other, and chunks of each set in both forms."""

    def __init__(self, shape: Shape) -> None:
        num_pages = 1 + shape.num_sets * shape.num_chunks
        keys = jax.random.split(jax.random.key(0), shape.num_pools)
        pool_shape = (num_pages, shape.page_size, shape.num_heads, shape.head_dim)
        draw = jax.jit(lambda key: jax.random.normal(key, pool_shape, jnp.bfloat16))
        self.pools = [draw(key) for key in keys]
        order = 1 + np.random.default_rng(0).permutation(num_pages - 1).astype(np.int32)
        self.sets = [jnp.asarray(pages) for pages in order.reshape(shape.num_sets, shape.num_chunks)]
        gather, gather_and_pack = jax.jit(gather_pages), jax.jit(gather_packed)
        self.raw = [gather(self.pools, pages) for pages in self.sets]
        packed = [gather_and_pack(self.pools, pages) for pages in self.sets]
        self.packed = [chunks for chunks, _ in packed]
        assert not any(np.asarray(lost).any() for _, lost in packed), "random numbers overflow"

    def chunks(self, variant: Variant) -> list[list[jax.Array]]:
        """Return the chunks that a scatter takes, of every set."""
        return self.packed if variant.name.startswith("unpack") else self.raw


def _compiled(variant: Variant, pages: _Pages) -> Callable[..., Any]:
    donated = (0,) if variant.is_scatter else ()
    call = jax.jit(variant.call, donate_argnums=donated)
    return call.lower(pages.pools, pages.chunks(variant)[0], pages.sets[0]).compile()


def _check(variant: Variant, call: Callable[..., Any], pages: _Pages) -> None:
    """Check that a gather's chunks equal XLA's, and that a scatter restores its pages."""
    chunks = pages.chunks(variant)[0]
    if variant.is_scatter:
        pages.pools = call(pages.pools, chunks, pages.sets[0])
        moved, expected = jax.jit(gather_pages)(pages.pools, pages.sets[0]), pages.raw[0]
    else:
        moved = call(pages.pools, chunks, pages.sets[0])
        expected = pages.raw[0]
        if variant.name.startswith("pack"):
            (moved, lost), expected = moved, pages.packed[0]
            assert not np.asarray(lost).any(), f"{variant.name}: the packing lost values"
    for one, other in zip(moved, expected, strict=True):
        assert _same(one, other), f"{variant.name}: the bits differ"


@jax.jit
def _equal(one: jax.Array, other: jax.Array) -> jax.Array:
    if one.dtype == jnp.bfloat16:
        one, other = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (one, other))
    return (one == other).all()


def _same(one: jax.Array, other: jax.Array) -> bool:
    return one.dtype == other.dtype and bool(_equal(one, other))


def _run(variant: Variant, call: Callable[..., Any], pages: _Pages) -> float:
    """Run all sets once; return the seconds per call on the host."""
    chunks, start_s = pages.chunks(variant), time.perf_counter()
    moved: Any = None
    for some, numbers in zip(chunks, pages.sets, strict=True):
        moved = call(pages.pools, some, numbers)
        if variant.is_scatter:
            pages.pools = moved
    jax.block_until_ready(moved)
    return (time.perf_counter() - start_s) / len(pages.sets)


def measure_variants(shape: Shape, num_repeats: int) -> dict[str, dict[str, Any]]:
    """Return seconds per call by name, on the host and of kernels in a trace (none on CPUs)."""
    interpret = jax.default_backend() == "cpu"
    pages = _Pages(shape)
    tried = list(variants(interpret, _CUTS[:1] if interpret else _CUTS))
    with ThreadPoolExecutor() as threads:
        calls = list(threads.map(lambda variant: _compiled(variant, pages), tried))
    for variant, call in zip(tried, calls, strict=True):
        _check(variant, call, pages)
    samples: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in tried}
    for _ in range(num_repeats):
        for variant, call in zip(tried, calls, strict=True):
            samples[variant.name].append(_sample(variant, call, pages))
    return {
        name: {
            "launch_s": Spread.of([launch_s for launch_s, _ in some]).as_dict(),
            "kernels_s": Spread.of([kernels_s for _, kernels_s in some if kernels_s]).as_dict(),
        }
        for name, some in samples.items()
    }


def _sample(variant: Variant, call: Callable[..., Any], pages: _Pages) -> tuple[float, float]:
    launch_s = _run(variant, call, pages)
    kernels = trace_kernels(lambda: _run(variant, call, pages))
    durations = [kernel.duration_ns for kernel in kernels if kernel.name.startswith(_NAMES)]
    return launch_s, sum(durations) * 1e-9 / len(pages.sets)


def rows_of(figures: dict[str, dict[str, Any]]) -> list[list[Any]]:
    """Return the rows of a table, the fastest kernels first."""
    rows = [
        [name, 1e6 * (one["kernels_s"]["median"] or 0.0), 1e6 * one["launch_s"]["median"]]
        for name, one in figures.items()
    ]
    return sorted(rows, key=operator.itemgetter(1))
