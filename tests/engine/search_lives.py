"""A longer search: random lives of tiny real models, as many as one likes, on all cores.

    JAX_PLATFORMS=cpu python -m tests.engine.search_lives --kv_dtype=int8 --num_lives=50000 --json=lives.json

What `test_real_models` runs a few of: every answer is judged by whole forward passes of a dense model, with
`--kv_dtype` one that stores keys and values alike. Life number n is that of seed n, so that a search goes on
from `--first_seed`, and a life that failed is run again by itself, with `--num_lives=1`. A wrong answer does
not end the search: its seed and its error are told at once and in the document, which is the last line. Exit
status 1 if there was one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple

import jax
from absl import flags
from tqdm import tqdm

from pallas_kernels.attention_names import KV_DTYPES
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document
from tests.engine.driver import run_scenario
from tests.engine.test_real_models import PRESETS, bench_for, real_scenario

FLAGS = flags.FLAGS
_LIVES_A_TASK = 20


class Found(NamedTuple):
    """What some lives came to; counts add up.

    Attributes:
      counts: lives, turns that were judged, of those the ones with two tokens too close to call, and where
        tokens of histories were.
      failures: seeds, each with its error.
    """

    counts: Counter[str]
    failures: dict[int, str]


def search(preset: str, kv_dtype: str | None, seeds: range) -> Found:
    """Runs the lives of some seeds."""
    bench, found = bench_for(preset, kv_dtype), Found(Counter(num_lives=len(seeds)), {})
    before = Counter(_judged(bench))
    for seed in seeds:
        try:
            with _naming(seed):
                totals = run_scenario(real_scenario(seed, kv_dtype), bench).totals
        except AssertionError as error:
            found.failures[seed] = str(error)[:2000]
        else:
            sources = ("reused_gpu_tokens", "swapped_in_tokens", "recomputed_tokens")
            found.counts.update({name: totals[name] for name in sources})
    found.counts.update(Counter(_judged(bench)) - before)
    return found


@contextlib.contextmanager
def _naming(seed: int) -> Iterator[None]:
    """What ends the search says whose life it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the life of seed {seed}")
        raise


def _judged(bench: Any) -> dict[str, int]:
    return {
        "num_turns": bench.num_turns,
        "num_too_close": len(bench.uncertain),
        "num_log_probabilities": bench.num_logprobs,
        "num_farther_than_rounding": bench.num_far,
    }


def tasks(seeds: range) -> Iterator[range]:
    """Some seeds at a time."""
    for start in range(seeds.start, seeds.stop, _LIVES_A_TASK):
        yield range(start, min(start + _LIVES_A_TASK, seeds.stop))


def main() -> int:
    """Hands out tasks, and adds up."""
    seeds = range(FLAGS.first_seed, FLAGS.first_seed + FLAGS.num_lives)
    counts: Counter[str] = Counter()
    failures: dict[int, str] = {}
    start_s, todo, was_cut = time.perf_counter(), tasks(seeds), False
    running: set[Future[Found]] = set()
    bar = tqdm(total=len(seeds), unit=" lives", disable=None)
    context = multiprocessing.get_context("spawn")
    with bar, ProcessPoolExecutor(FLAGS.num_processes, mp_context=context) as pool:
        while True:
            was_cut = time.perf_counter() - start_s > FLAGS.max_s
            while not was_cut and len(running) < 2 * FLAGS.num_processes and (some := next(todo, None)):
                running.add(pool.submit(search, FLAGS.preset, FLAGS.kv_dtype, some))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for found in (future.result() for future in done):
                counts.update(found.counts)
                failures |= found.failures
                bar.update(found.counts["num_lives"])
                for seed, error in found.failures.items():
                    bar.write(f"seed {seed}: {error}")
    results = {
        "preset": FLAGS.preset,
        "kv_dtype": FLAGS.kv_dtype,
        "first_seed": FLAGS.first_seed,
        **counts,
        "seconds": time.perf_counter() - start_s,
        "was_cut": was_cut and counts["num_lives"] < len(seeds),
        "failures": {str(seed): error for seed, error in sorted(failures.items())},
    }
    print_document(json_line("lives", results, units={"seconds": "s"}, device=jax.default_backend()))
    return EXIT_FAILED if failures else 0


if __name__ == "__main__":
    flags.DEFINE_enum("preset", PRESETS[0], PRESETS, "Of which tiny model.")
    flags.DEFINE_enum("kv_dtype", None, KV_DTYPES, "What KV state is stored as; default: float32.")
    flags.DEFINE_integer("first_seed", 0, "Of the first life.", lower_bound=0)
    flags.DEFINE_integer("num_lives", 1000, "How many.", lower_bound=1)
    flags.DEFINE_integer("num_processes", os.cpu_count(), "At once.", lower_bound=1)
    flags.DEFINE_float("max_s", float("inf"), "Seconds after which no more lives are begun.", lower_bound=0)
    define_document_flag()
    run(main)
