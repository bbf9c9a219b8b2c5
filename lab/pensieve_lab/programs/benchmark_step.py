"""Whole steps of a model against the device's ceilings, and the engine against its own bare steps.

    python -m pensieve_lab.programs.benchmark_step --model=random:llama2-13b-gqa10 --dtype=bfloat16

- Ceilings of this device, measured in the same run: reading, copying, multiplying.
- Decode steps, a step of prompt tokens, and both in one step, each launched back to back as the engine would.
  The bound of a step is the sum over its operations of their limits, memory or arithmetic. The host time of
  the call, while the step before runs, is measured too.
- The time that sampling adds to a step of the first case, by sampling parameters.
- A decoding engine against a bare loop over the same compiled step at the same contexts: tokens/s, and the
  host's time.
- With `--trace` the device's activity in each of the steps and in the engine, kernel by kernel, and its idle
  times.

Page and bucket sizes follow from the requested cases. The KV cache of bare steps holds random numbers.
Figures are medians. The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import flags

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
from pensieve_jax.core.sampling_params import MAX_BIASED_IDS, SamplingParams
from pensieve_jax.core.token_masks import num_words
from pensieve_jax.decoding.device.weights import ProgressBar, serving_dtype
from pensieve_jax.device.row_steps import RowSteps, StepRow, Timed
from pensieve_lab.common.list_flags import numbers
from pensieve_lab.common.spread import Spread
from pensieve_lab.steps.bounds import bound_s, operations
from pensieve_lab.steps.ceilings import Ceilings, measure_ceilings
from pensieve_lab.steps.device_trace import summary, trace_kernels
from pensieve_lab.steps.swap_windows import Stage

FLAGS = flags.FLAGS
Figures = dict[str, Any]
_BUCKET_STEP = 16
_NUM_TRACED_STEPS = 5
_CROWD_PROMPT = 512  # prompt tokens per step while the engine's crowd is still arriving
_CPU_CEILING_BYTES, _CPU_CEILING_MATRIX = 32 << 20, 256
_NUM_WINDOWS = 5  # of the engine's steps
SAMPLERS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "greedy, with log-probabilities": SamplingParams(logprobs=20),
    "masked": SamplingParams(),  # with a mask for each row, copied in each step
    "counts": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, presence_penalty=0.5),
    "bias": SamplingParams(logit_bias={token_id: 0.5 for token_id in range(MAX_BIASED_IDS)}),
}
_MASKED = "masked"


def cases() -> dict[str, list[StepRow]]:
    """Return the flags' cases as rows by name; raises ConfigError."""
    context = FLAGS.context_tokens

    def decode(count: int) -> list[StepRow]:
        return [StepRow(i, context - 1, context) for i in range(count)]

    found = {f"decode {count} x {context}": decode(count) for count in numbers("--decodes", FLAGS.decodes)}
    for text in FLAGS.prompts:
        length, *ends = numbers("--prompts", text.split("of"))
        end = ends[0] if ends else length
        if len(ends) > 1 or end < length:
            raise ConfigError("--prompts", text, "tokens, or tokens of a context with them, as in 512of8512")
        found["prompt of " + " of ".join(map(str, [length, *ends]))] = [StepRow(0, end - length, end)]
    for text in FLAGS.mixed:
        count, prompt = numbers("--mixed", text.split("+"))[:2] if text.count("+") == 1 else (0, 0)
        if not count:
            raise ConfigError("--mixed", text, "decodes+prompt tokens, as in 128+512")
        found[f"decode {count} x {context} + prompt of {prompt}"] = [
            *decode(count),
            StepRow(count, 0, prompt),
        ]
    if not found:
        limit = "at least one case, in --decodes, --prompts or --mixed"
        raise ConfigError("--decodes", ",".join(FLAGS.decodes), limit)
    return found


