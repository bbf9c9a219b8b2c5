"""A quick measurement of the cost of recomputing a chunk, on the runner that is about to serve.

Owns: which steps are timed, and how a chunk's cost follows from them.
Does not know: files, models' names, or what a cost is used for.

Every timed step recomputes one chunk of each of several sequences that together fill the step. For context
length l, as many sequences as the pool can hold end at l; the others end at their first chunk. So even a
small pool measures long contexts, and every length includes the same share of the time for reading weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from pensieve_jax.cache.order.cost import CostPoint
from pensieve_jax.config import EngineConfig
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.row_steps import RowSteps, StepRow, Timed, sample_rounds, scattered_pages
from pensieve_jax.scheduler.plan import PlanLayout

NUM_ROUNDS = 6  # the first is discarded
SAMPLE_S = 0.02
_NUM_CHUNKS = 16  # the number that `pensieve profile` uses
_STATE_TOKENS = 65_536  # tokens computed as context to attend to: some 3 s of a 13B model on an H200


class TimedLength(NamedTuple):
    """One step of a measurement: the number of its sequences that end at `context_len`."""

    context_len: int
    num_long: int


class StartSizes(NamedTuple):
    """The size of a measurement.

    Attributes:
      num_chunks: sequences of every step, each with one chunk.
      lengths: the timed lengths, ascending from one chunk.
    """

    num_chunks: int
    lengths: tuple[TimedLength, ...]


def start_sizes(
    layouts: Mapping[int, PlanLayout], *, gpu_pages: int, chunk_tokens: int, context_tokens: int
) -> StartSizes:
    """Choose the lengths to measure: 1, 4, 16, ... chunks, and the longest power of two chunks.

    Args:
      layouts: plan layouts of the compiled steps, by number of tokens.
      gpu_pages: pages of the pool.
      chunk_tokens: tokens of a chunk.
      context_tokens: the longest context that the engine serves.
    """
    largest = max(layouts)
    wanted = min(_NUM_CHUNKS, largest // chunk_tokens)
    bucket = min(size for size in layouts if size >= wanted * chunk_tokens)  # fill it, so no padding is timed
    num_chunks = min(bucket // chunk_tokens, layouts[bucket].max_num_rows, gpu_pages)
    num_state = max(num_chunks, min(gpu_pages, _STATE_TOKENS // chunk_tokens))

    def num_long(num_pages: int) -> int:
        """Return how many sequences of `num_pages` fit when each other sequence has one page."""
        return num_chunks if num_pages == 1 else min(num_chunks, (num_state - num_chunks) // (num_pages - 1))

    doublings = [1 << i for i in range((context_tokens // chunk_tokens).bit_length()) if num_long(1 << i)]
    sizes = sorted({*doublings[::2], *doublings[-1:]})
    return StartSizes(
        num_chunks, tuple(TimedLength(pages * chunk_tokens, num_long(pages)) for pages in sizes)
    )


def too_few_lengths(
    sizes: StartSizes, *, gpu_pages: int, chunk_tokens: int, context_tokens: int
) -> str | None:
    """Return which limit left fewer than two lengths to measure, as text; None if there are at least two."""
    if len(sizes.lengths) >= 2:
        return None
    if context_tokens < 2 * chunk_tokens:
        return f"contexts of at most {context_tokens:,} tokens are too short"
    if sizes.num_chunks == gpu_pages:
        return f"{gpu_pages:,} pages leave no room beside one chunk of each of {sizes.num_chunks:,} sequences"
    return f"a step of {sizes.num_chunks * chunk_tokens:,} tokens leaves no time for longer contexts"


def measure_start_costs(
    runner: ModelRunner,
    config: EngineConfig,
    vocab_size: int,
    sizes: StartSizes,
    progress: Callable[[int, int, str], None],
) -> tuple[CostPoint, ...]:
    """Time the steps and return a chunk's cost at each length; the pools are empty again afterwards.

    Nothing is compiled. `progress` is called with (number done, total number, what was done).

    Raises:
      StepFailedError: a step failed, or new pools could not be allocated. The runner needs a `reset`.
    """
    steps = _Steps(runner, config, vocab_size, sizes)
    num_all = steps.num_fills + NUM_ROUNDS
    for num_done, fill in enumerate(steps.fills(), start=1):
        fill.wait(fill.launch())
        progress(num_done, num_all, "state to attend to")
    rounds = []
    for samples in sample_rounds(steps.timed(), NUM_ROUNDS, SAMPLE_S):
        rounds.append(samples)
        progress(steps.num_fills + len(rounds), num_all, "rounds of samples")
    runner.reset()  # drops the KV state computed here, and steps count from 0 again
    return cost_points(sizes, np.median(rounds[1:], axis=0).tolist())


def cost_points(sizes: StartSizes, seconds: list[float]) -> tuple[CostPoint, ...]:
    """Return the cost of a chunk at each length, from `seconds`, the duration of each length's step.

    The cost of a first chunk is its share of the shortest step. A longer step takes more time only because
    its long chunks cost more than first chunks.
    """
    shortest_s = seconds[0] / sizes.num_chunks
    points = []
    for length, step_s in zip(sizes.lengths, seconds, strict=True):
        rise_s = max(step_s - seconds[0], 0.0) / length.num_long
        points.append(CostPoint(length.context_len, rise_s, shortest_s, shortest_s + rise_s))
    return tuple(points)


class _Steps:
    """Sequences of a measurement: those that fill the KV state, and those of each length, on shared pages."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, vocab_size: int, sizes: StartSizes) -> None:
        self._chunk_tokens, self._sizes = config.cache.chunk_tokens, sizes
        num, pages = sizes.num_chunks, scattered_pages(config.cache.num_gpu_pages)
        tables = [self._table(pages, length) for length in sizes.lengths]
        num_used = max(int(np.count_nonzero(table)) for table in tables)
        self.num_fills = -(-num_used // num)
        state = np.zeros((num, self.num_fills), np.int64)
        state.flat[:num_used] = pages[:num_used]
        table = np.zeros((num * (1 + len(tables)), max(one.shape[1] for one in (state, *tables))), np.int64)
        for i, one in enumerate((state, *tables)):
            table[i * num : (i + 1) * num, : one.shape[1]] = one
        self._rows = RowSteps(config, runner, vocab_size, len(table), pages=table)

    def fills(self) -> list[Timed]:
        """Return the steps that write the KV state of every page, one chunk of all sequences at a time."""
        chunk = self._chunk_tokens
        return [
            self._whole([StepRow(i, end - chunk, end) for i in range(self._sizes.num_chunks)])
            for end in range(chunk, self.num_fills * chunk + 1, chunk)
        ]

    def timed(self) -> list[Timed]:
        """Return the step of each length."""
        chunk, num = self._chunk_tokens, self._sizes.num_chunks
        timed = []
        for i, length in enumerate(self._sizes.lengths, start=1):
            ends = [length.context_len] * length.num_long + [chunk] * (num - length.num_long)
            timed.append(self._whole([StepRow(i * num + j, end - chunk, end) for j, end in enumerate(ends)]))
        return timed

    def _whole(self, rows: list[StepRow]) -> Timed:
        return self._rows.whole(self._rows.plan(rows))

    def _table(self, pages: np.ndarray, length: TimedLength) -> np.ndarray:
        """Return the pages of every sequence; 0 stands for no page."""
        num_pages, num_long = length.context_len // self._chunk_tokens, length.num_long
        table = np.zeros((self._sizes.num_chunks, num_pages), np.int64)
        table[:num_long] = pages[: num_long * num_pages].reshape(num_long, num_pages)
        num_short = self._sizes.num_chunks - num_long
        table[num_long:, 0] = pages[num_long * num_pages :][:num_short]
        return table
