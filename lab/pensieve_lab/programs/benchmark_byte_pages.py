"""Times attention over 8-bit pages: the Hopper kernels in several sizes, Triton's kernel, and bfloat16.

    python -m pensieve_lab.programs.benchmark_byte_pages --json=byte_pages.json

This is a shorter variant of `benchmark_kernels.py` for a device that is available for only two minutes: all
programs of a case are compiled at once, one executable each, on a thread per core. Answers are checked before
they are timed: whole against Triton's over the same pages, and one row against the dense reference. `fetch
alone` is the kernel without its arithmetic, which shows the speed of its copies; `kernel alone` leaves out
the launches for prompts and merges. For prompts, `unconverted` is the kernel without writing its operands,
which shows what that costs. The last line is one JSON document. Exit status 1 if an answer is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention import (
    BlockSizes,
    TileClass,
    build_tiles,
    byte_class,
    byte_prompt_class,
    mosaic_bytes,
    mosaic_convert,
)
from pallas_kernels.ragged_paged_attention.pallas_mosaic_gpu import mosaic_attention
from pallas_kernels.ragged_paged_attention.shapes import CASES
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document
from pensieve_lab.kernels.backends import backend_program, describe, make_spec
from pensieve_lab.kernels.cases import TOLERANCE, Inputs, dense_answer, largest_difference, make_inputs
from pensieve_lab.kernels.timing import KERNEL_ERRORS, JaxProgram, compiling

FLAGS = flags.FLAGS
MAIN = "decode_128x1024_gqa10"
OTHERS = ("decode_1x1024_gqa10", "decode_32x1024_gqa10", "decode_180x1024_gqa10", "decode_64x4096_gqa10")
PROMPTS = ("prefill_1x2048_gqa10", "prefill_5x150of7150_gqa10", "prefill_1x512of8512_gqa10")
MOSAIC, TRITON = "pallas_mosaic_gpu", "pallas_triton"
FETCH_ALONE, UNCONVERTED = "fetch alone", "unconverted"
_DTYPE = "bfloat16"
_UNROLLED, _ROUNDS = 8, 8
_DEFAULT = byte_class(8, 128, 2, 3, 256, 264)
# Variants to try, without a size class for the other kind (prompts or decoding).
_VARIANTS = {
    PROMPTS[0]: (
        byte_prompt_class(128, 64, 3, 1024, 264), byte_prompt_class(128, 128, 2, 1024, 264),
        byte_prompt_class(64, 128, 2, 1024, 264),
    ),
    MAIN: (
        _DEFAULT, byte_class(8, 64, 2, 6, 256, 264), byte_class(8, 64, 3, 3, 256, 396),
        byte_class(8, 128, 1, 6, 256, 132), byte_class(8, 128, 2, 2, 256, 264),
    ),
    "decode_1x1024_gqa10": (byte_class(8, 128, 2, 3, 128, 528), byte_class(8, 64, 2, 6, 64, 528)),
    "decode_32x1024_gqa10": (
        _DEFAULT, byte_class(8, 128, 2, 3, 256, 528), byte_class(8, 64, 2, 6, 128, 1056),
    ),
}  # fmt: skip


class Entry(NamedTuple):
    """Program to compile and time."""

    case: str
    name: str
    program: JaxProgram
    inputs: Inputs
    is_checked: bool = True


def _sizes(*classes: TileClass) -> BlockSizes:
    return BlockSizes(classes)


def entries_of(case_name: str, kv_dtype: str) -> list[Entry]:
    """Make the programs of a case, Triton's first: the others' answers are compared with its answer."""
    case = CASES[case_name]
    inputs = make_inputs(case, _DTYPE, 0, kv_dtype)
    plain = make_inputs(case, _DTYPE, 0)

    def entry(name: str, inputs: Inputs, backend: str, blocks: BlockSizes | None = None) -> Entry:
        label = describe(make_spec(case, _DTYPE, backend, blocks, inputs.kv_dtype).blocks)
        return Entry(case_name, f"{name} {label}", backend_program(inputs, backend, blocks), inputs)

    found = [entry(f"{kv_dtype} triton", inputs, TRITON), entry(f"{kv_dtype} default", inputs, MOSAIC)]
    found.append(entry(f"{_DTYPE} auto", plain, "auto"))
    found += [entry(f"{kv_dtype} tried", inputs, MOSAIC, _sizes(c)) for c in _VARIANTS.get(case_name, ())]
    if case_name == MAIN:
        found.append(_kernel_alone("kernel alone", inputs, _DEFAULT))
        found.append(_kernel_alone(FETCH_ALONE, inputs, byte_class(8, 128, 2, 3, 255, 264)))
    if case_name == PROMPTS[0]:
        found.append(_kernel_alone(UNCONVERTED, inputs, byte_prompt_class(128, 64, 3, 1023, 264)))
    return found


def _kernel_alone(name: str, inputs: Inputs, tile_class: TileClass) -> Entry:
    """Make an entry of the kernel's launch without the launches around it."""
    spec = make_spec(inputs.case, _DTYPE, MOSAIC, _sizes(tile_class), inputs.kv_dtype)
    kv_lens, _, cu_q_lens, num_seqs = inputs.rows
    tiles = jnp.asarray(build_tiles(spec, cu_q_lens, kv_lens, num_seqs))

    def attend(q: jax.Array, pool: jax.Array, tiles: jax.Array, pages: jax.Array) -> jax.Array:
        scale = inputs.sm_scale
        return mosaic_attention(
            spec, q, pool, pages, tiles, None, sm_scale=scale, sinks=None, interpret=False
        )[0]

    fixed = (inputs.pool, tiles, jnp.asarray(inputs.page_indices))
    program = JaxProgram(describe(spec.blocks), attend, (inputs.q,), fixed)
    is_checked = name not in (FETCH_ALONE, UNCONVERTED)
    return Entry(inputs.case.name, f"{name} {program.label}", program, inputs, is_checked)


