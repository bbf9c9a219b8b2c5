"""Steps with chosen rows on a runner without an engine, and the duration of their launches.

Owns: sequences of random tokens in scattered pages, the plans of their steps, and how launches are timed.
Does not know: flags, schedulers, or what a duration is used for.
Called by: `chunk_steps`, `start_costs`, and measurements of kernels and steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pensieve_jax.config import EngineConfig
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.adjustments import (
    Adjustment,
    bias_words,
    no_bias,
    not_counted,
    penalty_words,
    seeds,
)
from pensieve_jax.decoding.sampling_rows import COLUMNS, truncates
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.scheduler import StepPlan
from pensieve_jax.scheduler.plan import FLAG_LOGPROBS, FLAG_SAMPLES, FLAG_TRUNCATES


class Timed(NamedTuple):
    """A computation on the device: how to launch it, and how to wait for a launch."""

    launch: Callable[[], Any]
    wait: Callable[[Any], Any]

    def once_s(self) -> float:
        """Return seconds from launch to completion, including host work before the device starts."""
        start_s = time.perf_counter()
        self.wait(self.launch())
        return time.perf_counter() - start_s

    def sample_s(self, num_launches: int) -> float:
        """Return seconds per launch for several launches in a row, which follow one extra launch.

        Timing starts when the extra launch ends, so the host work before the first launch is not counted.
        Where the host is slower than the device, the device waits, and one launch's host time is missing.
        """
        before, last = self.launch(), self.launch()
        self.wait(before)
        start_s = time.perf_counter()
        for _ in range(num_launches - 1):
            last = self.launch()
        self.wait(last)
        return (time.perf_counter() - start_s) / num_launches

    def dispatch_s(self, num_launches: int) -> float:
        """Return host seconds per launch. As in an engine, the previous launch runs and is awaited next."""
        previous, seconds = self.launch(), 0.0
        for _ in range(num_launches):
            start_s = time.perf_counter()
            last = self.launch()
            seconds += time.perf_counter() - start_s
            self.wait(previous)
            previous = last
        self.wait(previous)
        return seconds / num_launches


class StepRow(NamedTuple):
    """Tokens [begin, end) of one sequence, computed with a context of its first `end` tokens."""

    sequence: int
    begin: int
    end: int


class RowSteps:
    """Sequences on a runner.

    Attributes:
      pages: pages of every sequence, [sequence, page]; distinct unless the caller gave them.
      token_ids: token ids of every sequence, [sequence, position].
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        vocab_size: int,
        num_sequences: int,
        pages: np.ndarray | None = None,
    ) -> None:
        """Give every sequence random tokens.

        Args:
          config: engine configuration, with the size of the pool.
          runner: the runner that executes the steps.
          vocab_size: vocabulary size of the model.
          num_sequences: number of sequences.
          pages: their pages, [sequence, page]; None divides scattered pages equally among the sequences.
        """
        self._chunk_tokens = config.cache.chunk_tokens
        self._runner = runner
        self._step_id = 0
        random = np.random.default_rng(0)
        if pages is None:
            scattered = scattered_pages(config.cache.num_gpu_pages)
            num_pages = len(scattered) // num_sequences
            pages = scattered[: num_sequences * num_pages].reshape(num_sequences, num_pages)
        self.pages = pages
        shape = (num_sequences, pages.shape[1] * self._chunk_tokens)
        self.token_ids = random.integers(0, vocab_size, shape)

    def fill(self) -> None:
        """Fill all pools with random KV state, because a device reads zeros faster than other values."""
        storage = self._runner.storage

        def random(key: jax.Array) -> jax.Array:
            if storage.kv_dtype is None:
                return jax.random.normal(key, storage.shape, storage.dtype)
            codes = jax.random.bits(key, storage.shape, "uint8").astype(storage.dtype)
            return codes.at[:, storage.page_size :].set(0x3C)  # scales of 0.01

        make = jax.jit(random, out_shardings=storage.sharding)
        keys = iter(jax.random.split(jax.random.key(0), storage.num_layers))
        for pools in self._runner.device_pools.groups:
            for i in range(len(pools)):
                pools[i] = make(next(keys))

    def plan(self, rows: Sequence[StepRow], sampled: SamplingParams | None = None) -> StepPlan:
        """Return a step of these rows in the smallest bucket that fits; sample only if `sampled` is given."""
        chunk, lengths = self._chunk_tokens, [row.end - row.begin for row in rows]
        num_tokens = sum(lengths)
        bucket = min(size for size in self._runner.layouts if size >= num_tokens)
        plan = StepPlan(self._runner.layouts[bucket], 0, self._runner.storage.padding_slot)
        positions = np.concatenate([np.arange(row.begin, row.end) for row in rows])
        sequences = np.repeat([row.sequence for row in rows], lengths)
        plan.token_ids[:num_tokens] = self.token_ids[sequences, positions]
        plan.positions[:num_tokens] = positions
        slots = self.pages[sequences, positions // chunk] * chunk + positions % chunk
        plan.write_slots[:num_tokens] = slots
        plan.cu_q_lens[1 : len(rows) + 1] = np.cumsum(lengths)
        plan.cu_q_lens[len(rows) + 1 :] = num_tokens
        for i, row in enumerate(rows):
            plan.kv_lens[i] = row.end
            num_pages = -(-row.end // chunk)
            plan.page_indices[i, :num_pages] = self.pages[row.sequence, :num_pages]
        plan.num_rows[0] = len(rows)
        if sampled is not None:
            _let_sample(plan, rows, sampled)
        self._runner.fill_tiles(plan)
        return plan

    def whole(self, plan: StepPlan, words: np.ndarray | None = None) -> Timed:
        """Return the step as the engine runs it. It writes the same KV state at every launch.

        `words` are masks of its rows, as in `Runner.choose`. They are copied at every launch, like the
        plan's adjustment; slots of counts are seeded at the first launch.
        """

        def launch() -> Any:
            plan.step_id, self._step_id = self._step_id, self._step_id + 1
            handle = self._runner.launch(plan)
            self._runner.choose(handle, words)
            if plan.adjustment is not None:
                plan.adjustment.seeds = []
            return handle

        return Timed(launch, self._runner.fetch)

    def layers(self, plan: StepPlan) -> Timed:
        """Return the step without its sampler."""
        return Timed(lambda: self._runner.forward(plan), jax.block_until_ready)


def scattered_pages(num_pages: int) -> np.ndarray:
    """Return all pages of a pool except the dummy page 0, in a fixed random order."""
    return 1 + np.random.default_rng(0).permutation(num_pages)


def sample_rounds(timed: Sequence[Timed], num_rounds: int, sample_s: float) -> Iterator[list[float]]:
    """Yield seconds per launch of each of `timed`, in rounds of about `sample_s` seconds for each.

    Rounds spread two effects evenly over all of `timed`: other load on the machine, and a device that warms
    up or slows down.
    """
    for one in timed:
        one.once_s()  # compile, or load a compiled executable
    num_launches = [max(1, round(sample_s / one.sample_s(2))) for one in timed]
    for _ in range(num_rounds):
        yield [one.sample_s(num) for one, num in zip(timed, num_launches, strict=True)]


def _let_sample(plan: StepPlan, rows: Sequence[StepRow], sampled: SamplingParams) -> None:
    """Sample every row; the ids of a row with penalties were in the row of the same number before."""
    num = len(rows)
    plan.num_samples[0] = num
    plan.sample_tokens[:num] = plan.cu_q_lens[1 : num + 1] - 1
    plan.sample_positions[:num] = [row.end for row in rows]
    for name in COLUMNS:
        getattr(plan, name)[:num] = getattr(sampled, name)
    plan.flags[FLAG_SAMPLES] = sampled.temperature > 0
    plan.flags[FLAG_TRUNCATES] = truncates(sampled)
    plan.flags[FLAG_LOGPROBS] = bool(sampled.logprobs)
    plan.adjustment = _adjustment(sampled, num, plan.layout.max_num_samples)


def _adjustment(sampled: SamplingParams, num: int, num_rows: int) -> Adjustment | None:
    if not sampled.logit_bias and not sampled.has_penalties:
        return None
    adjustment = Adjustment()
    if sampled.logit_bias:
        adjustment.bias = no_bias(num_rows)
        adjustment.bias[:, :num, : len(sampled.logit_bias)] = bias_words(sampled)[:, None]
    if sampled.has_penalties:
        adjustment.counted = not_counted(num_rows)
        adjustment.counted[:2, :num] = np.arange(num)
        adjustment.counted[2:, :num] = penalty_words(sampled)[:, None]
        adjustment.seeds = [one for slot in range(num) for one in seeds(slot, (), (), clears=True)]
    return adjustment
