"""Times variants of the kernel for prompts behind long histories, in bfloat16 and `int8`, with predictions.

    python -m pensieve_lab.programs.benchmark_prompts --json=prompts.json

A variant is a compiled kernel and a rule by which its work is divided (`kernels/prompt_variants.py`). All
rules share a kernel's program, so that few programs are compiled, on a thread per core. Every answer is
compared before it is timed: whole with the first variant's of its pages, and the last tokens of the longest
row with the dense reference. Variants that fail are reported and do not stop the others; one that is wrong is
not timed. Times are medians of calls of about `--target_ms`, taken in turns so that a change of the clock
meets all. The last line is one JSON document. Exit status 1 if an answer is wrong or a kernel fails.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from pallas_kernels.ragged_paged_attention.shapes import GQA10, Case, draw_metadata
from pensieve_jax import ConfigError
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document
from pensieve_lab.kernels.cases import TOLERANCE, Inputs, dense_answer, largest_difference, make_inputs
from pensieve_lab.kernels.prompt_variants import (
    CUTS,
    KERNELS,
    describe,
    flop_of,
    function_of,
    predicted_us,
    spec_of,
    tiles_of,
)
from pensieve_lab.kernels.timing import KERNEL_ERRORS, compiling

FLAGS = flags.FLAGS
_DTYPE = "bfloat16"
_UNROLLED = 4
_MAX_PAGES = 689  # of a row: 22,048 tokens
# Query tokens and rows of a compiled program, and the cases that it serves as (query length, context).
_BUCKETS: dict[tuple[int, int], dict[str, tuple[tuple[int, int], ...]]] = {
    (512, 1): {"p512of8512": ((512, 8512),), "p512of20512": ((512, 20512),)},
    (2048, 1): {
        "p2048of22048": ((2048, 22048),),
        "p2048of4548": ((2048, 4548),),
        "p2048of2048": ((2048, 2048),),
    },
    (1024, 1): {"p1024of21024": ((1024, 21024),)},
    (8192, 4): {"p4x2048of2048": ((2048, 2048),) * 4, "p1x8192of8192": ((8192, 8192),)},
    (32, 20): {"d20of1024": ((1, 1024),) * 20, "d6of3000": ((1, 3000),) * 6},
}
_LARGEST = ((2048, 22048),)  # its pages are the pool
_NUM_DENSE_TOKENS = 32


class Batch(NamedTuple):
    """A case on the device."""

    name: str
    inputs: Inputs
    rows: tuple[np.ndarray, ...]  # kv_lens, page_indices, cu_q_lens and num_seqs, padded to the bucket
    expected: tuple[slice, np.ndarray]  # the dense reference's answer to some tokens


class Timed(NamedTuple):
    """A variant that is ready to be timed."""

    call: Callable[[int], Any]  # runs a number of rounds
    num_rounds: int
    result: dict[str, Any]


def make_batch(name: str, rows: tuple[tuple[int, int], ...], whole: Inputs, max_rows: int) -> Batch:
    """Draw pages for a case from the pool of `whole`, and take its first queries."""
    case = Case(name, rows, GQA10)
    rng = np.random.default_rng(FLAGS.seed)
    kv_lens, pages, cu_q_lens, num_seqs, _ = draw_metadata(case, rng, num_pages=whole.pool.shape[0])
    inputs = whole._replace(
        case=case, q=whole.q[: case.num_tokens], kv_lens=kv_lens, page_indices=pages, cu_q_lens=cu_q_lens
    )
    missing = max_rows - len(rows)
    padded = (
        np.pad(kv_lens, (0, missing)),
        np.pad(pages, ((0, missing), (0, _MAX_PAGES - pages.shape[1]))),
        np.pad(cu_q_lens, (0, missing), mode="edge"),
        num_seqs,
    )
    return Batch(name, inputs, padded, dense_answer(inputs, int(kv_lens.argmax()), _NUM_DENSE_TOKENS))


def chain_of(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Return a function that answers several queries, round after round, each round after the one before."""

    def chain(num_rounds: jax.Array, queries: list[jax.Array], *others: jax.Array) -> list[jax.Array]:
        def a_round(_: Any, outs: list[jax.Array]) -> list[jax.Array]:
            queries_again, outs = jax.lax.optimization_barrier((queries, outs))
            nothing = (outs[0][0, 0, 0] * 0).astype(jnp.int32)
            pool, tiles, *rows = others
            rows[1] = rows[1] + nothing  # so that nothing can be moved out of the loop
            found: list[jax.Array] = []
            for q in queries_again:
                # Tied to the query and to the answer before, so that no call shares another's decoded pages.
                own, q, *found = jax.lax.optimization_barrier((tiles, q, *found))
                found.append(attend(q, pool, own, *rows))
            return found

        return jax.lax.fori_loop(0, num_rounds, a_round, [jnp.zeros_like(q) for q in queries])

    return chain


