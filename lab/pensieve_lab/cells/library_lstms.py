"""Step times of other LSTMs: cuDNN through JAX, and torch, over contiguous batches of equal sentences.

Owns: their calls and their precision.
Does not know: this project's cells.
Called by `programs.benchmark_cells`.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import rnn

from pensieve_jax.device.row_steps import Timed

NUM_STEPS = 24  # the mean length of the thesis' sentences
_SAMPLES, _LAUNCHES = 5, 10


def available(dtype: str) -> list[str]:
    """Return the baselines that run on this GPU: cuDNN through JAX (float32 only), and torch if installed."""
    if jax.default_backend() != "gpu":
        return []
    has_torch = importlib.util.find_spec("torch") is not None
    return [*(["cudnn"] if dtype == "float32" else []), *(["torch"] if has_torch else [])]


def step_s(peer: str, *, hidden_size: int, dtype: str, batch_size: int) -> float:
    """Return the seconds of one step, the median of `_SAMPLES` samples."""
    once = {"cudnn": _cudnn, "torch": _torch}[peer](hidden_size, dtype, batch_size)
    once()
    return statistics.median(once() for _ in range(_SAMPLES)) / NUM_STEPS


def _cudnn(hidden_size: int, dtype: str, batch_size: int) -> Callable[[], float]:
    num = rnn.get_num_params_in_lstm(hidden_size, hidden_size, 1, False)
    kind = jnp.dtype(dtype)
    x = jnp.ones((batch_size, NUM_STEPS, hidden_size), kind)
    start = jnp.zeros((1, batch_size, hidden_size), kind)
    weights, lengths = jnp.full(num, 0.01, kind), jnp.full(batch_size, NUM_STEPS, jnp.int32)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        precision = lax.Precision.HIGHEST if dtype == "float32" else None
        return rnn.lstm(
            x, start, start, weights, lengths, hidden_size, hidden_size, 1, 0.0, False, precision
        )[1]

    timed = Timed(lambda: run(x), lambda result: result.block_until_ready())
    return lambda: timed.sample_s(_LAUNCHES)


def _torch(hidden_size: int, dtype: str, batch_size: int) -> Callable[[], float]:
    torch: Any = importlib.import_module("torch")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    options = {"device": "cuda", "dtype": getattr(torch, dtype)}
    module = torch.nn.LSTM(hidden_size, hidden_size, **options)
    x = torch.ones(NUM_STEPS, batch_size, hidden_size, **options)

    def once() -> float:
        with torch.inference_mode():
            module(x)
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            for _ in range(_LAUNCHES):
                module(x)
            torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / _LAUNCHES

    return once
