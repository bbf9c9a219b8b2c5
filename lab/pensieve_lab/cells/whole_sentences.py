"""The strongest padding baseline: one call of cuDNN's LSTM, or of a scan, computes a batch of sentences.

Owns: the buckets of sentences by length, the batches made of a bucket, and their compiled programs.
Does not know: cells or an engine.
Called by the programs of cellular batching.

The bucket that holds the oldest sentence runs next, with as many of its sentences as fit into a batch. They
are padded to the length of the longest, rounded up to a compiled length. Up to two batches are in flight.
cuDNN skips the padding, since it receives each sentence's length.
"""

from __future__ import annotations

import functools
import gc
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import rnn
from tqdm import tqdm

from model_defs.recurrent import LSTM
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.runtime.compilation import CompilationJob, compile_all
from pensieve_jax.runtime.program import Program
from pensieve_lab.cells.simulation import SimulationResult

LENGTHS = (*range(2, 33, 2), *range(36, 65, 4), *range(72, 129, 8), 160, 192, 256, 330)
_IN_FLIGHT, _MAX_ADMITTED_AT_ONCE = 2, 1024


def limit_of_words() -> str:
    """Return the end of the error message about a sentence that is too long."""
    return f"at most {LENGTHS[-1]} words for whole sentences; leave them out of --systems for longer ones"


def _check(lengths: Sequence[int] | np.ndarray) -> None:
    if max(lengths) > LENGTHS[-1]:
        raise ConfigError("the longest sentence", int(max(lengths)), limit_of_words())


class _Batch(NamedTuple):
    indices: np.ndarray  # of its sentences
    result: Any  # `Any` because JAX's type lacks `is_ready`


