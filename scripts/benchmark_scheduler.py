"""How long the host takes to decide and lay out a step, without a device.

    python scripts/benchmark_scheduler.py [--num_running=256 --context_tokens=2000 --policy=retention]

The real engine, scheduler, cache, planner and tile builder run over a runner that computes nothing: it
answers with made-up ids and notes when it was called. `schedule + plan` is what passes from the start of
`Engine.step` to the dispatch of the step; `tiles` is the share of it that the kernel's tile list takes;
`finish` is the rest of the step (ids into turns, commits). All are CPU time of the one thread that works,
so that a busy machine does not count against it; the wall clock stands beside it. Two loads:
  decode  every request decodes one token;
  mixed   replies end and turns of idle conversations arrive all the time, into a pool so small that the
          idle ones lose chunks and returning ones recompute.
Prints a table, which load missed the target, and one JSON document (see `--json`) as the last line.
`--profile` adds cProfile's hot spots. It reports and does not judge: the exit status is 0 also where the
target is missed, since that depends on the machine, and 2 for flags that cannot work.
"""

from __future__ import annotations

import cProfile
import functools
import gc
import os
import pstats
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags
from steps.null_runner import NullRunner

from model_defs import PRESETS, preset
from pensieve_jax import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig
from pensieve_jax.assembly import estimated_cost_model
from pensieve_jax.commands.launch import run
from pensieve_jax.commands.report import define_document_flag, json_line, print_document, table
from pensieve_jax.config import POLICIES
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_jax.engine.validation import ModelLimits, TurnSpec
from pensieve_jax.history import SQLiteHistoryStore

FLAGS = flags.FLAGS
TARGET_MS = 2.0
_STEP_S = 0.02  # by the engine's clock, so that two versions of the code decide about the same
_PROMPT_TOKENS, _REPLY_TOKENS = 38, 205  # of a turn in the traces, on average


class Times(NamedTuple):
    """One step: milliseconds of CPU time, unless it says wall, and what it held."""

    schedule_plan_ms: float
    wall_ms: float
    tiles_ms: float
    finish_ms: float
    num_running: int
    num_drops: int
    num_rows: int
    num_tokens: int


