"""Times products of few rows with a layer's weights: the Hopper kernel in several sizes, and XLA.

    python scripts/benchmark_decode_matmul.py --json=decode_matmul.json

Each of a layer's projections (`--model`, a preset) at each of `--rows`. Copies of the weights take turns,
more of them than a cache holds. Times are those of the kernels alone, as a trace has them, of all kernels
that a product takes: medians, in microseconds, and beside them the bytes of the weights a second. Answers are
checked against XLA's. The last line is one JSON document. Exit status 1 if an answer is wrong.
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
from kernels.timing import KERNEL_ERRORS, compiling
from steps.device_trace import trace_kernels

from model_defs import PRESETS, ModelConfig
from pallas_kernels.decode_matmul import MatmulTile, decode_matmul, default_tile
from pallas_kernels.decode_matmul.tiles import ROWS
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document

FLAGS = flags.FLAGS
_MIN_BYTES = 300_000_000  # of copies of the weights: six times the cache of an H100
_NUM_INPUTS = 4
# Of sums of some thousand products, and their rounding.
_TOLERANCE = 2e-2
_TRIED = {  # by whether it is gated, and whether one warpgroup multiplies, beside more blocks of weights
    (True, False): (
        MatmulTile(128, 3), MatmulTile(128, 3, 2), MatmulTile(128, 4), MatmulTile(128, 4, 2),
        MatmulTile(64, 6, 2), MatmulTile(64, 6, 4),
    ),
    (True, True): (
        MatmulTile(128, 3), MatmulTile(128, 4), MatmulTile(128, 5), MatmulTile(128, 5, 2), MatmulTile(64, 9),
        MatmulTile(64, 4),
    ),
    (False, False): (
        MatmulTile(64, 8, 4), MatmulTile(64, 8, 8), MatmulTile(64, 8, 2), MatmulTile(64, 8),
        MatmulTile(128, 4),
    ),
    (False, True): (
        MatmulTile(64, 8, 4), MatmulTile(64, 13, 4), MatmulTile(64, 13, 2), MatmulTile(64, 13),
        MatmulTile(64, 13, 8), MatmulTile(64, 10, 4), MatmulTile(64, 10),
    ),
}  # fmt: skip


class Projection(NamedTuple):
    """One of a layer's products."""

    name: str
    depth: int
    width: int
    gated: bool = False

    @property
    def num_columns(self) -> int:
        """Of the weights."""
        return self.width * (1 + self.gated)

    @property
    def num_bytes(self) -> int:
        """Of the weights, in 16 bits."""
        return 2 * self.depth * self.num_columns


def projections(model: ModelConfig, num_devices: int) -> list[Projection]:
    """Of a gated decoder's layer, the part of one of `num_devices`."""
    heads, kv_heads = (num // num_devices * model.head_dim for num in (model.num_heads, model.num_kv_heads))
    wide = model.intermediate_size // num_devices
    return [
        Projection("gate and up", model.hidden_size, wide, gated=True),
        Projection("down", wide, model.hidden_size),
        Projection("qkv", model.hidden_size, heads + 2 * kv_heads),
        Projection("out", heads, model.hidden_size),
    ]


def programs(what: Projection, num_rows: int) -> dict[str, Callable[..., jax.Array]]:
    """XLA first, then the default tile, then others that divide it."""
    product = functools.partial(decode_matmul, gated=what.gated)
    found: dict[str, Callable[..., jax.Array]] = {"xla": functools.partial(product, backend="xla")}
    default = default_tile(num_rows, what.depth, what.width, gated=what.gated)
    for tile in dict.fromkeys((default, *_TRIED[what.gated, num_rows <= ROWS[0]])):
        if tile is not None and tile.divides(what.depth, what.width):
            label = f"{tile.columns}x{tile.num_stages}" + f"c{tile.cluster}" * (tile.cluster > 1)
            label += " (default)" * (tile == default)
            found[label] = functools.partial(product, backend="pallas_mosaic_gpu", tile=tile)
    return found


def measure(what: Projection, num_rows: int, pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """A figure for each program."""
    copies = max(2, -(-_MIN_BYTES // what.num_bytes))
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    xs = [normal(jax.random.key(i), (num_rows, what.depth)) for i in range(_NUM_INPUTS)]
    ws = [0.02 * normal(jax.random.key(100 + i), (what.depth, what.num_columns)) for i in range(copies)]
    futures = {
        name: compiling(pool, functools.partial(jax.jit(fn).lower, xs[0], ws[0]))
        for name, fn in programs(what, num_rows).items()
    }
    found, expected = [], None
    for name, future in futures.items():
        figures: dict[str, Any] = {"projection": what.name, "rows": num_rows, "program": name}
        try:
            program = future.result()
        except KERNEL_ERRORS as error:  # the others have their turn
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
    """Medians of each kernel of a product, and their sum."""
    run_all()
    durations = defaultdict(list)
    for kernel in trace_kernels(run_all):
        durations[kernel.name].append(1e-3 * kernel.duration_ns)
    by_kernel = {name: statistics.median(us) * len(us) / num_products for name, us in durations.items()}
    total = sum(by_kernel.values())
    return {"us": total, "tb_per_s": 1e-6 * num_bytes / total if total else None, "kernels_us": by_kernel}


def main() -> int:
    """Prints a line for each program, then the document."""
    model, results = PRESETS[FLAGS.model], []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for rows in map(int, FLAGS.rows):
            for what in projections(model, FLAGS.tensor_parallel_size):
                results += measure(what, rows, pool)
    units = {"us": "us", "tb_per_s": "10^12 bytes of weights a second"}
    document = {
        "model": FLAGS.model,
        "tensor_parallel_size": FLAGS.tensor_parallel_size,
        "measurements": results,
    }
    print_document(json_line("decode_matmul", document, units=units, device=device_name()))
    return 0 if all(result["is_right"] for result in results) else EXIT_FAILED


def define_flags() -> None:
    """The command line."""
    gated = [name for name, config in PRESETS.items() if config.mlp_bias is False]
    flags.DEFINE_enum("model", "llama2-13b-gqa10", gated, "Preset whose projections are timed.")
    flags.DEFINE_integer("tensor_parallel_size", 1, "Devices that a layer is split over.", lower_bound=1)
    flags.DEFINE_list("rows", ["128", "32"], "Rows of x, at most 128.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
