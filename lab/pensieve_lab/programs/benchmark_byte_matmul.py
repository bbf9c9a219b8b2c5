"""Times products of few rows with weights kept in 8 bits, beside the same with bfloat16 weights.

    python -m pensieve_lab.programs.benchmark_byte_matmul --json=byte_matmul.json

Each projection of a layer (`--model`, a preset) is timed at each of `--rows`. XLA and the kernel of
`decode_matmul` multiply with bfloat16. XLA and the kernel of `byte_matmul`, in several tiles, multiply with
each format of `--weights`. A call multiplies with more copies of the weights than fit into a cache, one after
the other in one program, so that host time does not count. Times are medians of a product in microseconds,
with the bytes of weights per second. Answers are compared with XLA's. A GPU on which the kernels run is
needed. The last line is one JSON document (see `--json`). Exit status 1 if an answer is wrong.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from model_defs import PRESETS
from pallas_kernels.byte_matmul import MAX_ROWS, ByteTile, byte_matmul, default_tile
from pallas_kernels.byte_matmul.tiles import has_supported_rows, most_stages
from pallas_kernels.decode_matmul import decode_matmul, device_limit
from pallas_kernels.decode_matmul import supports as serves_16_bits
from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import (
    define_document_flag,
    device_name,
    json_line,
    print_document,
    table,
)
from pensieve_lab.common.list_flags import numbers
from pensieve_lab.kernels.projections import Projection, projections
from pensieve_lab.kernels.timing import KERNEL_ERRORS, compiling

FLAGS = flags.FLAGS
_MIN_BYTES = 300_000_000  # total size of the weights' copies: six times the cache of an H100
_MAX_COPIES = 32
_NUM_REPEATS, _NUM_CALLS = 5, 10
# For sums of some thousand products with their rounding.
_TOLERANCE = 2e-2
_BFLOAT16 = "bfloat16"
WEIGHTS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


class Variant(NamedTuple):
    """Implementation of a product.

    Attributes:
      weights: "bfloat16" or a key of `WEIGHTS`.
      program: "xla", "kernel", or the columns and stages of a tile.
      tile: tile of the kernel for 8 bits; None elsewhere.
    """

    weights: str
    program: str
    tile: ByteTile | None = None

    def product(self, *, gated: bool) -> Callable[..., jax.Array]:
        """Return the function of x and the arrays of `copies`."""
        backend = "xla" if self.program == "xla" else "pallas_mosaic_gpu"
        if self.weights == _BFLOAT16:
            return functools.partial(decode_matmul, gated=gated, backend=backend)
        return functools.partial(byte_matmul, gated=gated, backend=backend, tile=self.tile)


def variants(what: Projection, num_rows: int, weights: list[str]) -> list[Variant]:
    """Return the variants of a product; XLA's comes first for each kind of weights."""
    found = [Variant(_BFLOAT16, "xla")]
    if serves_16_bits(num_rows, what.depth, what.width, gated=what.gated, dtype=jnp.bfloat16):
        found.append(Variant(_BFLOAT16, "kernel"))
    for name in weights:
        found.append(Variant(name, "xla"))
        found += [Variant(name, f"{tile.columns}x{tile.num_stages}", tile) for tile in tiles(what, num_rows)]
    return found


