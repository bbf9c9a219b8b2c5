"""Times matrix products of few rows with a layer's weights: the Hopper kernel in several sizes, and XLA.

    python -m pensieve_lab.programs.benchmark_decode_matmul --json=decode_matmul.json

Each projection of a layer (`--model`, a preset) is timed at each of `--rows`. The calls alternate between
more copies of the weights than fit into a cache. Times are those of all kernels of a product, from a trace:
medians in microseconds, with the weights' bytes per second. Answers are checked against XLA's. A GPU that
supports the kernel is needed. The fastest program is printed before the last line, which is one JSON
document. Exit status 1 if an answer is wrong.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax.sharding import AbstractMesh

from model_defs import PRESETS, ModelConfig
from model_defs.errors import ShardingError
from model_defs.sharding import TENSOR_AXIS, check_divides
from pallas_kernels.decode_matmul import MAX_ROWS, MatmulTile, decode_matmul, default_tile, device_limit
from pallas_kernels.decode_matmul.tiles import has_supported_rows
from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document
from pensieve_lab.common.list_flags import numbers
from pensieve_lab.kernels.matmul_tiles import tiles
from pensieve_lab.kernels.projections import Projection, projections
from pensieve_lab.kernels.timing import KERNEL_ERRORS, compiling
from pensieve_lab.steps.device_trace import trace_kernels

FLAGS = flags.FLAGS
_MIN_BYTES = 300_000_000  # total size of the weights' copies: six times the cache of an H100
_MAX_COPIES = 64  # limit for tiny models, whose weights stay in the cache
_NUM_INPUTS = 4
# For sums of some thousand products with their rounding.
_TOLERANCE = 2e-2


class Variant(NamedTuple):
    """Implementation of a product.

    Attributes:
      tile: tile of the kernel; None means XLA.
      is_default: whether the kernel chooses this tile by default.
    """

    tile: MatmulTile | None = None
    is_default: bool = False

    @property
    def label(self) -> str:
        """Columns and stages, then the block's depth if it is not the usual one."""
        if self.tile is None:
            return "xla"
        depth = f"k{self.tile.block_k}" * (self.tile.block_k != MatmulTile.block_k)
        return f"{self.tile.columns}x{self.tile.num_stages}{depth}{' (default)' * self.is_default}"

    def product(self, *, gated: bool) -> Callable[..., jax.Array]:
        """Return the function of x and the weights."""
        backend = "xla" if self.tile is None else "pallas_mosaic_gpu"
        return functools.partial(decode_matmul, gated=gated, backend=backend, tile=self.tile)


def variants(what: Projection, num_rows: int) -> list[Variant]:
    """Return XLA, the default tile, and other tiles that divide the product."""
    sizes = (num_rows, what.depth, what.width)
    default = default_tile(*sizes, gated=what.gated)
    tried = dict.fromkeys((*([] if default is None else [default]), *tiles(*sizes, gated=what.gated)))
    return [Variant(), *(Variant(tile, is_default=tile == default) for tile in tried)]