def sized_config(rows_by_case: dict[str, list[StepRow]]) -> EngineConfig:
    """Return the flags' engine with pages and buckets for these cases, and for the crowd."""
    refuse_sizes()
    config = engine_config()
    chunk = config.cache.chunk_tokens
    num_sequences = max(max(len(rows) for rows in rows_by_case.values()), FLAGS.num_serving)
    num_tokens = {sum(row.end - row.begin for row in rows) for rows in rows_by_case.values()}
    if FLAGS.num_serving:
        num_tokens |= {FLAGS.num_serving}
        if max(num_tokens) < FLAGS.num_serving + _CROWD_PROMPT:
            num_tokens |= {FLAGS.num_serving + _CROWD_PROMPT}
    num_tokens |= {
        max(*num_tokens, num_sequences + chunk)
    }  # the minimum of an engine with this many sequences
    buckets = sorted({-(-number // _BUCKET_STEP) * _BUCKET_STEP for number in num_tokens})
    longest = max(row.end for rows in rows_by_case.values() for row in rows)
    if FLAGS.num_serving:
        longest = max(longest, FLAGS.context_tokens + crowd_tokens(buckets[-1]) + chunk)
    cache = dataclasses.replace(config.cache, gpu_pages=num_sequences * -(-longest // chunk))
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_running=num_sequences,
        max_num_rows=None,
        max_num_batched_tokens=buckets[-1],
        token_buckets=tuple(buckets),
        max_context_tokens=longest,
    )
    return dataclasses.replace(config, cache=cache, scheduler=scheduler)


def crowd_tokens(max_num_batched_tokens: int) -> int:
    """Return the most tokens that a sequence of the crowd decodes, during the others' prompts and after."""
    count = FLAGS.num_serving
    num_prompt_steps = -(-count * FLAGS.context_tokens // (max_num_batched_tokens - count))
    return num_prompt_steps + FLAGS.num_steps + 4 * _NUM_TRACED_STEPS


def measure_steps(
    parts: Assembled, steps: RowSteps, found: dict[str, list[StepRow]], ceilings: Ceilings
) -> Figures:
    """Measure the cases in alternation, several times over."""
    plans = {name: steps.plan(rows, SamplingParams()) for name, rows in found.items()}
    timed = {name: steps.whole(plan) for name, plan in plans.items()}
    samples: dict[str, list[float]] = {name: [] for name in timed}
    num_rounds, storage = FLAGS.num_repeats + 1, parts.runner.storage
    with ProgressBar("steps", shows_progress()) as progress:
        for number in range(num_rounds):  # the first warms up
            for name, one in timed.items():
                samples[name].append(one.sample_s(FLAGS.num_launches))
            progress(number + 1, num_rounds, "")
    figures = {}
    for name, rows in found.items():
        step = Spread.of(samples[name][1:])
        todo = operations(
            parts.model_config,
            rows,
            num_samples=len(rows),
            bytes_per_number=parts.runner.dtype.itemsize,
            kv_token_bytes=storage.page_bytes * FLAGS.tensor_parallel_size / storage.page_size,
            num_devices=FLAGS.tensor_parallel_size,
            bytes_per_weight=None if parts.runner.weights_dtype is None else 1,
        )
        bound = bound_s(todo, ceilings)
        figures[name] = {
            "num_tokens": sum(row.end - row.begin for row in rows),
            "bucket": plans[name].layout.num_tokens,
            "step_s": step.as_dict(),
            "dispatch_s": timed[name].dispatch_s(FLAGS.num_launches),
            "bound_s": bound,
            "share_of_bound": bound / step.median,
            "operations_s": {one.name: one.seconds(ceilings) for one in todo},
        }
        if FLAGS.trace:
            figures[name]["trace"] = traced(timed[name])
    return figures


def traced(step: Timed) -> Figures:
    """Trace one step of several in a row; returns nothing without a GPU."""
    num_launches = _NUM_TRACED_STEPS - 1  # and the one before them
    return summary(trace_kernels(lambda: step.sample_s(num_launches)), _NUM_TRACED_STEPS)


def random_masks(num_rows: int, vocab_size: int) -> np.ndarray:
    """Return masks of half of the ids, i32[num_rows, ceil(vocab_size / 32)]."""
    shape = num_rows, num_words(vocab_size)
    return np.random.default_rng(0).integers(0, 2**32, shape, np.uint32).view(np.int32)


def measure_sampling(steps: RowSteps, rows: list[StepRow], vocab_size: int) -> Figures:
    """Measure the step without a sampler and with each, and the time that each adds.

    `extra` compares with no sampler, `beside_greedy` with a greedy choice.
    """
    timed = {"no sampler": steps.layers(steps.plan(rows, SamplingParams()))}
    for name, sampled in SAMPLERS.items():
        plan = steps.plan(rows, sampled)
        masks = random_masks(plan.layout.max_num_samples, vocab_size) if name == _MASKED else None
        timed[name] = steps.whole(plan, masks)
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(FLAGS.num_repeats + 1):
        for name, one in timed.items():
            samples[name].append(one.sample_s(FLAGS.num_launches))
    spreads = {name: Spread.of(values[1:]) for name, values in samples.items()}
    least, greedy = spreads["no sampler"].median, spreads["greedy"].median
    return {
        name: {
            "step_s": spread.as_dict(),
            "extra": spread.median / least - 1,
            "beside_greedy": spread.median / greedy - 1,
        }
        for name, spread in spreads.items()
    }


@contextlib.contextmanager
def fetches_timed(parts: Assembled) -> Iterator[list[float]]:
    """Collect the seconds of every wait for a step's results."""
    waits: list[float] = []
    fetch = parts.runner.fetch

    def timed_fetch(handle: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return fetch(handle)
        finally:
            waits.append(time.perf_counter() - start_s)

    with mock.patch.object(parts.runner, "fetch", timed_fetch):
        yield waits


def measure_serving(parts: Assembled, steps: RowSteps) -> Figures:
    """Measure a decoding crowd, and a bare loop at the contexts that the crowd had."""
    engine, count = parts.engine, FLAGS.num_serving
    stage = Stage(engine, parts.model_config.vocab_size, chunk_tokens=FLAGS.chunk_tokens, prompt_tokens=1)
    parts.runner.reset()  # an engine counts its steps from 0
    stage.start_crowd(count, FLAGS.context_tokens, crowd_tokens(max(parts.runner.layouts)))
    for _ in range(_NUM_TRACED_STEPS):
        engine.step()
    num_compilations = engine.stats()["num_compilations"]
    windows, num_steps = [], -(-FLAGS.num_steps // _NUM_WINDOWS)
    first_tokens = stage.crowd_tokens()
    with fetches_timed(parts) as waits:
        for _ in range(_NUM_WINDOWS):
            start_s = time.perf_counter()
            for _ in range(num_steps):
                engine.step()
            windows.append((time.perf_counter() - start_s) / num_steps)
    contexts = [
        FLAGS.context_tokens + (a + b) // 2 for a, b in zip(first_tokens, stage.crowd_tokens(), strict=True)
    ]
    assert engine.stats()["num_compilations"] == num_compilations, "a step was compiled while serving"
    found: Figures = {}
    if FLAGS.trace:
        kernels = trace_kernels(lambda: [engine.step() for _ in range(_NUM_TRACED_STEPS)])
        found["trace"] = summary(kernels, _NUM_TRACED_STEPS)
    stage.end_crowd()
    engine.check_integrity()
    parts.runner.reset()
    steps.fill()
    bare = steps.whole(
        steps.plan([StepRow(i, end - 1, end) for i, end in enumerate(contexts)], SamplingParams())
    )
    bare_s = [bare.sample_s(num_steps) for _ in range(_NUM_WINDOWS + 1)][1:]
    step, loop = Spread.of(windows), Spread.of(bare_s)
    return found | {
        "num_sequences": count,
        "mean_context_tokens": sum(contexts) / count,
        "engine_step_s": step.as_dict(),
        "bare_step_s": loop.as_dict(),
        "wait_s": Spread.of(waits).as_dict(),
        "host_s": sum(windows) / len(windows) - sum(waits) / len(waits),
        "engine_tokens_per_s": count / step.median,
        "bare_tokens_per_s": count / loop.median,
        "share_of_bare": loop.median / step.median,
    }


def print_tables(figures: Figures) -> None:
    """Print the measured figures as tables."""
    rows = [
        [
            name,
            one["bucket"],
            1e3 * one["step_s"]["median"],
            1e3 * one["bound_s"],
            one["share_of_bound"],
            1e3 * one["dispatch_s"],
        ]
        for name, one in figures["steps"].items()
    ]
    print(table(["step", "bucket", "median, ms", "bound, ms", "bound / median", "host, ms"], rows))
    rows = [
        [name, 1e3 * one["step_s"]["median"], 100 * one["extra"], 100 * one["beside_greedy"]]
        for name, one in figures["sampling"].items()
    ]
    print(table(["sampler", "median, ms", "extra, %", "beside greedy, %"], rows))
    serving = figures.get("serving")
    if serving:
        shown = [[name, 1e3 * serving[name]["median"]] for name in ("bare_step_s", "engine_step_s", "wait_s")]
        print(table(["serving", "ms"], [*shown, ["host_s", 1e3 * serving["host_s"]]]))
        print(f"engine / bare loop: {serving['share_of_bare']:.3f}")
        kernels = serving.get("trace", {}).get("kernels_s", {})
        if kernels:
            print(table(["kernel", "us/step"], [[name[:70], 1e6 * one] for name, one in kernels.items()]))


def main() -> int:
    found_cases = cases()
    config = sized_config(found_cases)
    model_limits()  # refuse a missing model before anything is measured
    is_gpu = jax.default_backend() == "gpu"
    dtype = "bfloat16" if serving_dtype(FLAGS.dtype) == "auto" else serving_dtype(FLAGS.dtype)
    ceilings = measure_ceilings(
        num_bytes=FLAGS.ceiling_bytes if is_gpu else min(FLAGS.ceiling_bytes, _CPU_CEILING_BYTES),
        matrix_size=FLAGS.ceiling_matrix if is_gpu else min(FLAGS.ceiling_matrix, _CPU_CEILING_MATRIX),
        dtype=dtype,
        repeats=FLAGS.num_repeats,
    )  # before anything else takes memory
    start_s = time.perf_counter()
    parts = open_parts(config)
    start_up_s = time.perf_counter() - start_s
    print(f"ready after {start_up_s:.0f} s", flush=True)
    num_sequences = config.scheduler.running_limit
    steps = RowSteps(config, parts.runner, parts.model_config.vocab_size, num_sequences)
    steps.fill()
    found: Figures = {
        "ceilings": ceilings._asdict(),
        "start_up_s": start_up_s,
        "steps": measure_steps(parts, steps, found_cases, ceilings),
        "sampling": measure_sampling(steps, next(iter(found_cases.values())), parts.model_config.vocab_size),
    }
    if FLAGS.num_serving:
        found["serving"] = measure_serving(parts, steps)
    parts.engine.close()
    print(table(["ceiling", "10^12/s"], [[name, 1e-12 * one] for name, one in found["ceilings"].items()]))
    print_tables(found)
    document = {
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "weights_dtype": parts.runner.weights_dtype,
        "config": dataclasses.asdict(parts.config),
        **found,
    }
    units = {"*_s": "seconds", "*_bytes_per_s": "bytes per second", "flop_per_s": "operations per second"}
    print_document(json_line("steps", document, units=units, device=device_name()))
    return 0


def define_flags() -> None:
    flags.DEFINE_list("decodes", ["128", "1", "32", "180"], "Numbers of sequences of decode steps.")
    flags.DEFINE_list(
        "prompts",
        ["2048"],
        "Prompt lengths of steps with one prompt, as in 2048; behind a history as in 512of8512.",
    )
    flags.DEFINE_list("mixed", ["128+512"], "Decodes and prompt tokens of steps with both.")
    flags.DEFINE_integer("context_tokens", 1024, "Context of decoding sequences.", lower_bound=1)
    flags.DEFINE_integer("num_repeats", 7, "Number of samples of each figure.", lower_bound=1)
    flags.DEFINE_integer("num_launches", 20, "Launches per sample.", lower_bound=1)
    flags.DEFINE_integer("num_serving", 128, "Sequences of the decoding engine; 0 skips it.", lower_bound=0)
    flags.DEFINE_integer("num_steps", 100, "Steps of the engine, and of the bare loop.", lower_bound=1)
    flags.DEFINE_bool("trace", False, "Also trace some of the steps, bare and in the engine.")
    flags.DEFINE_integer(
        "ceiling_bytes", 2**32, "Size of the array that is read and copied.", lower_bound=2**20
    )
    flags.DEFINE_integer("ceiling_matrix", 8192, "Size of the square matrices.", lower_bound=16)
    define_engine_flags(model=TINY_MODEL)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
