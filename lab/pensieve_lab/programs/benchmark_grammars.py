"""Steps of a decoding engine with rows held to a JSON schema, beside the same steps without.

    python -m pensieve_lab.programs.benchmark_grammars --model=random:llama2-13b-gqa10 --dtype=bfloat16

- Tokens per second with each share of grammar rows, at each number of rows. Shares take turns, several times.
- Time from the submission of a turn to its first token: without a schema, with a new one, and with one that
  was compiled before.

A preset has no tokenizer, so one with as many ids as the model's vocabulary is learned from the text of this
checkout. The last line is one JSON document (see `--json`).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from absl import flags

from model_defs import ModelConfig
from pensieve_jax import EngineConfig, SamplingParams, assembly
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
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.decoding.device.weights import ProgressBar
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.text import Tokenizer
from pensieve_lab.common.list_flags import numbers
from pensieve_lab.common.spread import Spread
from pensieve_lab.steps.grammar_rows import decode, learned_tokenizer

FLAGS = flags.FLAGS
Figures = dict[str, Any]
_ROOT = Path(__file__).parents[3]
_BUCKET_STEP = 16


def sized_config(row_counts: Sequence[int]) -> EngineConfig:
    """Return the flags' engine with pages and buckets for these batches."""
    refuse_sizes()
    config = engine_config()
    most, chunk = max(row_counts), config.cache.chunk_tokens
    longest = FLAGS.prompt_tokens + FLAGS.num_steps + 2 * most + 256
    largest = -(-(most + max(FLAGS.prompt_tokens, chunk)) // _BUCKET_STEP) * _BUCKET_STEP
    buckets = sorted({-(-count // _BUCKET_STEP) * _BUCKET_STEP for count in row_counts} | {largest})
    scheduler = dataclasses.replace(
        config.scheduler,
        max_num_running=most,
        max_num_rows=None,
        max_num_batched_tokens=largest,
        token_buckets=tuple(buckets),
        max_context_tokens=longest,
    )
    cache = dataclasses.replace(config.cache, gpu_pages=(most + 1) * -(-longest // chunk))
    return dataclasses.replace(config, cache=cache, scheduler=scheduler)


def with_only_end(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the config with the tokenizer's end only; a preset's own may be an id of text here."""
    assert tokenizer.eos_id is not None
    return dataclasses.replace(config, eos_token_ids=(tokenizer.eos_id,))


def measure_shares(parts: Assembled, row_counts: Sequence[int], shares: Sequence[int]) -> Figures:
    """Measure every share of grammar rows, in percent, at every number of rows."""
    engine = parts.engine
    samples: dict[tuple[int, int], list[float]] = {(n, share): [] for n in row_counts for share in shares}
    ceilings = dict.fromkeys(samples, 0.0)
    with ProgressBar("batches", shows_progress()) as progress:
        for repeat in range(FLAGS.num_repeats + 1):  # the first warms up
            for number, (count, share) in enumerate(samples):
                steps = decode(
                    engine,
                    count,
                    -(-count * share // 100),
                    prompt_tokens=FLAGS.prompt_tokens,
                    num_steps=FLAGS.num_steps,
                    seed=repeat,
                )
                if repeat:
                    samples[count, share].append(sum(steps) / len(steps))
                    ceilings[count, share] = max(ceilings[count, share], *steps)
                progress(repeat * len(samples) + number + 1, (FLAGS.num_repeats + 1) * len(samples), "")
    figures: Figures = {}
    for (count, share), values in samples.items():
        step = Spread.of(values)
        figures.setdefault(str(count), {})[str(share)] = {
            "step_s": step.as_dict(),
            "longest_step_s": ceilings[count, share],
            "tokens_per_s": count / step.median,
            "share_of_plain": Spread.of(samples[count, shares[0]]).median / step.median,
        }
    return figures


def first_token_s(parts: Assembled, structured: StructuredOutput | None, seed: int) -> float:
    """Return the seconds from the submission of a turn on an idle engine to its first token."""
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=seed, structured=structured)
    prompt = [3 + (seed + i) % 100 for i in range(FLAGS.prompt_tokens)]
    start_s = time.perf_counter()
    (turn,) = parts.engine.submit([TurnSpec(prompt, params)])
    while not turn.token_ids and not turn.done:
        parts.engine.step()
    elapsed_s = time.perf_counter() - start_s
    while parts.engine.has_unfinished:
        parts.engine.step()
    assert turn.error is None, turn.error
    return elapsed_s


def measure_first_tokens(parts: Assembled) -> Figures:
    """Measure the first token of turns without a schema, with new ones, and with compiled ones."""
    samples: dict[str, list[float]] = {"no schema": [], "new schema": [], "compiled schema": []}
    for number in range(FLAGS.num_schemas + 1):
        properties = {f"field_{number}_{i}": {"type": "string", "maxLength": 20 + i} for i in range(20)}
        schema = json.dumps({"type": "object", "properties": properties, "required": list(properties)})
        structured = StructuredOutput("json_schema", schema)
        for name, one in zip(samples, (None, structured, structured), strict=True):
            elapsed_s = first_token_s(parts, one, number)
            if number:  # the first warms up
                samples[name].append(elapsed_s)
    return {name: Spread.of(values).as_dict() for name, values in samples.items()}


def main() -> int:
    row_counts, shares = numbers("--rows", FLAGS.rows), [0, *numbers("--shares", FLAGS.shares)]
    config = sized_config(row_counts)
    model, _ = model_limits()
    start_s = time.perf_counter()
    tokenizer = learned_tokenizer(model.vocab_size, _ROOT)
    learn_s = time.perf_counter() - start_s
    with (
        mock.patch.object(assembly, "source_tokenizer", lambda source, vocab_size: tokenizer),
        mock.patch.object(assembly, "with_tokenizer_end", with_only_end),
    ):
        parts = open_parts(config)
    print(f"ready after {time.perf_counter() - start_s:.0f} s", flush=True)
    num_compilations = parts.runner.num_compilations
    batches = measure_shares(parts, row_counts, shares)
    first_tokens = measure_first_tokens(parts)
    num_compiled = parts.runner.num_compilations - num_compilations
    parts.engine.check_integrity()
    parts.engine.close()
    rows = [
        [int(count), int(share), one["tokens_per_s"], one["share_of_plain"], 1e3 * one["longest_step_s"]]
        for count, by_share in batches.items()
        for share, one in by_share.items()
    ]
    print(table(["rows", "grammar rows, %", "tokens/s", "of plain", "longest step, ms"], rows))
    rows = [[name, 1e3 * one["median"], 1e3 * one["p90"]] for name, one in first_tokens.items()]
    print(table(["first token", "median, ms", "p90, ms"], rows))
    print(f"compilations while serving: {num_compiled}")
    document = {
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "config": dataclasses.asdict(parts.config),
        "tokenizer_ids": tokenizer.base_vocab_size,
        "learn_tokenizer_s": learn_s,
        "num_compilations_while_serving": num_compiled,
        "batches": batches,
        "first_tokens": first_tokens,
    }
    print_document(json_line("grammars", document, units={"*_s": "seconds"}, device=device_name()))
    return 0


def define_flags() -> None:
    flags.DEFINE_list("rows", ["1", "32", "128"], "Numbers of decoding rows.")
    flags.DEFINE_list("shares", ["25", "100"], "Percentages of rows with a grammar, beside 0.")
    flags.DEFINE_integer("prompt_tokens", 256, "Tokens of each prompt.", lower_bound=1)
    flags.DEFINE_integer("num_steps", 150, "Steps of a sample.", lower_bound=1)
    flags.DEFINE_integer("num_repeats", 3, "Number of samples of each figure.", lower_bound=1)
    flags.DEFINE_integer("num_schemas", 10, "Schemas whose first tokens are timed.", lower_bound=1)
    define_engine_flags(model=TINY_MODEL)
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
