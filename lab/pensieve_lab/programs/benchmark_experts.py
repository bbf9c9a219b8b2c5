"""Times the experts of a layer, from the router to the sum, against the bound of reading and multiplying.

    python -m pensieve_lab.programs.benchmark_experts --json=experts.json

Each of `--models` (presets with experts) is timed at each of `--tokens`. The calls alternate between inputs
that choose other experts. Times are those of all kernels, from a trace: medians in microseconds. The bound is
the longer of two times: reading the weights of the chosen experts once, and multiplying the rows, without
padding. Answers are checked against XLA's. `--sweep` also times other tiles. A GPU that supports the kernel
is needed. The last line is one JSON document. Exit status 1 if an answer is wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax

from model_defs import PRESETS, ExpertsConfig, ModelConfig
from model_defs.experts import choose_experts
from pallas_kernels.grouped_matmul import (
    ExpertTile,
    Products,
    block_rows,
    default_products,
    device_limit,
    expert_mlp,
    with_long_ring,
)
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
from pensieve_lab.kernels.timing import KERNEL_ERRORS, compiling
from pensieve_lab.steps.device_trace import trace_kernels

FLAGS = flags.FLAGS
READ_BYTES_PER_S, FLOP_PER_S = 4.5e12, 8e14  # measured on H200s: reading alone, and products in 16 bits
_NUM_INPUTS, _NUM_ROUNDS = 6, 3
_TOLERANCE = 2e-2
_COLUMNS = ("model", "tokens", "experts", "tiles", "us", "products, us", "bound, us", "% of the bound")


class Case(NamedTuple):
    """Experts of one preset, and a number of tokens."""

    model: str
    hidden_size: int
    experts: ExpertsConfig
    num_tokens: int

    @property
    def default(self) -> Products:
        """The tiles that the kernel chooses."""
        found = default_products(self.block_rows, self.hidden_size, self.experts.width)
        assert found is not None
        return found

    @property
    def block_rows(self) -> int:
        """Rows of a block by default."""
        return block_rows(self.num_tokens * self.experts.num_chosen, self.experts.num_experts)

    def bound_s(self, num_read: float) -> float:
        """Return the bound of a call that reads `num_read` experts."""
        per_expert = 3 * self.hidden_size * self.experts.width
        num_rows = self.num_tokens * self.experts.num_chosen
        return max(2 * per_expert * num_read / READ_BYTES_PER_S, 2 * per_expert * num_rows / FLOP_PER_S)


def cases(models: list[str], tokens: tuple[int, ...]) -> list[Case]:
    """Return all cases; raises ConfigError for a preset without experts."""
    found = []
    for name in models:
        config: ModelConfig | None = PRESETS.get(name)
        if config is None or config.experts is None:
            having = ", ".join(name for name, one in PRESETS.items() if one.experts is not None)
            raise ConfigError("--models", name, f"presets with experts: {having}")
        found += [Case(name, config.hidden_size, config.experts, num) for num in tokens]
    return found


def variants(case: Case, *, sweep: bool) -> Iterator[Products]:
    """Yield the default tiles, and with `sweep` others that divide the experts and fit, once each."""
    default = case.default
    yield default
    if not sweep:
        return
    rows = (case.block_rows // 2, case.block_rows, 2 * case.block_rows)
    for size, columns, depth in itertools.product(rows, (64, 128), (64, 128)):
        tiles = []
        for chosen, gated in ((default.gate_up, True), (default.down, False)):
            tile = ExpertTile(size, columns, 2, chosen.swapped, depth)
            tiles.append(with_long_ring(tile, gated=gated))
        found = Products(*tiles)
        if found != default and _is_possible(case, found):
            yield found


def _is_possible(case: Case, products: Products) -> bool:
    sizes = case.hidden_size, case.experts.width
    return (
        products.gate_up.fits(gated=True)
        and products.down.fits(gated=False)
        and products.gate_up.divides(*sizes)
        and products.down.divides(*sizes[::-1])
    )


def label(products: Products) -> str:
    """Return rows, columns, depth and stages of both tiles."""
    swapped = " swapped" if products.down.swapped else ""
    sizes = [f"{tile.columns}x{tile.block_k}x{tile.num_stages}" for tile in products]
    return f"{products.down.rows}{swapped} {' '.join(sizes)}"


def program(case: Case, products: Products | None) -> jax.stages.Wrapped:
    """Return the layer's function of x, the router and the weights; without tiles it is XLA's."""
    backend = "xla" if products is None else "pallas_mosaic_gpu"

    def layer(x: jax.Array, router: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
        choices = choose_experts(_logits(x, router), case.experts)
        return expert_mlp(x, *choices, gate_up, down, backend=backend, products=products)

    return jax.jit(layer)


def _logits(x: jax.Array, router: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32), router.astype(jnp.float32).T
    return jnp.matmul(*wide, precision=lax.Precision.HIGHEST)


class Arrays(NamedTuple):
    """Inputs and weights of a case."""

    xs: list[jax.Array]
    router: jax.Array
    gate_up: jax.Array
    down: jax.Array

    @classmethod
    def draw(cls, case: Case) -> Arrays:
        """Draw them on the device."""
        experts, hidden = case.experts, case.hidden_size
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        keys = jax.random.split(jax.random.key(0), 3 + _NUM_INPUTS)
        num, width = experts.num_experts, experts.width
        return cls(
            [normal(key, (case.num_tokens, hidden)) for key in keys[3:]],
            normal(keys[0], (num, hidden)) * hidden**-0.5,
            normal(keys[1], (num, 2, width, hidden)) * hidden**-0.5,
            normal(keys[2], (num, hidden, width)) * width**-0.5,
        )

    def num_read(self, config: ExpertsConfig) -> float:
        """Return the mean number of distinct experts over the inputs."""
        chosen = [choose_experts(_logits(x, self.router), config)[0] for x in self.xs]
        return statistics.fmean(len(np.unique(np.asarray(one))) for one in chosen)


def measure(case: Case, pool: ThreadPoolExecutor, *, sweep: bool) -> list[dict[str, Any]]:
    """Measure the variants of a case; return figures for each."""
    arrays, weights_of = Arrays.draw(case), lambda arrays: (arrays.router, arrays.gate_up, arrays.down)
    num_read = arrays.num_read(case.experts)
    given = arrays.xs[0], *weights_of(arrays)
    futures = {
        products: compiling(pool, functools.partial(program(case, products).lower, *given))
        for products in variants(case, sweep=sweep)
    }
    expected = program(case, None)(*given).astype(jnp.float32)
    found = []
    for products, future in futures.items():
        figures: dict[str, Any] = {"model": case.model, "tokens": case.num_tokens, "experts_read": num_read}
        figures |= {"tiles": label(products), "is_default": products == case.default}
        try:
            compiled = future.result()
            answer = compiled(*given).astype(jnp.float32)
        except KERNEL_ERRORS as error:  # continue with the others
            figures |= {"is_right": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        else:
            error_of = jnp.max(jnp.abs(answer - expected)) / jnp.max(jnp.abs(expected))
            figures |= {"error": float(error_of), "is_right": bool(error_of < _TOLERANCE)}
            figures |= {"bound_us": 1e6 * case.bound_s(num_read)}
            figures |= _time(functools.partial(_run_all, compiled, arrays))
        print(figures, flush=True)
        found.append(figures)
    return found


def _run_all(compiled: Callable[..., jax.Array], arrays: Arrays) -> None:
    weights = arrays.router, arrays.gate_up, arrays.down
    jax.block_until_ready([compiled(x, *weights) for _ in range(_NUM_ROUNDS) for x in arrays.xs])


def _time(run_all: Callable[[], None]) -> dict[str, Any]:
    """Return the medians of each kernel of a call, their sum, and the sum of the two products."""
    run_all()
    durations = defaultdict(list)
    for kernel in trace_kernels(run_all):
        durations[kernel.name].append(1e-3 * kernel.duration_ns)
    num_calls = _NUM_INPUTS * _NUM_ROUNDS
    by_kernel = {name: statistics.median(us) * len(us) / num_calls for name, us in durations.items()}
    products = sum(us for name, us in by_kernel.items() if "grouped_matmul" in name)
    return {"us": sum(by_kernel.values()), "products_us": products, "kernels_us": by_kernel}


def rows(measurements: list[dict[str, Any]]) -> list[list[Any]]:
    """Return a table row for each correct measurement that was timed."""
    return [
        [
            *(one["model"], one["tokens"], f"{one['experts_read']:.1f}"),
            one["tiles"] + " (default)" * one["is_default"],
            *(f"{one[name]:.1f}" for name in ("us", "products_us", "bound_us")),
            f"{100 * one['bound_us'] / one['us']:.0f}",
        ]
        for one in measurements
        if one["is_right"] and one["us"]
    ]


def main() -> int:
    """Print a line per program, a table, then the document."""
    tokens = numbers("--tokens", FLAGS.tokens, at_most=65536)
    what_is_timed = cases(FLAGS.models, tokens)
    if (reason := device_limit(jax.devices()[0])) is not None:
        raise ConfigError("device", jax.devices()[0].device_kind, f"one that the kernel runs on: {reason}")
    results: list[dict[str, Any]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in what_is_timed:
            results += measure(case, pool, sweep=FLAGS.sweep)
    print(table(list(_COLUMNS), rows(results)))
    units = {"us, products_us, bound_us, kernels_us": "microseconds of a call; the two products alone; bound"}
    document = {
        "cases": [case._asdict() | {"experts": dataclasses.asdict(case.experts)} for case in what_is_timed],
        "read_bytes_per_s": READ_BYTES_PER_S,
        "flop_per_s": FLOP_PER_S,
        "measurements": results,
    }
    print_document(json_line("experts", document, units=units, device=device_name()))
    return 0 if all(result["is_right"] for result in results) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_list("models", ["qwen3-30b-a3b", "mixtral-8x7b"], "Presets with the experts to time.")
    flags.DEFINE_list("tokens", ["1", "8", "32", "128", "512", "2048"], "Numbers of tokens.")
    flags.DEFINE_bool("sweep", False, "Whether to time other tiles besides the default ones.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