def tiles(what: Projection, num_rows: int) -> list[ByteTile]:
    """Return the default tile, and for both widths the deepest ring and one of half its stages."""
    found = [default_tile(num_rows, what.depth, what.width, gated=what.gated)]
    for columns in (64, 128):
        most = most_stages(columns, num_rows, gated=what.gated)
        found += [ByteTile(columns, stages) for stages in (most, most // 4 * 2)]
    fitting = [
        tile
        for tile in found
        if tile is not None and tile.divides(what.depth, what.width) and tile.fits(num_rows, gated=what.gated)
    ]
    return list(dict.fromkeys(fitting))


def copies(what: Projection, weights: str) -> list[tuple[jax.Array, ...]]:
    """Draw copies of the weights on the device: arrays of the product, after x."""
    size = 1 if weights != _BFLOAT16 else 2
    count = min(max(2, -(-_MIN_BYTES // (size * what.depth * what.num_columns))), _MAX_COPIES)
    keys = jax.random.split(jax.random.key(1), count)
    if weights == _BFLOAT16:
        shape = what.depth, what.num_columns
        return [(0.02 * jax.random.normal(key, shape, jnp.bfloat16),) for key in keys]
    shape = what.num_columns, what.depth
    scale = jnp.full(what.num_columns, 0.02 / 64, jnp.float32)
    return [
        (jax.random.randint(key, shape, -127, 128, jnp.int8).astype(WEIGHTS[weights]), scale) for key in keys
    ]


def measure(
    what: Projection, num_rows: int, weights: list[str], pool: ThreadPoolExecutor
) -> Iterator[dict[str, Any]]:
    """Measure the variants of a product; yield figures for each."""
    x = jax.random.normal(jax.random.key(0), (num_rows, what.depth), jnp.bfloat16)
    arrays: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    futures = {}
    for variant in variants(what, num_rows, weights):
        if variant.weights not in arrays:
            arrays[variant.weights] = copies(what, variant.weights)
        given = arrays[variant.weights]
        futures[variant] = compiling(pool, functools.partial(_all_of(variant, what).lower, x, given))
    for variant, future in futures.items():
        given = arrays[variant.weights]
        figures: dict[str, Any] = {"projection": what.name, "rows": num_rows}
        figures |= {"weights": variant.weights, "program": variant.program}
        figures["is_default"] = variant.tile is not None and variant.tile == default_tile(
            num_rows, what.depth, what.width, gated=what.gated
        )
        try:
            program = future.result()
            answer = program(x, given)[0].astype(jnp.float32)
        except KERNEL_ERRORS as error:  # continue with the others
            yield figures | {"is_right": False, "message": f"{type(error).__name__}: {str(error)[:300]}"}
            continue
        expected = answers.setdefault(variant.weights, answer)  # XLA's, which comes first
        error_of = float(jnp.max(jnp.abs(answer - expected)) / jnp.max(jnp.abs(expected)))
        us = 1e6 * _seconds(program, x, given) / len(given)
        num_bytes = (2 if variant.weights == _BFLOAT16 else 1) * what.depth * what.num_columns
        yield figures | {
            "error": error_of,
            "is_right": error_of < _TOLERANCE,
            "us": us,
            "tb_per_s": 1e-6 * num_bytes / us,
        }


def _all_of(variant: Variant, what: Projection) -> Any:
    """Return the jitted function of x and all copies of the weights."""
    product = variant.product(gated=what.gated)
    return jax.jit(lambda x, given: [product(x, *one) for one in given])


def _seconds(program: Callable[..., Any], x: jax.Array, given: list[tuple[jax.Array, ...]]) -> float:
    """Return the median time of a call, of several in a row."""
    samples = []
    for _ in range(_NUM_REPEATS + 1):  # the first warms up
        began_s = time.perf_counter()
        for _ in range(_NUM_CALLS):
            answers = program(x, given)
        jax.block_until_ready(answers)  # the device runs them in order
        samples.append((time.perf_counter() - began_s) / _NUM_CALLS)
    return statistics.median(samples[1:])


def chosen() -> tuple[list[tuple[int, Projection]], list[str]]:
    """Parse rows, projections and weights; raises ConfigError, also if the kernels do not run here."""
    rows = numbers("--rows", FLAGS.rows, at_most=MAX_ROWS)
    if not rows or not all(map(has_supported_rows, rows)):
        limit = f"1 to 8, or multiples of 8 up to {MAX_ROWS}, one or more"
        raise ConfigError("--rows", ",".join(FLAGS.rows), limit)
    weights = list(dict.fromkeys(FLAGS.weights))
    if not weights or not set(weights) <= set(WEIGHTS):
        raise ConfigError("--weights", ",".join(FLAGS.weights), f"one or more of {', '.join(WEIGHTS)}")
    if (reason := device_limit(jax.devices()[0])) is not None:
        raise ConfigError("device", jax.devices()[0].device_kind, f"one that the kernels run on: {reason}")
    return [(num, what) for num in rows for what in projections(PRESETS[FLAGS.model], 1)], weights


def main() -> int:
    """Print a table for each number of rows, then the document."""
    what_is_timed, weights = chosen()
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for rows, what in what_is_timed:
            found = list(measure(what, rows, weights, pool))
            lines = [
                [
                    one["weights"],
                    one["program"] + " (default)" * one["is_default"],
                    *([f"{one['us']:.1f}", f"{one['tb_per_s']:.2f}"] if "us" in one else ["-", "-"]),
                    "yes" if one["is_right"] else one.get("message", f"error {one.get('error')}"),
                ]
                for one in found
            ]
            print(f"{what.name}, {rows} rows")
            print(table(["weights", "program", "us", "TB/s", "right"], lines), flush=True)
            results += found
    units = {"us": "us", "tb_per_s": "10^12 bytes of weights a second"}
    document = {"model": FLAGS.model, "measurements": results}
    print_document(json_line("byte_matmul", document, units=units, device=device_name()))
    return 0 if all(one["is_right"] for one in results) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_enum("model", "llama2-13b-gqa10", list(PRESETS), "Preset with the projections to time.")
    flags.DEFINE_list("rows", ["1", "8", "32", "128"], "Rows of x: 1 to 8, or multiples of 8 up to 128.")
    flags.DEFINE_list("weights", ["int8"], f"Formats of weights in 8 bits: {', '.join(WEIGHTS)}.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