def compile_all(
    pool: ThreadPoolExecutor, whole: dict[str | None, Inputs], began: float
) -> Iterator[tuple[str, tuple[int, int], Future[Any]]]:
    """Start to compile every kernel for every bucket, the kernels of `--kernels` in their order."""

    def lowering(name: str, bucket: tuple[int, int]) -> Callable[[], Any]:
        kernel, (num_tokens, max_rows) = KERNELS[name], bucket
        spec = spec_of(kernel, num_tokens=num_tokens, max_num_seqs=max_rows)

        def shape(*sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, jnp.int32)

        inputs = whole[kernel.kv_dtype]
        queries = [jax.ShapeDtypeStruct((num_tokens, *inputs.q.shape[1:]), _DTYPE)] * _UNROLLED
        rows = (shape(max_rows), shape(max_rows, _MAX_PAGES), shape(max_rows + 1), shape(1))
        chain = jax.jit(chain_of(function_of(spec)))

        return lambda: chain.lower(shape(), queries, inputs.pool, shape(spec.tiles_len), *rows)

    for bucket, cases in _BUCKETS.items():
        for name in FLAGS.kernels:
            if not set(FLAGS.cases or cases) & set(cases):
                continue
            if time.perf_counter() - began > FLAGS.compile_limit_s:
                print(f"not compiled because of --compile_limit_s: {name} {bucket}", flush=True)
                continue
            yield name, bucket, compiling(pool, lowering(name, bucket))


def prepare(
    name: str, bucket: tuple[int, int], compiled: Any, batch: Batch, answers: dict[str, jax.Array]
) -> Iterator[Timed]:
    """Check a kernel with every rule on a case, and yield what may be timed."""
    kernel = KERNELS[name]
    spec = spec_of(kernel, num_tokens=bucket[0], max_num_seqs=bucket[1])
    queries = [jnp.copy(batch.inputs.q) for _ in range(_UNROLLED)]
    seen: dict[bytes, str] = {}
    for cuts_name in FLAGS.cuts:
        tiles = tiles_of(kernel, spec, cuts_name, batch.rows)
        same = seen.setdefault(tiles.tobytes(), cuts_name)
        predicted = predicted_us(kernel, spec, tiles)
        found: dict[str, Any] = {"case": batch.name, "kernel": name, "cuts": cuts_name}
        found |= {"predicted_us": round(predicted, 1), "num_merges": int(tiles[len(spec.blocks.classes)])}
        if same != cuts_name:
            yield Timed(lambda _: None, 0, found | {"same_as": same})
            continue
        arguments = (batch.inputs.pool, jnp.asarray(tiles), *map(jnp.asarray, batch.rows))

        def call(num_rounds: int, arguments: Any = arguments) -> Any:
            return compiled(jnp.int32(num_rounds), queries, *arguments)

        out = jax.block_until_ready(call(1))[0]
        tokens, dense = batch.expected
        first = answers.setdefault(f"{batch.name} {kernel.kv_dtype}", out)
        differences = [largest_difference(out, first), largest_difference(out[tokens], dense)]
        found["max_error"] = float(np.max([float(x) for x in differences]))
        found["is_right"] = is_right = bool(found["max_error"] < TOLERANCE[_DTYPE])
        num_rounds = max(1, round(1e3 * FLAGS.target_ms / (predicted * _UNROLLED)))
        yield Timed(call, num_rounds if is_right else 0, found)


def measure(variants: list[Timed], work: float) -> None:
    """Time the variants of a case in turns, and write the results to them."""
    samples: list[list[float]] = [[] for _ in variants]
    for _ in range(FLAGS.repeats):
        for variant, taken in zip(variants, samples, strict=True):
            if variant.num_rounds:
                began = time.perf_counter()
                jax.block_until_ready(variant.call(variant.num_rounds))
                taken.append((time.perf_counter() - began) / (variant.num_rounds * _UNROLLED))
    for variant, taken in zip(variants, samples, strict=True):
        found = variant.result
        if taken:
            us = 1e6 * statistics.median(taken)
            found |= {"us": round(us, 2), "fastest_us": round(1e6 * min(taken), 2)}
            found["tflop_per_s"] = round(work / us / 1e6, 1)
        name = describe(found["kernel"], found["cuts"])
        said = "" if not taken else f"{found['us']:9.1f} us (fastest {found['fastest_us']:8.1f})"
        said = f"   as {found['same_as']}" if "same_as" in found else said
        rest = {k: found[k] for k in ("predicted_us", "tflop_per_s", "max_error", "num_merges") if k in found}
        print(f"{found['case']:14} {name:30} {said:38} {rest}", flush=True)


