"""Cost to the device, and savings on the link, of packing chunks on their way to host memory.

    python -m pensieve_lab.programs.benchmark_packing --model=random:llama2-13b-gqa10 --dtype=bfloat16 --trace
    python -m pensieve_lab.programs.benchmark_packing --model=random:llama2-13b-gqa10 --kernels_only

Batches of chunks, plain and packed, move between the pages of one runner and pinned host memory:
- gathers and scatters alone, and with the copies that follow or precede them, several in a row;
- the same during decode steps, one batch per step, against the steps alone.
`--kernels_only` leaves this out. It only times the kernels on one group of layers' pools with several splits
(`kernels/packing_variants.py`), in a minute.

`--trace` adds the device's activity in each, kernel by kernel. Pages hold normal random numbers. Before
timing, every batch goes to the host and back, and must be unchanged. Compared variants alternate in one
process; figures are medians. The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh

from pensieve_jax import ConfigError, EngineConfig
from pensieve_jax.assembly import Assembled
from pensieve_jax.commands.engine_flags import (
    TINY_MODEL,
    define_engine_flags,
    engine_config,
    model_limits,
    open_parts,
    refuse_sizes,
    shows_progress,
)
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.device.weights import ProgressBar
from pensieve_jax.device.kv_storage import KVStorage, num_layer_groups_on, read_page
from pensieve_jax.device.row_steps import RowSteps, StepRow, Timed
from pensieve_jax.device.transfers.copy_batches import copy_arrays
from pensieve_jax.device.transfers.page_copies import PageCopies
from pensieve_jax.runtime.compilation import compile_all
from pensieve_lab.common.spread import Spread
from pensieve_lab.kernels.packing_variants import Shape, measure_variants, rows_of
from pensieve_lab.steps.device_trace import summary, trace_kernels

FLAGS = flags.FLAGS
Figures = dict[str, Any]
_BUCKET_STEP = 16
_NUM_TRACED = 5


class Batch:
    """Chunks of one form between the first pages of a runner and host memory.

    Attributes:
      storage: storage format of the chunks.
    """

    def __init__(self, parts: Assembled, num_chunks: int, *, packed: bool) -> None:
        """Compile the copies, and check that they preserve the chunks."""
        runner, config = parts.runner, parts.config
        mesh, num_groups = runner.storage.sharding.mesh, len(runner.storage.groups)
        assert isinstance(mesh, Mesh)
        cache = dataclasses.replace(config.cache, pack_host=packed)
        self.storage = KVStorage(parts.model_config, cache, runner.dtype, mesh, num_groups)
        self._runner, self._pages = runner, list(range(1, num_chunks + 1))
        self._copies = PageCopies(self.storage, runner.device_pools, num_chunks)
        for _ in compile_all(self._copies.jobs()):
            pass
        self._check()

    def gather(self) -> list[jax.Array]:
        """Gather into staging; return the pieces by chunk and group of layers."""
        return [piece for chunk in self._copies.gather(self._pages) for piece in chunk.pieces]

    def gather_and_copy(self) -> list[jax.Array]:
        """Gather and copy to pinned host memory."""
        return copy_arrays(self.gather(), self.storage.host_sharding)

    def scatter(self, staged: list[jax.Array]) -> None:
        """Write staged pieces back to their pages; wait for the pools to wait for this."""
        targets = self._copies.stage(self._pages)
        num_groups = len(self.storage.groups)
        for group in range(num_groups):
            self._copies.scatter(group, staged[group::num_groups], targets)

    def copy_and_scatter(self, pinned: list[jax.Array]) -> None:
        """Copy from pinned host memory and scatter."""
        self.scatter(copy_arrays(pinned, self.storage.sharding))

    def operations(self) -> dict[str, Callable[[], Any]]:
        """Return the timed operations by name."""
        staged, pinned = self.gather(), self.gather_and_copy()
        return {
            "gather": self.gather,
            "gather and copy": self.gather_and_copy,
            "scatter": lambda: self.scatter(staged),
            "copy and scatter": lambda: self.copy_and_scatter(pinned),
        }

    def _check(self) -> None:
        before = [_bits(read_page(self._runner.pools, page)) for page in self._pages]
        assert not any(chunk.is_lost for chunk in self._copies.gather(self._pages)), "random numbers overflow"
        self.copy_and_scatter(self.gather_and_copy())
        after = [_bits(read_page(self._runner.pools, page)) for page in self._pages]
        assert all(map(np.array_equal, before, after)), "a chunk changed on its way to the host and back"


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def sized_config() -> EngineConfig:
    """Return the flags' engine with pages for the decodes and for a batch; raises ConfigError."""
    refuse_sizes("pack_host")
    config = engine_config()
    chunk, decodes = config.cache.chunk_tokens, FLAGS.num_decodes
    num_tokens = -(-(decodes + chunk) // _BUCKET_STEP) * _BUCKET_STEP
    bucket = -(-decodes // _BUCKET_STEP) * _BUCKET_STEP
    num_pages = max(decodes * -(-FLAGS.context_tokens // chunk), FLAGS.num_chunks)
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_running=decodes,
        max_num_rows=None,
        max_num_batched_tokens=num_tokens,
        token_buckets=tuple(sorted({bucket, num_tokens})),
        max_context_tokens=FLAGS.context_tokens,
    )
    return dataclasses.replace(
        config, cache=dataclasses.replace(config.cache, gpu_pages=num_pages), scheduler=scheduler
    )


def timed(parts: Assembled, name: str, operation: Callable[[], Any]) -> Timed:
    """Time a batch alone; after several scatters only the last one's pools exist to be waited for."""
    if "scatter" not in name:
        return Timed(operation, jax.block_until_ready)
    return Timed(operation, lambda _: jax.block_until_ready(parts.runner.pools))


def beside(step: Timed, operation: Callable[[], Any]) -> Timed:
    """Time a step with one batch before it, as in an engine, without a wait after the step's dispatch."""

    def launch() -> Any:
        moved = operation()
        return step.launch(), moved

    def wait(launched: Any) -> None:
        step.wait(launched[0])
        jax.block_until_ready(launched[1])

    return Timed(launch, wait)


def measure(timed: dict[str, Timed]) -> Figures:
    """Measure all in alternation, several times over; the first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in timed}
    with ProgressBar("batches", shows_progress()) as progress:
        for number in range(FLAGS.num_repeats + 1):
            for name, one in timed.items():
                samples[name].append(one.sample_s(FLAGS.num_launches))
            progress(number + 1, FLAGS.num_repeats + 1, "")
    found: Figures = {}
    for name, one in timed.items():
        found[name] = {"launch_s": Spread.of(samples[name][1:]).as_dict()}
        found[name]["dispatch_s"] = one.dispatch_s(FLAGS.num_launches)
        if FLAGS.trace:
            kernels = trace_kernels(
                functools.partial(one.sample_s, _NUM_TRACED - 1)
            )  # and the one before them
            found[name]["trace"] = summary(kernels, _NUM_TRACED)
    return found


def kernels_only() -> int:
    """Time the kernels alone, on the model's pages."""
    model, config = model_limits()[0], engine_config()
    num_pools = -(-model.num_layers // num_layer_groups_on(1, config.runner.num_layer_groups))
    shape = Shape(
        num_pools, config.cache.chunk_tokens, 2 * model.num_kv_heads, model.head_dim, FLAGS.num_chunks
    )
    found = measure_variants(shape, FLAGS.num_repeats)
    print(table(["one group of layers", "kernels, us", "launch, us"], rows_of(found)))
    document = {"model": FLAGS.model, "shape": shape._asdict(), "variants": found}
    units = {"*_s": "seconds per call, for one group of layers"}
    print_document(json_line("packing_kernels", document, units=units, device=device_name()))
    return 0


def main() -> int:
    if FLAGS.kernels_only:
        return kernels_only()
    config = sized_config()
    parts = open_parts(config)
    if parts.runner.dtype.name != "bfloat16" or config.cache.kv_dtype is not None:
        raise ConfigError("--dtype", FLAGS.dtype, "bfloat16, without --kv_dtype: only that is packed")
    steps = RowSteps(config, parts.runner, parts.model_config.vocab_size, FLAGS.num_decodes)
    steps.fill()
    rows = [StepRow(i, FLAGS.context_tokens - 1, FLAGS.context_tokens) for i in range(FLAGS.num_decodes)]
    batches = {name: Batch(parts, FLAGS.num_chunks, packed=name == "packed") for name in ("raw", "packed")}
    operations = {
        (form, name): operation
        for form, batch in batches.items()
        for name, operation in batch.operations().items()
    }
    alone = {f"{form}: {name}": timed(parts, name, one) for (form, name), one in operations.items()}
    step = steps.whole(steps.plan(rows, SamplingParams()))
    with_steps = {"steps alone": step} | {
        f"{form}: {name}": beside(step, one) for (form, name), one in operations.items() if "copy" in name
    }
    found = {"alone": measure(alone), "beside": measure(with_steps)}
    step_s = found["beside"]["steps alone"]["launch_s"]["median"]
    for one in found["beside"].values():
        one["extra"] = one["launch_s"]["median"] / step_s - 1
    parts.engine.close()
    report(parts, batches, found)
    return 0


def report(parts: Assembled, batches: dict[str, Batch], figures: Figures) -> None:
    """Print the tables and the JSON line."""
    for part, kinds in figures.items():
        rows = [
            [name, 1e3 * one["launch_s"]["median"], 1e3 * one["dispatch_s"], 100 * one.get("extra", 0.0)]
            for name, one in kinds.items()
        ]
        print(table([part, "median, ms", "host, ms", "extra, %"], rows))
    document = {
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "config": dataclasses.asdict(parts.config),
        "num_chunks": FLAGS.num_chunks,
        "num_decodes": FLAGS.num_decodes,
        "context_tokens": FLAGS.context_tokens,
        "slot_bytes": {form: batch.storage.slot_bytes for form, batch in batches.items()},
        **figures,
    }
    units = {"*_s": "seconds", "slot_bytes": "bytes of all devices", "extra": "share of the steps alone"}
    print_document(json_line("packing", document, units=units, device=device_name()))


def define_flags() -> None:
    flags.DEFINE_integer("num_chunks", 16, "Chunks per batch.", lower_bound=1)
    flags.DEFINE_integer("num_decodes", 128, "Sequences that decode during a batch.", lower_bound=1)
    flags.DEFINE_integer("context_tokens", 1024, "Context of each decoding sequence.", lower_bound=1)
    flags.DEFINE_integer("num_repeats", 7, "Number of samples of each figure.", lower_bound=1)
    flags.DEFINE_integer("num_launches", 20, "Launches per sample.", lower_bound=1)
    flags.DEFINE_bool("trace", False, "Also trace each operation.")
    flags.DEFINE_bool("kernels_only", False, "Time only the kernels, with several splits.")
    define_engine_flags(model=TINY_MODEL)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
