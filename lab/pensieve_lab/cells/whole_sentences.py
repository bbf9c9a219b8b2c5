"""The strongest padding: sentences of a bucket in one call of cuDNN's LSTM, or of a scan without cuDNN.

Owns: the buckets, the batches made of them, and their programs.
Does not know: cells or an engine.
Called by the programs of cells.

The bucket of the oldest sentence is next. As many of its sentences as fit run together, padded to the longest
one rounded up to a compiled length. Two batches are in flight. cuDNN receives each sentence's length, and its
weights are those of the LSTM.
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
_IN_FLIGHT, _MOST_AT_ONCE = 2, 1024


def limit_of_words() -> str:
    """Return the limit that error messages give for longer sentences."""
    return f"at most {LENGTHS[-1]} words, for which whole sentences are compiled: choose others by --systems"


def _check(lengths: Sequence[int] | np.ndarray) -> None:
    if max(lengths) > LENGTHS[-1]:
        raise ConfigError("the longest sentence", int(max(lengths)), limit_of_words())


class _Batch(NamedTuple):
    places: np.ndarray  # indices of its sentences
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
        """Return f32[n, hidden], each sentence's state after its last word; n is at most the largest batch.

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
        """Return when each sentence began and ended."""
        num = len(sentences)
        buckets: dict[int, deque[int]] = {}
        begin_s, end_s = np.full(num, np.nan), np.full(num, np.nan)
        flying: deque[_Batch] = deque()
        num_sent = num_ended = 0
        zero_s = time.perf_counter()
        while num_ended < num:
            now_s = time.perf_counter() - zero_s
            num_due = min(int(np.searchsorted(arrival_s, now_s, "right")), num_sent + _MOST_AT_ONCE)
            for place in range(num_sent, num_due):
                buckets.setdefault((int(lengths[place]) - 1) // width, deque()).append(place)
            num_sent = max(num_sent, num_due)
            waiting = [line for line in buckets.values() if line]
            if waiting and len(flying) < _IN_FLIGHT:
                line = min(waiting, key=lambda one: one[0])
                most = min(len(line), self._batch_sizes[-1])
                places = np.array([line.popleft() for _ in range(most)])
                begin_s[places] = time.perf_counter() - zero_s
                flying.append(_Batch(places, self._launch([sentences[place] for place in places])))
            while flying and flying[0].result.is_ready():
                batch = flying.popleft()
                np.asarray(batch.result)
                end_s[batch.places] = time.perf_counter() - zero_s
                num_ended += len(batch.places)
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
    """Return the embedding table, and cuDNN's single weight array: of inputs, of states, and two biases."""
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

    def step(state: dict[str, jax.Array], place: jax.Array) -> tuple[dict[str, jax.Array], None]:
        after = model((state,), words[:, place])
        is_there = (place < lengths)[:, None]
        return {name: jnp.where(is_there, after[name], state[name]) for name in state}, None

    state, _none = lax.scan(step, zeros, jnp.arange(words.shape[1]))
    return state["h"].astype(jnp.float32)
