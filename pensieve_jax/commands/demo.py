"""Demonstration that losing parts of the KV cache does not change any reply.

    pensieve demo
    pensieve demo --details    # every turn: its text, the place of its KV cache, and its cost

Eight conversations of six turns share a system prompt and a memory too small for all of them: a few device
pages, and a few more in host memory. Idle chunks are swapped out ahead of time and swapped in when their
conversation returns. Chunks that fit into neither tier are dropped, leading chunks first, and recomputed. A
running request that finds no free page is suspended and resumed later. Each user tells a fact in the first
turn and asks for it in the last. The dense reference replays every turn: the model over the whole token
sequence, without pages, scheduler or kernel. In float32 each token must be the same. The exit status is 1 if
one differs, or if one of the above events did not happen.

Then long conversations ask a short question, once in an engine that keeps their KV cache and once in one that
computes all of it again. Both show the time to the first token and the tokens per second.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from absl import flags

from pensieve_jax import CacheConfig
from pensieve_jax.commands.demo_conversations import CONVERSATIONS
from pensieve_jax.commands.demo_screen import (
    DemoTurn,
    introduction,
    movements,
    num_recalled,
    picture,
    savings,
    transcript,
    usage_table,
)
from pensieve_jax.commands.engine_flags import (
    CACHE_DIR,
    COMPILATION_CACHE_HELP,
    define_model_flag,
    take_model_word,
)
from pensieve_jax.commands.interrupts import exiting_on_interrupt
from pensieve_jax.commands.launch import EXIT_FAILED
from pensieve_jax.commands.words import SMALL_MODEL
from pensieve_jax.config import POLICIES
from pensieve_jax.model_source import DEFAULT_MODEL, resolve_model

FLAGS = flags.FLAGS
flags.disclaim_key_flags()


def check_events(turns: Sequence[DemoTurn]) -> bool:
    """Print how many turns were swapped in, recomputed and suspended; return False if one count is 0."""
    usages = [turn.output.usage for turn in turns]
    numbers = {
        "swapped in": sum(usage.swapped_in_tokens > 0 for usage in usages),
        "recomputed": sum(usage.recomputed_tokens > 0 for usage in usages),
        "suspended for lack of memory": sum(usage.num_suspensions > 0 for usage in usages),
    }
    counts = ", ".join(f"{what}: {number}" for what, number in numbers.items())
    print(f"Of {len(turns)} turns, {counts}.")
    for what, number in numbers.items():
        if not number:
            print(f"no turn was {what}: set other --gpu_pages or --cpu_pages")
    return all(numbers.values())


def main() -> int:
    """Serve with little memory, replay and compare, and measure; return the exit status."""
    CacheConfig(gpu_pages=FLAGS.gpu_pages, cpu_pages=FLAGS.cpu_pages)  # raises before anything is loaded
    resolve_model(FLAGS.model)
    with exiting_on_interrupt():
        from pensieve_jax.commands import demo_run, demo_speed  # after the check, since these import JAX

    if FLAGS.model == DEFAULT_MODEL:
        print(SMALL_MODEL, flush=True)
    load = os.getloadavg()[0]  # before this process adds to it
    demo_run.say_progress("starting the engine; a first start compiles")
    with exiting_on_interrupt():
        engines = demo_run.DemoEngines(FLAGS.model, FLAGS.compilation_cache_dir or None)
    turns, stats = demo_run.run(engines)
    demo_run.say_progress("measuring the time to a first token")
    speeds = []
    for stateful in (True, False):
        with engines.start(dataclasses.replace(engines.config, stateful=stateful)) as llm:
            speeds.append(demo_speed.measure(llm))
    equal, margin = demo_run.replay(FLAGS.model, turns)
    if FLAGS.details:
        print(f"\n{transcript(turns)}\n{usage_table(turns, equal)}\n\n{movements(stats)}")
        print(f"The smallest margin between two tokens was {margin:.2g}.")
    num_filled = sum(-(-len(t.history_ids + t.prompt_ids + t.output.token_ids) // 32) for t in turns[-8:])
    print(introduction(FLAGS.gpu_pages + FLAGS.cpu_pages, num_filled))
    print(f"{picture(turns)}\n{savings(turns, *speeds, load=load, num_processors=os.cpu_count() or 1)}")
    print(f"{num_recalled(turns)} of {len(CONVERSATIONS)} last replies hold what was told in the first turn.")
    all_happened = check_events(turns)
    hint = "" if FLAGS.details else " (--details shows all turns)"
    print(f"Compared token by token with a dense model{hint}:")
    for turn, is_equal in zip(turns, equal, strict=True):
        if not is_equal:
            print(f"turn {turn.turn} of {turn.conversation_id} differs from the dense reference")
    print(f"{sum(equal)} of {len(turns)} turns equal")
    return 0 if all_happened and all(equal) else EXIT_FAILED


def define_flags() -> None:
    """Define the command-line flags of `pensieve demo`."""
    define_model_flag()
    take_model_word()
    flags.DEFINE_bool("details", False, "Show every turn: its text, and where its KV cache was.")
    flags.DEFINE_integer("gpu_pages", 16, "Pages of device memory, of 32 tokens each.")
    flags.DEFINE_integer("cpu_pages", 12, "Additional pages of host memory.")
    flags.DEFINE_enum("policy", "retention", POLICIES, "Eviction policy.")
    flags.DEFINE_string("compilation_cache_dir", str(CACHE_DIR), COMPILATION_CACHE_HELP)