class HostLoad:
    """An engine with conversations of given lengths, ready to be measured."""

    def __init__(self, *, gpu_pages: int, num_idle: int, cpu_pages: int = 0) -> None:
        """An idle engine."""
        model = preset(FLAGS.model)
        num_running, context_tokens = FLAGS.num_running, 2 * FLAGS.context_tokens
        config = EngineConfig(
            cache=CacheConfig(gpu_pages=gpu_pages, cpu_pages=cpu_pages, policy=FLAGS.policy),
            scheduler=SchedulerConfig(
                max_num_running=num_running,
                max_num_batched_tokens=8 * num_running + 32,
                max_context_tokens=context_tokens,
            ),
        )
        limits = ModelLimits(vocab_size=model.vocab_size, max_context_tokens=context_tokens)
        self.runner = NullRunner(config, model, context_tokens, FLAGS.attention_backend)
        cost_model = estimated_cost_model(model, config.cache.chunk_tokens)
        store = SQLiteHistoryStore(None, fingerprint="benchmark")
        self.clock = VirtualClock()
        self.engine = Engine(self.runner, config, limits, store, cost_model=cost_model, clock=self.clock)
        self.random = np.random.default_rng(0)
        self.idle = [f"idle-{i}" for i in range(num_idle)]
        self._turns: set[Turn] = set()  # in progress: they are held, or they would be cancelled

    def submit(self, names: Sequence[str], prompt_lens: Sequence[int], reply_lens: Sequence[int]) -> None:
        """One turn each, of random ids."""
        self._turns.update(
            self.engine.submit(
                [
                    TurnSpec(
                        self.random.integers(3, 30000, prompt_len).tolist(),
                        SamplingParams(max_tokens=reply_len, ignore_eos=True),
                        name,
                    )
                    for name, prompt_len, reply_len in zip(names, prompt_lens, reply_lens, strict=True)
                ]
            )
        )

    def step(self) -> tuple[Times, list[Turn]]:
        """One step of the engine, timed."""
        self.clock.advance(_STEP_S)
        before = self.engine.stats()
        start_wall_s, start_s = time.perf_counter(), time.thread_time()
        ended = self.engine.step()
        end_s, runner = time.thread_time(), self.runner
        self._turns.difference_update(ended)
        times = Times(
            1e3 * (runner.dispatch_s - start_s),
            1e3 * (runner.dispatch_wall_s - start_wall_s),
            1e3 * runner.tiles_s,
            1e3 * (end_s - runner.dispatch_s),
            int((after := self.engine.stats())["num_running"]),
            int(after["num_dropped_chunks"] - before["num_dropped_chunks"]),
            runner.num_rows,
            runner.num_tokens,
        )
        return times, ended

    def fill_running(self) -> None:
        """Bring `num_running` requests to about `context_tokens` each, spread over a page and a reply."""
        count = FLAGS.num_running
        first_len = max(FLAGS.context_tokens - FLAGS.num_steps // 2 - 16, 1)
        lens = [first_len + i % 32 for i in range(count)]
        self.submit([f"running-{i}" for i in range(count)], lens, [FLAGS.context_tokens // 2] * count)
        while self.engine.stats()["num_waiting"] or self.runner.num_tokens != count:
            self.step()

    def fill_idle(self) -> None:
        """One turn of each idle conversation, so that there is history to lose."""
        for start in range(0, len(self.idle), FLAGS.num_running):
            names = self.idle[start : start + FLAGS.num_running]
            self.submit(names, [FLAGS.context_tokens - _REPLY_TOKENS] * len(names), [1] * len(names))
            while self.engine.has_unfinished:
                self.step()


def decode_load() -> Callable[[], Times]:
    """Requests that all decode; the pool is ample."""
    num_pages = FLAGS.num_running * (2 * FLAGS.context_tokens // 32 + 1)
    load = HostLoad(gpu_pages=num_pages, num_idle=0)
    load.fill_running()
    return lambda: load.step()[0]


def mixed_load(*, cpu_share: float = 0.0) -> Callable[[], Times]:
    """Turns end and begin, in a pool for the running requests and half of the idle conversations.

    Host memory holds `cpu_share` of the idle conversations.
    """
    num_running, pages_each = FLAGS.num_running, FLAGS.context_tokens // 32
    gpu_pages = num_running * (pages_each + 8) + FLAGS.num_idle * pages_each // 2
    cpu_pages = int(cpu_share * FLAGS.num_idle * pages_each)
    load = HostLoad(gpu_pages=gpu_pages, num_idle=FLAGS.num_idle + num_running, cpu_pages=cpu_pages)
    load.fill_idle()

    def submit(num_turns: int) -> None:
        names = [load.idle.pop(int(load.random.integers(len(load.idle)))) for _ in range(num_turns)]
        replies = load.random.integers(1, 2 * _REPLY_TOKENS, num_turns).tolist()
        load.submit(names, [_PROMPT_TOKENS] * num_turns, replies)

    def step() -> Times:
        times, ended = load.step()
        load.idle += [str(turn.request.conversation.conversation_id) for turn in ended]
        if ended:
            submit(len(ended))
        return times

    submit(num_running)
    while load.engine.stats()["num_waiting"]:
        step()
    return step


def measure(step: Callable[[], Times], num_steps: int) -> list[Times]:
    """Times of `num_steps` steps, with the garbage of setting up out of the way."""
    gc.collect()
    gc.freeze()  # what a server does with its start-up objects
    return [step() for _ in range(num_steps)]


def summary(times: Sequence[Times]) -> dict[str, float]:
    """Mean, median, 99th percentile and worst of schedule + plan, and means of the rest."""
    columns = {name: np.array([getattr(t, name) for t in times]) for name in Times._fields}
    both = columns.pop("schedule_plan_ms")
    return {
        "mean_ms": float(both.mean()),
        "p50_ms": float(np.median(both)),
        "p99_ms": float(np.percentile(both, 99)),
        "max_ms": float(both.max()),
        "wall_p50_ms": float(np.median(columns.pop("wall_ms"))),
        **{name: float(values.mean()) for name, values in columns.items()},
    }


def main() -> int:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, as the target says
    results = {}
    loads: dict[str, Callable[[], Callable[[], Times]]] = {
        "decode": decode_load,
        "mixed": mixed_load,
        "mixed, two tiers": functools.partial(mixed_load, cpu_share=0.4),
    }
    for name, make in loads.items():
        step = make()
        results[name] = summary(measure(step, FLAGS.num_steps))
        if FLAGS.profile:
            profile = cProfile.Profile()
            profile.runcall(measure, step, FLAGS.num_steps)
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(25)
    columns = ["load", *next(iter(results.values()))]
    print(table(columns, [[name, *values.values()] for name, values in results.items()]))
    missed = [name for name, values in results.items() if values["mean_ms"] > TARGET_MS]
    outcome = f"missed by {' and '.join(missed)}" if missed else "met"
    print(f"target: schedule + plan at most {TARGET_MS} ms a step on one core, on average: {outcome}")
    settings = {name: FLAGS[name].value for name in ("num_running", "context_tokens", "num_idle", "policy")}
    units = {
        "*_ms": "milliseconds of CPU time a step (wall_*: of the wall clock)",
        "num_rows": "sub-requests a step",
        "num_tokens": "tokens a step",
    }
    document = {"target_ms": TARGET_MS, "target_met": not missed, "settings": settings, **results}
    print_document(json_line("scheduler", document, units=units, device="none (host only, one core)"))
    return 0


def define_flags() -> None:
    """The command line."""
    flags.DEFINE_integer("num_running", 256, "Requests in the batch.", lower_bound=1)
    flags.DEFINE_integer("context_tokens", 2000, "Tokens of each running request.", lower_bound=256)
    flags.DEFINE_integer("num_idle", 1000, "Idle conversations of the mixed load.", lower_bound=1)
    flags.DEFINE_integer("num_steps", 200, "Steps measured for each load.", lower_bound=1)
    flags.DEFINE_enum("model", "llama2-13b-gqa10", list(PRESETS), "Preset whose heads shape the tile list.")
    flags.DEFINE_enum("policy", "retention", POLICIES, "Eviction policy.")
    backends = ["xla", "pallas_triton"]
    flags.DEFINE_enum("attention_backend", "pallas_triton", backends, "Whose tile list is built.")
    flags.DEFINE_bool("profile", False, "Profile as many steps again, and print the hot spots.")
    define_document_flag()


if __name__ == "__main__":
    define_flags()
    run(main)
