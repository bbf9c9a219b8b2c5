"""Times attention on named shapes; prints a table and, as the last line, one JSON document.

Owns: how a kernel is timed and checked. Every case is checked before it is timed: whole against the `xla`
back end on the device, and one row against the dense reference. Many iterations run inside one jitted call,
each tied to the one before, so that neither dispatch nor overlap shows. The pools are larger than any
cache. Exit status 1 if a kernel is wrong, 2 for flags that cannot work.

    python scripts/benchmark_kernels.py --cases=all
    python scripts/benchmark_kernels.py --cases=decode_64x4096_gqa10,prefill_4x2048_gqa10 --sweep
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from common.launch import EXIT_FAILED, run

from pallas_kernels.ragged_paged_attention import (
    AttentionArgumentError,
    BlockSizes,
    TileClass,
    build_tiles,
    mosaic_class,
    ragged_paged_attention,
    tile_spec,
)
from pallas_kernels.ragged_paged_attention.reference import reference_attention
from pallas_kernels.ragged_paged_attention.shapes import CASES, Case, draw_metadata

_CASES = flags.DEFINE_list("cases", None, "Names, or 'all'; default: all on a GPU, tiny elsewhere.")
_BACKEND = flags.DEFINE_enum(
    "backend", "auto", ["auto", "xla", "pallas_triton", "pallas_mosaic_gpu"], "What is timed."
)
_SWEEP = flags.DEFINE_bool("sweep", False, "Time many block sizes for every case, best first.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of pages and values.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of pages and values.")
_TARGET_MS = flags.DEFINE_float("target_ms", 40.0, "Device time of one timed call, about.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls, of which the median is taken.", lower_bound=1)

# Pages of distinct values; a prime, so that no power-of-two stride meets the same page twice.
_NUM_DISTINCT_PAGES = 1021
_TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}

# rows, block_kv, num_warps, num_stages, min_split_kv, target_programs, whole_loop
_SMALL_SWEEP = (
    (16, 32, 2, 4, 256, 2048, True), (16, 32, 2, 4, 256, 4096, True), (16, 32, 2, 4, 256, 8192, True),
    (16, 64, 2, 3, 256, 2048, True), (16, 64, 2, 4, 256, 2048, True), (16, 64, 4, 2, 256, 2048, False),
    (16, 64, 4, 3, 256, 2048, False), (16, 64, 4, 4, 256, 2048, False), (16, 64, 4, 4, 256, 4096, False),
    (16, 128, 4, 2, 256, 2048, False), (16, 128, 4, 2, 256, 2048, True), (16, 128, 4, 3, 256, 2048, False),
    (16, 128, 2, 2, 256, 2048, False), (16, 128, 8, 2, 256, 2048, False), (16, 128, 4, 2, 256, 8192, False),
    (32, 64, 4, 3, 256, 2048, True), (32, 64, 4, 3, 256, 2048, False),
)  # fmt: skip
_LARGE_SWEEP = (
    (128, 64, 8, 3, 1024, 528, True), (128, 64, 8, 2, 1024, 528, True), (128, 64, 8, 4, 1024, 528, True),
    (128, 128, 8, 2, 1024, 528, True), (128, 32, 8, 4, 1024, 528, True), (64, 64, 4, 3, 1024, 528, True),
    (64, 64, 4, 2, 1024, 528, True), (64, 128, 4, 2, 1024, 528, True), (128, 64, 4, 3, 1024, 528, True),
)  # fmt: skip
# rows, block_kv, num_stages, min_split_kv, target_programs
_MOSAIC_SMALL_SWEEP = (
    (64, 128, 3, 256, 528), (64, 64, 5, 256, 528), (64, 128, 3, 256, 1056), (64, 64, 6, 256, 528),
    (64, 128, 3, 256, 264), (64, 128, 2, 256, 528),
)  # fmt: skip
_MOSAIC_LARGE_SWEEP = (
    (128, 128, 2, 1024, 528), (128, 64, 4, 1024, 528), (128, 64, 5, 1024, 528), (128, 64, 3, 1024, 528),
    (128, 128, 2, 1024, 264), (64, 128, 3, 1024, 528),
)  # fmt: skip


class MismatchError(Exception):
    """A kernel computed something else than the references."""


class Inputs(NamedTuple):
    """Arguments of one case on the device, and those of the host that made them."""

    device: tuple[jax.Array, ...]
    host: tuple[np.ndarray, ...]  # kv_lens, page_indices, cu_q_lens, num_seqs


def make_inputs(case: Case, dtype: str, seed: int) -> Inputs:
    """Random pages of a pool in which page 0, and nothing else, is unused: it holds NaN."""
    kv_lens, page_indices, cu_q_lens, num_seqs, num_pages = draw_metadata(case, np.random.default_rng(seed))
    heads = case.heads

    @jax.jit
    def values(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        key_q, key_kv = jax.random.split(key)
        q = jax.random.normal(key_q, (case.num_tokens, heads.num_q_heads, heads.head_dim), dtype)
        page = (case.page_size, 2 * heads.num_kv_heads, heads.head_dim)
        distinct = jax.random.normal(key_kv, (min(_NUM_DISTINCT_PAGES, num_pages), *page), dtype)
        pool = distinct[jnp.arange(num_pages) % distinct.shape[0]].at[0].set(jnp.nan)
        return q, pool

    host = (kv_lens, page_indices, cu_q_lens, num_seqs)
    return Inputs((*values(jax.random.key(seed)), *map(jnp.asarray, host)), host)


def attention(
    case: Case, inputs: Inputs, backend: str, blocks: BlockSizes | None
) -> tuple[Callable[..., Any], Any, Any]:
    """(function of q and the rest, the rest of its arguments, spec)."""
    q, pool, *rows = inputs.device
    heads = case.heads
    spec = tile_spec(
        num_tokens=case.num_tokens, max_num_seqs=len(case.rows), num_q_heads=heads.num_q_heads,
        num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, page_size=case.page_size, dtype=q.dtype,
        backend=backend, blocks=blocks,
    )  # fmt: skip
    kv_lens, _, cu_q_lens, num_seqs = inputs.host
    tiles = jnp.asarray(build_tiles(spec, cu_q_lens, kv_lens, num_seqs))

    def attend(q: jax.Array, pool: jax.Array, tiles: jax.Array, *rows: jax.Array) -> jax.Array:
        scale = 1 / math.sqrt(heads.head_dim)
        return ragged_paged_attention(q, pool, *rows, sm_scale=scale, metadata=(spec, tiles))

    return attend, (pool, tiles, *rows), spec


def seconds_per_iteration(
    attend: Callable[..., Any], q: jax.Array, rest: Any, num_iterations: int, repeats: int
) -> float:
    """Median over calls of the mean over the iterations chained in a call."""

    @jax.jit
    def chain(q: jax.Array, *rest: jax.Array) -> jax.Array:
        def body(_: Any, out: jax.Array) -> jax.Array:
            # Ties the iteration to the one before without touching a value, and keeps it inside the loop.
            tied, _ = jax.lax.optimization_barrier((q, out))
            return attend(tied, *rest)

        return jax.lax.fori_loop(0, num_iterations, body, jnp.zeros_like(q))

    chain(q, *rest).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        chain(q, *rest).block_until_ready()
        times.append((time.perf_counter() - start) / num_iterations)
    return statistics.median(times)


def copy_bandwidth(num_bytes: int, repeats: int) -> float:
    """Bytes per second that a read-and-write pass over a large array reaches, both directions counted."""
    num_iterations = 20
    step = jax.jit(lambda x: jax.lax.fori_loop(0, num_iterations, lambda _, y: y * 0.5 + 1, x))
    x = jnp.ones(num_bytes // 2, jnp.bfloat16)
    step(x).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * num_bytes * num_iterations / statistics.median(times)


def check_row(case: Case, inputs: Inputs, out: jax.Array, row: int) -> float:
    """Largest difference of one row from the dense reference, as `largest_difference` counts."""
    kv_lens, page_indices, cu_q_lens, _ = inputs.host
    tokens = slice(int(cu_q_lens[row]), int(cu_q_lens[row + 1]))
    num_pages = -(-int(kv_lens[row]) // case.page_size)
    expected = reference_attention(
        np.asarray(inputs.device[0][tokens]),
        np.asarray(inputs.device[1][jnp.asarray(page_indices[row, :num_pages])]),
        kv_lens[row : row + 1],
        np.arange(num_pages, dtype=np.int32)[None],
        np.array([0, tokens.stop - tokens.start], np.int32),
        np.array([1], np.int32),
        sm_scale=1 / math.sqrt(case.heads.head_dim),
    )
    return float(largest_difference(out[tokens], expected[: tokens.stop - tokens.start]))


@jax.jit
def largest_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Absolute for small and relative for large values; NaN if any element of either is NaN."""
    difference = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    return (difference / jnp.maximum(1, jnp.abs(b.astype(jnp.float32)))).max()


