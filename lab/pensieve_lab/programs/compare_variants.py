r"""Measures the benefit of stored KV: the same conversations by engines that store none, some, and more of
it.

    python -m pensieve_lab.programs.compare_variants --model=random:llama2-13b-gqa10 --dtype=bfloat16 \
        --token_buckets=64,1024

Three variants of one engine run one after the other on one model. *stateless* (`stateful=False`) recomputes
the history in every turn. *gpu only* (`cpu_pages=0`, the paper's "Pensieve (GPU cache)") recomputes what it
had to drop. *both tiers* copies to host memory and back. `--policies` adds the other eviction policies on
both tiers. Every variant serves the same turns, in rounds: a conversation returns when about all the others
have had a turn (`serving/rounds.py`). Memory holds a part of them: `--gpu_fraction` and `--cpu_fraction` of
what all fill, unless `--gpu_pages` and `--cpu_pages` are given.

A probe of a few steps estimates the duration, and on a terminal a bar shows the time left. The last line is
one JSON document (see `--json`). Exit status 1 if two variants of a float32 engine gave different tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from absl import flags
from tqdm import tqdm

from pensieve_jax import ConfigError, EngineConfig
from pensieve_jax.commands.engine_flags import (
    define_engine_flags,
    engine_config,
    model_limits,
    shows_progress,
)
from pensieve_jax.commands.launch import EXIT_FAILED, run
from pensieve_jax.commands.report import define_document_flag, device_name, json_line, print_document, table
from pensieve_jax.commands.words import duration, format_count
from pensieve_jax.config import POLICIES
from pensieve_jax.decoding.device.weights import serving_dtype
from pensieve_lab.common.engines import EngineFactory, costs_document
from pensieve_lab.serving.estimate import probe, seconds
from pensieve_lab.serving.rounds import RoundsResult, Workload, make_workload, serve

FLAGS = flags.FLAGS
COLUMNS = {
    "gpu hits": "gpu_hit_rate",
    "cpu hits": "cpu_hit_rate",
    "reused": "reused_gpu_tokens",
    "swapped in": "swapped_in_tokens",
    "recomputed": "recomputed_tokens",
    "suspended": "num_suspensions",
    "stalled s": "transfer_stall_s",
    "steps": "num_steps",
    "seconds": "seconds",
    "output tokens/s": "output_tokens_per_s",
}
BYTES = {"GB out": "swapped_out_bytes", "GB in": "swapped_in_bytes"}


def check_flags() -> None:
    """Raise ConfigError for impossible sizes."""
    for name, minimum in {
        "num_conversations": 1,
        "num_turns": 2,
        "output_tokens": 1,
        "prompt_tokens": 4,
        "concurrency": 1,
    }.items():
        value: int = getattr(FLAGS, name)
        if value < minimum:
            raise ConfigError(f"--{name}", value, f"at least {minimum}")
    for name in ("gpu_fraction", "cpu_fraction"):
        fraction: float = getattr(FLAGS, name)
        if not fraction > 0:
            raise ConfigError(f"--{name}", fraction, "above 0")


def sizes(config: EngineConfig, workload: Workload, max_context_tokens: int) -> EngineConfig:
    """Set pages that were not given to shares of what the workload fills.

    Raises ConfigError for conversations that exceed the context.
    """
    longest, chunk_tokens = workload.longest_tokens, config.cache.chunk_tokens
    if longest > max_context_tokens:
        raise ConfigError(
            "--num_turns",
            FLAGS.num_turns,
            f"few enough for the context of {max_context_tokens} tokens",
            f"a conversation has {longest} tokens; lower --num_turns, --prompt_tokens or --output_tokens",
        )
    num_pages = -(-workload.num_tokens // chunk_tokens)
    changes: dict[str, Any] = {}
    if config.cache.gpu_pages is None and config.cache.gpu_memory_fraction is None:
        changes["gpu_pages"] = max(int(FLAGS.gpu_fraction * num_pages), 2 * -(-longest // chunk_tokens))
    if not config.cache.has_given_host_tier:
        changes["cpu_pages"] = int(FLAGS.cpu_fraction * num_pages)
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, **changes))


def variants(config: EngineConfig) -> dict[str, EngineConfig]:
    """Return the compared configurations by name, in increasing order of memory."""
    cache = config.cache
    no_cpu = dataclasses.replace(config, cache=dataclasses.replace(cache, cpu_pages=0))
    found = {
        "stateless": dataclasses.replace(no_cpu, stateful=False),
        "gpu only": no_cpu,
        "both tiers": config,
    }
    if FLAGS.policies:
        for policy in POLICIES:
            if policy != cache.policy:
                changed = dataclasses.replace(cache, policy=policy)
                found[f"both tiers, {policy}"] = dataclasses.replace(config, cache=changed)
    return found


def same_tokens(served: Mapping[str, RoundsResult]) -> dict[str, bool]:
    """Return whether each variant gave the tokens of the first one. Replies are short ids of random
    weights."""

    def replies(one: RoundsResult) -> dict[str | None, list[tuple[int, ...]]]:
        turns: dict[str | None, list[tuple[int, ...]]] = {}
        for output in one.outputs:
            turns.setdefault(output.conversation_id, []).append(output.token_ids)
        return turns

    first = replies(next(iter(served.values())))
    return {name: replies(one) == first for name, one in served.items()}


def expectation(num_variants: int, num_turns: int, one_s: tuple[float, float]) -> str:
    """Describe how long it will take: stateless recomputes all histories, the others some or none."""
    found_s, computed_s = one_s
    shortest, longest = computed_s + (num_variants - 1) * found_s, num_variants * computed_s
    return (
        f"{num_variants} variants of {format_count(num_turns, 'turn')}: {duration(shortest)} to "
        f"{duration(longest)}, by a probe; stateless {duration(computed_s)}"
    )


def measure() -> tuple[EngineConfig, dict[str, dict[str, Any]], dict[str, bool]]:
    """Return the configuration and, by variant, its figures and whether its tokens equal the first one's."""
    config = engine_config()
    model, max_context_tokens = model_limits()
    workload = make_workload(
        num_conversations=FLAGS.num_conversations,
        num_turns=FLAGS.num_turns,
        prompt_tokens=FLAGS.prompt_tokens,
        output_tokens=FLAGS.output_tokens,
        vocab_size=model.vocab_size,
        seed=FLAGS.data_seed,
    )
    config = sizes(config, workload, max_context_tokens)
    served = {}
    num_turns = sum(map(len, workload.prompts))
    with contextlib.closing(EngineFactory(config)) as factory:
        compared = variants(factory.config)
        pace = probe(factory.start(compared["stateless"]), workload, FLAGS.concurrency)
        print(expectation(len(compared), num_turns, seconds(workload, FLAGS.concurrency, pace)), flush=True)
        total = len(compared) * num_turns
        with tqdm(total=total, unit="turn", disable=not shows_progress()) as bar:
            for name, variant in compared.items():
                bar.set_description(name)
                engine = factory.start(variant)
                served[name] = serve(engine, workload, FLAGS.concurrency, bar.update)
                engine.check_integrity()
                bar.write(f"{name}: {served[name].seconds:.1f} s")
        config = factory.config
        costs = {name: costs_document(factory.costs_of(variant)) for name, variant in compared.items()}
    figures = {name: one.figures() | {"costs": costs[name]} for name, one in served.items()}
    return config, figures, same_tokens(served)