class WholeSentences:
    """One LSTM, compiled for every batch size and length."""

    def __init__(self, model: LSTM, batch_sizes: Sequence[int], *, shown: bool) -> None:
        """Compile all programs.

        Args:
          model: the LSTM to run.
          batch_sizes: in rising order.
          shown: whether to show a progress bar.
        """
        self._batch_sizes = tuple(batch_sizes)
        device = jax.local_devices()[0]
        is_cudnn = device.platform == "gpu" and model.config.dtype == "float32"
        self.name = "padding, cuDNN" if is_cudnn else "padding, scan"
        compute = _cudnn(model) if is_cudnn else functools.partial(_scan, model)
        self._arrays = _cudnn_arrays(model) if is_cudnn else ()
        run = jax.jit(compute)
        self._programs: dict[tuple[int, int], Any] = {}
        jobs = []
        for size in self._batch_sizes:
            for length in LENGTHS:
                words = jax.ShapeDtypeStruct((size, length), np.int32)
                lengths = jax.ShapeDtypeStruct((size,), np.int32)
                program = Program(run, (self._arrays, words, lengths), {})
                keep = functools.partial(self._programs.__setitem__, (size, length))
                jobs.append(CompilationJob(f"{size} x {length}", program, keep))
        with tqdm(total=len(jobs), desc="compiling", disable=not shown, leave=False) as bar:
            for _ in compile_all(jobs):
                bar.update()
        for size in self._batch_sizes:  # the first call of a size is slower
            self.run([np.ones(1, np.int32)] * size)

    def run(self, sentences: Sequence[np.ndarray]) -> np.ndarray:
        """Return each sentence's state after its last word, f32[n, hidden]; n is at most the largest batch.

        Raises:
          ConfigError: see `serve`.
        """
        _check([len(one) for one in sentences])
        return np.asarray(self._launch(sentences))[: len(sentences)]

    def serve(
        self, sentences: Sequence[np.ndarray], arrival_s: np.ndarray, *, width: int
    ) -> SimulationResult:
        """Serve all sentences like `real_time.serve`, with buckets of `width` words.

        Raises:
          ConfigError: a sentence is longer than the largest of `LENGTHS`.
        """
        lengths = np.array([len(one) for one in sentences])
        _check(lengths)
        gc.collect()
        gc.freeze()
        try:
            begin_s, end_s = self._serve(sentences, lengths, arrival_s, width)
        finally:
            gc.unfreeze()
        return SimulationResult(arrival_s, begin_s, end_s)

    def _serve(
        self, sentences: Sequence[np.ndarray], lengths: np.ndarray, arrival_s: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the times at which each sentence was launched and completed."""
        num = len(sentences)
        buckets: dict[int, deque[int]] = {}
        begin_s, end_s = np.full(num, np.nan), np.full(num, np.nan)
        in_flight: deque[_Batch] = deque()
        num_sent = num_ended = 0
        start_s = time.perf_counter()
        while num_ended < num:
            now_s = time.perf_counter() - start_s
            num_due = min(int(np.searchsorted(arrival_s, now_s, "right")), num_sent + _MAX_ADMITTED_AT_ONCE)
            for index in range(num_sent, num_due):
                buckets.setdefault((int(lengths[index]) - 1) // width, deque()).append(index)
            num_sent = max(num_sent, num_due)
            waiting = [queue for queue in buckets.values() if queue]
            if waiting and len(in_flight) < _IN_FLIGHT:
                queue = min(waiting, key=lambda one: one[0])
                size = min(len(queue), self._batch_sizes[-1])
                indices = np.array([queue.popleft() for _ in range(size)])
                begin_s[indices] = time.perf_counter() - start_s
                in_flight.append(_Batch(indices, self._launch([sentences[index] for index in indices])))
            while in_flight and in_flight[0].result.is_ready():
                batch = in_flight.popleft()
                np.asarray(batch.result)
                end_s[batch.indices] = time.perf_counter() - start_s
                num_ended += len(batch.indices)
        return begin_s, end_s

    def _launch(self, sentences: Sequence[np.ndarray]) -> jax.Array:
        lengths = [len(one) for one in sentences]
        size = self._batch_sizes[bisect_left(self._batch_sizes, len(sentences))]
        length = LENGTHS[bisect_left(LENGTHS, max(lengths))]
        words = np.zeros((size, length), np.int32)
        for row, one in zip(words, sentences, strict=False):
            row[: len(one)] = one
        padded = np.ones(size, np.int32)
        padded[: len(lengths)] = lengths
        result: jax.Array = self._programs[size, length](self._arrays, words, padded)
        result.copy_to_host_async()
        return result


def _cudnn_arrays(model: LSTM) -> tuple[jax.Array, ...]:
    """Return the embedding table and cuDNN's flat weight array: input weights, state weights, two biases."""
    gates, width = model.lstm.weight[...], model.config.embedding_size
    bias = model.lstm.bias
    biases = jnp.zeros(gates.shape[1]) if bias is None else bias[...]
    parts = (gates[:width].T, gates[width:].T, biases, jnp.zeros_like(biases))
    return model.embedding.weight[...], jnp.concatenate([part.ravel() for part in parts])


def _cudnn(model: LSTM) -> Callable[..., jax.Array]:
    width, hidden = model.config.embedding_size, model.config.hidden_size

    def run(arrays: tuple[jax.Array, ...], words: jax.Array, lengths: jax.Array) -> jax.Array:
        table, weights = arrays
        start = jnp.zeros((1, words.shape[0], hidden))
        x = table[words]
        precision = lax.Precision.HIGHEST
        return rnn.lstm(x, start, start, weights, lengths, width, hidden, 1, 0.0, False, precision)[1][0]

    return run


def _scan(model: LSTM, _: tuple[()], words: jax.Array, lengths: jax.Array) -> jax.Array:
    zeros = {name: jnp.zeros((words.shape[0], *one.shape), one.dtype) for name, one in model.state.items()}

    def step(state: dict[str, jax.Array], position: jax.Array) -> tuple[dict[str, jax.Array], None]:
        after = model((state,), words[:, position])
        is_word = (position < lengths)[:, None]
        return {name: jnp.where(is_word, after[name], state[name]) for name in state}, None

    state, _none = lax.scan(step, zeros, jnp.arange(words.shape[1]))
    return state["h"].astype(jnp.float32)