def run_all(
    programs: list[tuple[str, tuple[int, int], Future[Any]]],
    whole: dict[str | None, Inputs],
    began: float,
) -> list[dict[str, Any]]:
    """Check the kernels on their cases, time them case by case, and return the results."""
    results: list[dict[str, Any]] = []
    batches: dict[tuple[str | None, str], Batch] = {}
    answers: dict[str, jax.Array] = {}
    ready: dict[str, list[Timed]] = {}
    for name, bucket, future in programs:
        for case, rows in _BUCKETS[bucket].items():
            key = (KERNELS[name].kv_dtype, case)
            if FLAGS.cases and case not in FLAGS.cases:
                continue
            try:
                if key not in batches:
                    batches[key] = make_batch(case, rows, whole[key[0]], bucket[1])
                batch = batches[key]
                if len(batch.inputs.q) < bucket[0]:  # fewer tokens than the bucket has
                    batch = batch._replace(inputs=batch.inputs._replace(q=whole[key[0]].q[: bucket[0]]))
                for variant in prepare(name, bucket, future.result(), batch, answers):
                    ready.setdefault(case, []).append(variant)
                    results.append(variant.result)
            except KERNEL_ERRORS as error:  # continue with the others
                text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
                results.append({"case": case, "kernel": name, "is_right": False, "error": text})
                print(f"{case} {name}: {text}", file=sys.stderr, flush=True)
    for case, variants in ready.items():
        if time.perf_counter() - began > FLAGS.time_limit_s:
            print(f"not timed because of --time_limit_s: {case}", flush=True)
            continue
        measure(variants, flop_of(next(b[case] for b in _BUCKETS.values() if case in b)))
    return results


def main() -> int:
    """Print a line per case and variant, then the document."""
    cases = [name for bucket in _BUCKETS.values() for name in bucket]
    known: dict[str, Collection[str]] = {"--kernels": KERNELS, "--cuts": CUTS, "--cases": cases}
    for flag, names in known.items():
        if unknown := sorted(set(FLAGS[flag[2:]].value or ()) - set(names)):
            raise ConfigError(flag, unknown, f"known are {', '.join(names)}")
    began = time.perf_counter()
    largest = Case("whole", _LARGEST, GQA10)
    whole: dict[str | None, Inputs] = {}
    for kv_dtype in dict.fromkeys(KERNELS[name].kv_dtype for name in FLAGS.kernels):
        found = make_inputs(largest, _DTYPE, FLAGS.seed, kv_dtype)
        most = max(num_tokens for num_tokens, _ in _BUCKETS)
        q = jax.random.normal(jax.random.key(FLAGS.seed), (most, *found.q.shape[1:]), jnp.float32)
        whole[kv_dtype] = found._replace(q=q.astype(_DTYPE))
    print(f"{device_name()}, {time.perf_counter() - began:.1f} s", flush=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(compile_all(pool, whole, began))
        print(f"lowered {len(programs)} programs, {time.perf_counter() - began:.1f} s", flush=True)
        results = run_all(programs, whole, began)
    units = {"us": "median microseconds of a call", "predicted_us": "microseconds of the model"}
    print_document(json_line("prompt_variants", {"measurements": results}, units=units, device=device_name()))
    return 0 if all(result.get("is_right", True) for result in results) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_list("kernels", list(KERNELS), f"Kernels to time: {', '.join(KERNELS)}.")
    flags.DEFINE_list("cuts", list(CUTS), f"Rules for lists: {', '.join(CUTS)}.")
    flags.DEFINE_list("cases", [], "Cases to time; default: all.")
    flags.DEFINE_integer("seed", 0, "Seed of pages and values.", lower_bound=0)
    flags.DEFINE_integer("repeats", 5, "Number of timed calls; the median is reported.", lower_bound=1)
    flags.DEFINE_float("target_ms", 20.0, "Approximate device time of one timed call (ms).")
    flags.DEFINE_float("compile_limit_s", 80.0, "Lower no program after this many seconds.")
    flags.DEFINE_float("time_limit_s", 200.0, "Time no case after this many seconds.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