def block_variants(case: Case, spec: Any) -> Iterator[BlockSizes]:
    """Block sizes to try: those of the class that does the case's work; the other class keeps its own."""
    default = spec.blocks.classes
    mostly_short = max(q_len for q_len, _ in case.rows) * spec.group <= 32
    tried_classes = [TileClass(*values) for values in (_SMALL_SWEEP if mostly_short else _LARGE_SWEEP)]
    if spec.backend == "pallas_mosaic_gpu":
        sweep = _MOSAIC_SMALL_SWEEP if mostly_short else _MOSAIC_LARGE_SWEEP
        tried_classes = [mosaic_class(*values) for values in sweep]
    for tried in tried_classes:
        others = [c for c in default if (c.rows > tried.rows if mostly_short else c is default[0])]
        classes = sorted({tried, *others}, key=lambda c: c.rows)
        if tried.rows >= spec.group and len({c.rows for c in classes}) == len(classes):
            yield BlockSizes(tuple(classes))


def describe(blocks: BlockSizes) -> str:
    """rows x block_kv, warps, stages, least split, programs, of every class; M: of the Mosaic kernel."""
    return " ".join(
        ("M" if c.mosaic else "")
        + f"{c.rows}x{c.block_kv}w{c.num_warps}s{c.num_stages}/{c.min_split_kv}/{c.target_programs}"
        + ("" if c.whole_loop else "m")
        for c in blocks.classes
    )