def main() -> int:
    check_flags()
    config, figures, same = measure()
    rows = [[name, *(one[key] for key in COLUMNS.values())] for name, one in figures.items()]
    gigabytes = [[one[key] / 1e9 for key in BYTES.values()] for one in figures.values()]
    print(table(["variant", *COLUMNS, *BYTES], [a + b for a, b in zip(rows, gigabytes, strict=True)]))
    print(
        f"{config.cache.num_gpu_pages:,} pages on the device, {config.cache.num_cpu_pages:,} in host memory"
    )
    different = [name for name, is_same in same.items() if not is_same]
    exact = serving_dtype(FLAGS.dtype) == "float32"
    for name in different:
        print(f"{name}: tokens differ" + ("" if exact else f", as rounding in {FLAGS.dtype} makes them"))
    results = {
        "model": FLAGS.model,
        "dtype": FLAGS.dtype,
        "config": dataclasses.asdict(config),
        "num_conversations": FLAGS.num_conversations,
        "num_turns": FLAGS.num_turns,
        "concurrency": FLAGS.concurrency,
        "variants": figures,
        "same_tokens": same,
    }
    units = {"*_tokens": "tokens", "*_bytes": "bytes of all devices", "*_s": "seconds", "*_per_s": "1/second"}
    units["*_rate"] = "share of the history tokens of returning turns"
    print_document(json_line("variants", results, units=units, device=device_name()))
    return EXIT_FAILED if different and exact else 0


def define_flags() -> None:
    flags.DEFINE_integer("num_conversations", 128, "Conversations.")
    flags.DEFINE_integer("num_turns", 5, "Turns of each conversation.")
    flags.DEFINE_integer("prompt_tokens", 38, "Tokens of a prompt, plus or minus a quarter.")
    flags.DEFINE_integer("output_tokens", 128, "Tokens of a reply.")
    flags.DEFINE_integer("concurrency", 32, "Turns in the engine at once.")
    flags.DEFINE_float("gpu_fraction", 0.35, "Device pages as a share of what all fill; see --gpu_pages.")
    flags.DEFINE_float("cpu_fraction", 0.5, "Host pages as a share of what all fill; see --cpu_pages.")
    flags.DEFINE_bool("policies", False, "Run every eviction policy on both tiers.")
    flags.DEFINE_integer("data_seed", 0, "Seed of the prompts.", lower_bound=0)
    define_engine_flags()
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