def lowered(entry: Entry) -> Any:
    """Lower many calls in a row, since Python could only launch one at a time."""
    queries = [entry.program.tied[0]] * _UNROLLED
    with contextlib.ExitStack() as patches:
        if entry.name.startswith(FETCH_ALONE):
            patches.enter_context(mock.patch.object(mosaic_bytes, "add_block", _no_arithmetic))
        if entry.name.startswith(UNCONVERTED):
            patches.enter_context(mock.patch.object(mosaic_convert, "convert_rows", lambda *_: None))
        return entry.program.chained(_ROUNDS).lower(queries, *entry.program.fixed)


def _no_arithmetic(*args: Any, masked: bool) -> list[Any]:
    sums: list[Any] = args[-1]
    return sums


def measure(entry: Entry, compiled: Callable[..., Any], answers: dict[str, jax.Array]) -> dict[str, Any]:
    """Return the time of one call, and the answer's differences from the others'."""
    queries = [jnp.copy(entry.program.tied[0]) for _ in range(_UNROLLED)]
    out = compiled(queries, *entry.program.fixed)[0]
    found: dict[str, Any] = {"case": entry.case, "name": entry.name}
    if entry.is_checked:
        stored = f"{entry.case} {entry.inputs.kv_dtype}"
        tokens, dense = dense_answer(entry.inputs, int(entry.inputs.kv_lens.argmax()))
        differences = [largest_difference(out, answers.setdefault(stored, out))]
        differences.append(largest_difference(out[tokens], dense))
        found["max_error"] = float(np.max([float(x) for x in differences]))
        found["is_right"] = found["max_error"] < TOLERANCE[_DTYPE]
    samples = []
    for _ in range(FLAGS.repeats):
        began = time.perf_counter()
        jax.block_until_ready(compiled(queries, *entry.program.fixed))
        samples.append((time.perf_counter() - began) / (_UNROLLED * _ROUNDS))
    seconds = statistics.median(samples)
    rate = entry.inputs.work.num_bytes / seconds
    return found | {"us": 1e6 * seconds, "fastest_us": 1e6 * min(samples), "tb_per_s": 1e-12 * rate}


def main() -> int:
    """Print a line per program, then the document."""
    began = time.perf_counter()
    results: list[dict[str, Any]] = []
    for case in FLAGS.cases:
        entries, answers = entries_of(case, FLAGS.kv_dtype), dict[str, jax.Array]()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = [compiling(pool, functools.partial(lowered, entry)) for entry in entries]
            for entry, future in zip(entries, futures, strict=True):
                try:
                    results.append(measure(entry, future.result(), answers))
                except KERNEL_ERRORS as error:  # continue with the others
                    lines = str(error).splitlines() or [""]
                    failed = {"case": case, "name": entry.name, "is_right": False}
                    results.append(failed | {"error": f"{type(error).__name__}: {lines[0][:300]}"})
                print(f"{time.perf_counter() - began:6.1f} s", results[-1], flush=True)
        if time.perf_counter() - began > FLAGS.time_limit_s:
            print("the other cases are skipped: --time_limit_s is over", file=sys.stderr)
            break
    document = {"kv_dtype": FLAGS.kv_dtype, "measurements": results}
    print_document(json_line("byte_pages", document, units={"us": "us"}, device=device_name()))
    return 0 if all(result.get("is_right", True) for result in results) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_list("cases", [MAIN, *PROMPTS, *OTHERS], "Cases to time.")
    flags.DEFINE_enum("kv_dtype", "int8", KV_DTYPES, "Data type of pages.")
    flags.DEFINE_integer("repeats", 5, "Number of timed calls; the median is reported.", lower_bound=1)
    flags.DEFINE_float("time_limit_s", 80.0, "Start no case after this many seconds.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
