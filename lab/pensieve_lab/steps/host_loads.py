"""Loads that keep a scheduler busy, on a runner that computes nothing, one step at a time.

Owns: an engine of the real parts, its conversations, and the host time of each step. The engine's clock
advances by a constant per step, so that two versions of the code make the same decisions.
Does not know: what is done with the times.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from model_defs import preset
from pensieve_jax import CacheConfig, EngineConfig, SamplingParams, SchedulerConfig
from pensieve_jax.assembly import estimated_cost_model
from pensieve_jax.core.clock import VirtualClock
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_jax.history import SQLiteHistoryStore
from pensieve_lab.steps.null_runner import NullRunner

FLAGS = flags.FLAGS
_PROMPT_TOKENS, _REPLY_TOKENS = 38, 205  # means of a turn in the traces
_STEP_S = 0.02  # on the engine's clock
_COPIES = ("num_swapped_out_chunks", "num_swapped_in_chunks")


class Times(NamedTuple):
    """Times of one step in milliseconds of CPU time, except `wall_ms`, and its contents."""

    schedule_plan_ms: float
    wall_ms: float
    tiles_ms: float
    finish_ms: float
    num_running: int
    num_drops: int
    num_copies: int
    num_rows: int
    num_tokens: int


class HostLoad:
    """Engine with conversations of given lengths."""

    def __init__(self, *, gpu_pages: int, num_idle: int, cpu_pages: int = 0) -> None:
        """Make an idle engine."""
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
        self._turns: set[Turn] = set()  # in progress; the engine itself holds no reference

    def submit(self, names: Sequence[str], prompt_lens: Sequence[int], reply_lens: Sequence[int]) -> None:
        """Submit one turn of random ids per name."""
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
        """Time one step of the engine; return its times and the turns that ended."""
        self.clock.advance(_STEP_S)
        before = self.engine.stats()
        start_wall_s, start_s = time.perf_counter(), time.thread_time()
        ended = self.engine.step()
        end_s, runner = time.thread_time(), self.runner
        self._turns.difference_update(ended)
        times = Times(
            1e3 * (runner.launch_s - start_s),
            1e3 * (runner.launch_wall_s - start_wall_s),
            1e3 * runner.tiles_s,
            1e3 * (end_s - runner.launch_s),
            int((after := self.engine.stats())["num_running"]),
            int(after["num_dropped_chunks"] - before["num_dropped_chunks"]),
            int(sum(after[name] - before[name] for name in _COPIES)),
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
        """Take one turn of each idle conversation, so that there is history to evict."""
        for start in range(0, len(self.idle), FLAGS.num_running):
            names = self.idle[start : start + FLAGS.num_running]
            self.submit(names, [FLAGS.context_tokens - _REPLY_TOKENS] * len(names), [1] * len(names))
            while self.engine.has_unfinished:
                self.step()


def decode_load() -> Callable[[], Times]:
    """Make a load of decoding requests in an ample pool."""
    num_pages = FLAGS.num_running * (2 * FLAGS.context_tokens // 32 + 1)
    load = HostLoad(gpu_pages=num_pages, num_idle=0)
    load.fill_running()
    return lambda: load.step()[0]


def mixed_load(*, cpu_share: float = 0.0) -> Callable[[], Times]:
    """Make a load in which turns end and begin, in a pool for the running requests and half of the idle ones.

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


LOADS: Mapping[str, Callable[[], Callable[[], Times]]] = {
    "decode": decode_load,
    "mixed": mixed_load,
    "mixed, two tiers": functools.partial(mixed_load, cpu_share=0.4),
}


def measure(step: Callable[[], Times], num_steps: int) -> list[Times]:
    """Time `num_steps` steps, without the garbage collection of the set-up's objects."""
    gc.collect()
    gc.freeze()  # as a server does with its start-up objects
    return [step() for _ in range(num_steps)]
