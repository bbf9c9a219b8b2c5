"""Demo of dynamic re-batching in a minute: queries join and leave a running padded batch (Baton).

    python -m pensieve_lab.programs.demo_rebatching [--plot=rebatching.png]

A small Llama with random weights answers a dozen queries of different lengths in a batch of four rows, three
times. With *none* a batch runs until its last query has ended. With *shape* a query joins as soon as a row is
free. Its prompt is computed in a step of the whole batch (a small letter), whose other rows are padded to it,
so the ring grows. With *embed* its prompt is computed separately and inserted into the row, without padding.
In the pictures a line is a row of the batch and a column a step: the letter of the query that gets a token,
or `.` for an idle row; below them is the span, the columns of the ring that are needed. At the end the paged
engine answers the same prompts; the exit status is 1 unless all answers are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from pensieve_jax import LLM, CacheConfig, EngineConfig, RunnerConfig, SamplingParams, SchedulerConfig
from pensieve_jax.commands.cost_plot import check_can_plot
from pensieve_jax.commands.engine_flags import COMPILATION_CACHE_HELP, TINY_MODEL, shows_progress
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import table
from pensieve_jax.rebatching import RebatchingConfig, RebatchingEngine
from pensieve_lab.rebatching.pictures import Album, draw_columns
from pensieve_lab.rebatching.runners import Runners

FLAGS = flags.FLAGS
_DTYPE = "float32"
_MAX_BATCH = 4
_LENGTHS = (64, 128)
# Per query: tokens of its prompt, and of its reply.
_QUERIES = (
    *((5, 24), (9, 6), (4, 11), (14, 3), (20, 17), (3, 8)),
    *((7, 30), (25, 5), (6, 9), (11, 14), (4, 4), (8, 12)),
)
_SAYS = {
    "none": "a batch runs until its last query has ended",
    "shape": "a query joins by vector shaping, and the other rows are padded to it",
    "embed": "a query joins by vector embedding, without padding",
}
_COLUMNS = ("insertion", "steps", "idle row-steps", "columns read", "of them live")
Answers = list[tuple[int, ...]]


def queries(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Make prompts, and parameters with the lengths of replies."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, vocab_size, num).tolist() for num, _ in _QUERIES]
    return prompts, [SamplingParams(max_tokens=num, ignore_eos=True) for _, num in _QUERIES]


def padded(runners: Runners, insertion: str) -> tuple[Album, dict[str, Any], Answers]:
    """Run one of the three; return its pictures, its counters, and the answers."""
    config = base_config(insertion)
    album = Album()
    prompts, params = queries(runners.model_config.vocab_size)
    with RebatchingEngine(runners.runner(config), config, observe=album.observe) as engine:
        handles = engine.submit_many(prompts, params, [0] * len(prompts))
        while engine.has_unfinished:
            engine.step()
        stats = engine.stats()
    return album, stats, [tuple(handle.result().token_ids) for handle in handles]


def base_config(insertion: str) -> RebatchingConfig:
    """Return a configuration of four rows, with more memory than they need."""
    return RebatchingConfig(
        max_batch=_MAX_BATCH,
        kv_bytes=2**26,
        insertion=insertion,
        lengths=_LENGTHS,
        prefill_batch=1,
        compilation_cache_dir=FLAGS.compilation_cache_dir or None,
    )


def paged(vocab_size: int) -> Answers:
    """Return the answers of the paged engine."""
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=64),
        scheduler=SchedulerConfig(max_num_running=8, max_num_batched_tokens=64, token_buckets=(64,)),
        runner=RunnerConfig(compilation_cache_dir=FLAGS.compilation_cache_dir or None),
    )
    prompts, params = queries(vocab_size)
    with LLM(TINY_MODEL, dtype=_DTYPE, config=config, progress=shows_progress()) as llm:
        return [tuple(one.token_ids) for one in llm.generate(prompts, params)]


def main() -> int:
    if FLAGS.plot is not None:
        check_can_plot("--plot", Path(FLAGS.plot))
    runners = Runners(TINY_MODEL, _DTYPE, base_config("embed"), progress=shows_progress())
    albums: dict[str, Album] = {}
    answers: dict[str, Answers] = {}
    rows = []
    print("A line is a row of the batch, a column a step. A letter is the query that gets a token, small if")
    print(
        "the step computes its prompt, and a dot is an idle row. Below: columns of the ring that are needed."
    )
    for insertion, says in _SAYS.items():
        albums[insertion], stats, answers[insertion] = padded(runners, insertion)
        print(f"\n{insertion}: {says}", *albums[insertion].lines(), sep="\n", flush=True)
        num_idle = sum(stats[f"idle_{why}"] for why in ("tail", "waiting", "late"))
        columns = stats["read_columns"], stats["live_columns"]
        rows.append([insertion, stats["num_steps"], num_idle, *columns])
    print("", table(_COLUMNS, rows), sep="\n")
    expected = paged(runners.model_config.vocab_size)
    num_equal = sum(len({*one}) == 1 for one in zip(expected, *answers.values(), strict=True))
    print(f"\n{num_equal} of {len(expected)} answers equal: of all three, and of the paged engine")
    if FLAGS.plot is not None:
        draw_columns(albums, Path(FLAGS.plot))
    return 0 if num_equal == len(expected) else EXIT_FAILED


def define_flags() -> None:
    flags.DEFINE_string("plot", None, "PNG file with the ring's columns over time for all three.")
    flags.DEFINE_string("compilation_cache_dir", None, COMPILATION_CACHE_HELP)
    flags.DEFINE_boolean("progress", None, "Show progress bars. Default: on a terminal.")


if __name__ == "__main__":
    define_flags()
    run(main)
