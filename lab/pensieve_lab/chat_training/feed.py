"""Batches of a training: recorded dialogues, and new conversations around facts.

Owns: which recorded dialogues a step gets, and how the rest of its rows is filled.
Does not know: how conversations are made or encoded, or the model.
Called by `chat_training.loop`.

A batch depends only on the seed and the step, so a training can resume at any step, and any process can make
the batch. Recorded dialogues are few: a step gets a fixed number of them, and each occurs once per epoch.
Conversations around facts are cheap to make, so none is used twice, and those that do not fit are discarded.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Final

import numpy as np

from pensieve_jax import ConfigError
from pensieve_lab.chat_training.examples import Batch, Example, Rows

# after this many misfits in a row a batch counts as full; a few percent of it are padding
_MAX_MISFITS: Final = 12
_BATCHES_AHEAD: Final = 3  # per process that makes batches
_kept: Feed | None = None  # the feed of a worker process


class Feed:
    """Batches of `num_rows` rows of `row_len` tokens."""

    def __init__(
        self,
        recorded: Sequence[Example],
        fresh: Callable[[random.Random], Example],
        *,
        recorded_per_step: int,
        num_rows: int,
        row_len: int,
        seed: int,
    ) -> None:
        """Keep the recorded dialogues; `fresh(rng)` makes another conversation.

        Raises ConfigError naming the flag if a step's dialogues fill its rows alone, or outnumber the rows,
        so that one might find no room.
        """
        mean_len = sum(min(len(one.token_ids), row_len) for one in recorded) / len(recorded)
        most = min(num_rows, int(num_rows * row_len / mean_len / 2))
        if recorded_per_step > most:
            limit = f"at most {most}, with --num_rows={num_rows}, half of them for facts to remember"
            raise ConfigError("--recorded_per_step", recorded_per_step, limit)
        self._recorded, self._fresh, self._per_step = recorded, fresh, recorded_per_step
        self._size, self._seed = (num_rows, row_len), seed

    def batches(self, start_step: int, *, num_workers: int = 0) -> Generator[Batch[np.ndarray]]:
        """Yield the batches from `start_step` on; closing the generator ends the worker processes."""
        steps = itertools.count(start_step)
        return self._from_workers(steps, num_workers) if num_workers else (self.batch(i) for i in steps)

    def _from_workers(self, steps: Iterable[int], num_workers: int) -> Generator[Batch[np.ndarray]]:
        # Spawn, because JAX already has threads here, which makes a fork unsafe.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(num_workers, context, initializer=_keep, initargs=(self,))
        ahead: deque[Future[Batch[np.ndarray]]] = deque()
        try:
            for step in steps:
                ahead.append(pool.submit(_kept_batch, step))
                if len(ahead) > _BATCHES_AHEAD * num_workers:
                    yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def batch(self, step: int) -> Batch[np.ndarray]:
        """Return the batch of one step, counted from 0."""
        rows = Rows(*self._size)
        for example in self._recorded_of(step):
            fits = rows.add(example)
            assert fits  # a row for each always suffices
        rng = random.Random(f"{self._seed} {step}")
        num_misfits = 0
        while num_misfits < _MAX_MISFITS:
            num_misfits = 0 if rows.add(self._fresh(rng)) else num_misfits + 1
        return rows.batch()

    def _recorded_of(self, step: int) -> Iterator[Example]:
        """Yield the dialogues of a step, in an order that is drawn anew for every epoch."""
        start, end = step * self._per_step, (step + 1) * self._per_step
        num_all = len(self._recorded)
        for epoch in range(start // num_all, -(-end // num_all)):
            order = np.random.default_rng([self._seed, epoch]).permutation(num_all)
            first = epoch * num_all
            for index in order[max(start - first, 0) : end - first].tolist():
                yield self._recorded[index]


def _keep(feed: Feed) -> None:
    """Initialize a worker process. It ignores Ctrl-C; its parent shuts it down."""
    global _kept
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _kept = feed


def _kept_batch(step: int) -> Batch[np.ndarray]:
    assert _kept is not None
    return _kept.batch(step)