def measure(what: Projection, num_rows: int, pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """Measure the variants of a product; return figures for each."""
    copies = min(max(2, -(-_MIN_BYTES // what.num_bytes)), _MAX_COPIES)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    xs = [normal(jax.random.key(i), (num_rows, what.depth)) for i in range(_NUM_INPUTS)]
    ws = [0.02 * normal(jax.random.key(100 + i), (what.depth, what.num_columns)) for i in range(copies)]
    futures = {
        variant: compiling(
            pool, functools.partial(jax.jit(variant.product(gated=what.gated)).lower, xs[0], ws[0])
        )
        for variant in variants(what, num_rows)
    }
    found, expected = [], None
    for variant, future in futures.items():
        figures: dict[str, Any] = {"projection": what.name, "rows": num_rows, "program": variant.label}
        try:
            program = future.result()
        except KERNEL_ERRORS as error:  # continue with the others
            figures |= {"is_right": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        else:
            answer = program(xs[0], ws[0]).astype(jnp.float32)
            expected = answer if expected is None else expected
            error_of = jnp.max(jnp.abs(answer - expected)) / jnp.max(jnp.abs(expected))
            figures |= {"error": float(error_of), "is_right": bool(error_of < _TOLERANCE)}
            figures |= _time(functools.partial(_run_all, program, xs, ws), len(xs) * len(ws), what.num_bytes)
        print(figures, flush=True)
        found.append(figures)
    return found


def _run_all(program: Callable[..., jax.Array], xs: list[jax.Array], ws: list[jax.Array]) -> None:
    jax.block_until_ready([program(x, w) for x in xs for w in ws])


def _time(run_all: Callable[[], None], num_products: int, num_bytes: int) -> dict[str, Any]:
    """Return the medians of each kernel of a product, and their sum."""
    run_all()
    durations = defaultdict(list)
    for kernel in trace_kernels(run_all):
        durations[kernel.name].append(1e-3 * kernel.duration_ns)
    by_kernel = {name: statistics.median(us) * len(us) / num_products for name, us in durations.items()}
    total = sum(by_kernel.values())
    return {"us": total, "tb_per_s": 1e-6 * num_bytes / total if total else None, "kernels_us": by_kernel}


def fastest(measurements: list[dict[str, Any]]) -> list[str]:
    """Return a line per projection and number of rows with the fastest correct variant."""
    groups = defaultdict(list)
    for one in measurements:
        if one["is_right"] and one["us"]:
            groups[one["projection"], one["rows"]].append(one)
    lines = []
    for (projection, rows), group in groups.items():
        best = min(group, key=lambda one: one["us"])
        speed = f"{best['us']:.1f} us, {best['tb_per_s']:.2f} TB/s"
        lines.append(f"fastest: {projection}, {rows} rows: {best['program']}, {speed}")
    return lines


def main() -> int:
    """Print a line per program, the fastest ones, then the document."""
    what_is_timed, results = chosen(PRESETS[FLAGS.model]), []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for rows, what in what_is_timed:
            results += measure(what, rows, pool)
    for line in fastest(results):
        print(line)
    units = {"us": "us", "tb_per_s": "10^12 bytes of weights a second"}
    document = {
        "model": FLAGS.model,
        "tensor_parallel_size": FLAGS.tensor_parallel_size,
        "measurements": results,
    }
    print_document(json_line("decode_matmul", document, units=units, device=device_name()))
    return 0 if all(result["is_right"] for result in results) else EXIT_FAILED


def chosen(model: ModelConfig) -> list[tuple[int, Projection]]:
    """Parse rows and projections; raises ConfigError, also if the device does not support the kernel."""
    found = numbers("--rows", FLAGS.rows, at_most=MAX_ROWS)
    if not found or not all(map(has_supported_rows, found)):
        limit = f"1 to 8, or multiples of 8 up to {MAX_ROWS}, one or more"
        raise ConfigError("--rows", ",".join(FLAGS.rows), limit)
    num_devices = FLAGS.tensor_parallel_size
    try:
        check_divides(model, AbstractMesh((num_devices,), (TENSOR_AXIS,)))
    except ShardingError as error:
        raise ConfigError("--tensor_parallel_size", num_devices, str(error)) from error
    if (reason := device_limit(jax.devices()[0])) is not None:
        raise ConfigError("device", jax.devices()[0].device_kind, f"one that the kernel runs on: {reason}")
    return [(rows, what) for rows in found for what in projections(model, num_devices)]


def define_flags() -> None:
    flags.DEFINE_enum("model", "llama2-13b-gqa10", list(PRESETS), "Preset with the projections to time.")
    flags.DEFINE_integer("tensor_parallel_size", 1, "Number of devices that share a layer.", lower_bound=1)
    flags.DEFINE_list("rows", ["128", "32"], "Numbers of rows of x: 1 to 8, or multiples of 8 up to 128.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