def measure(
    case: Case, inputs: Inputs, backend: str, blocks: BlockSizes | None, expected: jax.Array, copy_rate: float
) -> dict[str, Any]:
    """Checks, then times, one case with one choice of blocks."""
    attend, rest, spec = attention(case, inputs, backend, blocks)
    q = inputs.device[0]
    out = jax.jit(attend)(q, *rest)
    error = max(
        float(largest_difference(out, expected)), check_row(case, inputs, out, int(inputs.host[0].argmax()))
    )
    if not error < _TOLERANCE[_DTYPE.value]:
        raise MismatchError(f"{case.name}, {describe(spec.blocks)}: differs by {error}")
    itemsize = q.dtype.itemsize
    num_bytes = case.kv_bytes * itemsize // 2 + 2 * q.size * itemsize
    bound_s = max(num_bytes / copy_rate, case.flops / 8e14)
    on_gpu = jax.default_backend() == "gpu"
    num_iterations = int(np.clip(_TARGET_MS.value * 1e-3 / bound_s, 1, 400)) if on_gpu else 2
    seconds = seconds_per_iteration(attend, q, rest, num_iterations, _REPEATS.value)
    return {
        "case": case.name,
        "backend": spec.backend,
        "blocks": [dataclasses.astuple(c) for c in spec.blocks.classes],
        "label": describe(spec.blocks),
        "time_us": round(seconds * 1e6, 1),
        "gb_per_s": round(num_bytes / seconds / 1e9, 1),
        "tflop_per_s": round(case.flops / seconds / 1e12, 1),
        "max_abs_error": error,
        "num_iterations": num_iterations,
    }


def run_case(case: Case, copy_rate: float) -> list[dict[str, Any]]:
    """Results of a case, best first."""
    inputs = make_inputs(case, _DTYPE.value, _SEED.value)
    attend, rest, _ = attention(case, inputs, "xla", None)
    expected = jax.jit(attend)(inputs.device[0], *rest)
    one = functools.partial(measure, case, inputs, _BACKEND.value, expected=expected, copy_rate=copy_rate)
    results = [one(None)]
    if _SWEEP.value and results[0]["blocks"]:
        spec = attention(case, inputs, _BACKEND.value, None)[2]
        for blocks in block_variants(case, spec):
            try:
                results.append(one(blocks))
            except (jax.errors.JaxRuntimeError, MismatchError) as error:  # too much shared memory, say
                print(f"{case.name} {describe(blocks)}: {str(error).splitlines()[0][:150]}", flush=True)
    return sorted(results, key=lambda result: result["time_us"])


def main() -> int:
    """Prints results case by case, then the document."""
    on_gpu = jax.default_backend() == "gpu"
    names = _CASES.value or (["all"] if on_gpu else ["tiny"])
    names = list(CASES) if names == ["all"] else names
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        raise AttentionArgumentError("--cases", unknown, f"known are {sorted(CASES)}")
    if _BACKEND.value.startswith("pallas") and not on_gpu:
        raise AttentionArgumentError("--backend", _BACKEND.value, "needs a GPU; give xla or auto")
    copy_rate = copy_bandwidth(2 << 30 if on_gpu else 32 << 20, _REPEATS.value)
    device = jax.devices()[0]
    print(f"{device.device_kind}: copy {copy_rate / 1e9:.0f} GB/s, {_DTYPE.value}")
    print(f"{'case':28} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'error':>8}  blocks")
    results = []
    for name in names:
        try:
            of_case = run_case(CASES[name], copy_rate)
        except MismatchError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_FAILED
        for result in of_case:
            results.append(result)
            print(
                f"{name:28} {result['time_us']:9.1f} {result['gb_per_s']:7.0f} {result['tflop_per_s']:8.1f} "
                f"{result['max_abs_error']:8.1e}  {result['backend']} {result['label']}",
                flush=True,
            )
    print(json.dumps(document(device, copy_rate, results)))
    return 0


def document(device: jax.Device, copy_rate: float, results: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured, in what units, where and how."""
    units = {"time_us": "median microseconds a call", "gb_per_s": "1e9 byte/s", "tflop_per_s": "1e12 FLOP/s"}
    return {
        "benchmark": "ragged_paged_attention",
        "command": " ".join(sys.argv),
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "versions": {"jax": jax.__version__, "numpy": np.__version__, "python": sys.version.split()[0]},
        "dtype": _DTYPE.value,
        "copy_gb_per_s": round(copy_rate / 1e9, 1),
        "units": units,
        "results": results,
    }


if __name__ == "__main__":
    run(main)
