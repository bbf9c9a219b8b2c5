"""Measurement of `pensieve profile`: from its flags to a profile and the rows of its table.

Owns: the measured lengths, the engine's configuration, and the conversion of times to costs.
Does not know: files, plots, or how a step is timed (`device.chunk_steps`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from model_defs import ModelConfig, make_mesh, source_config, source_weights_dtype
from pensieve_jax import CacheConfig, ConfigError, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.assembly import cost_subject, make_runner
from pensieve_jax.cache.order.cost import CostPoint, CostProfile, CostSubject
from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_jax.decoding.device.weights import ProgressBar
from pensieve_jax.device.chunk_steps import ChunkSteps, Measured, Sampling, measure

FLAGS = flags.FLAGS
flags.disclaim_key_flags()
_DEFAULT_MAX_CONTEXT_TOKENS = 16384


def measure_profile(source: str) -> tuple[CostProfile, list[Any]]:
    """Measure the model of `source`; return the profile, and the rows of the table.

    Raises ConfigError or ModelError.
    """
    model = source_config(source, FLAGS.max_position_embeddings)
    lengths = context_lengths(model)
    weights_dtype = source_weights_dtype(source, FLAGS.weights_dtype)
    return profile_of(model, make_steps(model, source, engine_config(lengths[-1])), lengths, weights_dtype)


def cost_points(measured: Sequence[Measured], num_chunks: int) -> tuple[CostPoint, ...]:
    """Return costs per chunk. The rest of a step is its total minus its attention at the shortest context."""
    rest_s = max(measured[0].total_s - measured[0].attention_s, 0.0)
    return tuple(
        CostPoint(m.context_len, m.attention_s / num_chunks, rest_s / num_chunks, m.total_s / num_chunks)
        for m in measured
    )


def context_lengths(model: ModelConfig) -> list[int]:
    """Return one chunk and its doublings within the limits; raise ConfigError for fewer than two lengths."""
    chunk, wanted = FLAGS.chunk_tokens, FLAGS.max_context_tokens
    most = model.max_position_embeddings
    longest = min(most, _DEFAULT_MAX_CONTEXT_TOKENS) if wanted is None else wanted
    if not 2 * chunk <= longest <= most:
        limit = f"from 2 chunks ({2 * chunk}) to the model's {most} positions"
        raise ConfigError("--max_context_tokens", longest, limit)
    return [chunk << i for i in range((longest // chunk).bit_length())]


def engine_config(longest: int) -> EngineConfig:
    """Return a configuration with two buckets and enough pages for all sequences at length `longest`."""
    chunk, num_chunks = FLAGS.chunk_tokens, FLAGS.num_batched_chunks
    return EngineConfig(
        cache=CacheConfig(
            chunk_tokens=chunk, gpu_pages=num_chunks * longest // chunk, kv_dtype=FLAGS.kv_dtype
        ),
        scheduler=SchedulerConfig(
            max_num_running=num_chunks,
            max_num_rows=num_chunks,
            max_num_batched_tokens=num_chunks * chunk,
            token_buckets=(chunk, num_chunks * chunk),
            max_context_tokens=longest,
        ),
        runner=RunnerConfig(
            attention_backend=FLAGS.attention_backend,
            tensor_parallel_size=FLAGS.tensor_parallel_size,
            max_position_embeddings=FLAGS.max_position_embeddings,
            random_seed=FLAGS.random_seed,
            weights_dtype=FLAGS.weights_dtype,
            compilation_cache_dir=FLAGS.compilation_cache_dir or None,
        ),
    )


def make_steps(model: ModelConfig, source: str, config: EngineConfig) -> ChunkSteps:
    """Load the weights and compile both buckets; raise ConfigError or ModelError."""
    try:
        runner, config = make_runner(source, FLAGS.dtype, config, shows_progress())
    except ConfigError as error:
        if error.field != "cache.gpu_pages":
            raise
        limit = f"fewer than the pages of {FLAGS.num_batched_chunks} sequences of --max_context_tokens"
        raise ConfigError("--num_batched_chunks", FLAGS.num_batched_chunks, limit, str(error)) from error
    return ChunkSteps(model, config, runner, make_mesh(FLAGS.tensor_parallel_size))


def subject_of(model: ModelConfig, weights_dtype: str | None) -> CostSubject:
    """Return the profiled model, types, devices and chunk size, from the flags and the format of weights."""
    return cost_subject(
        model,
        dtype=FLAGS.dtype,
        tensor_parallel_size=FLAGS.tensor_parallel_size,
        chunk_tokens=FLAGS.chunk_tokens,
        kv_dtype=FLAGS.kv_dtype,
        weights_dtype=weights_dtype,
    )


def profile_of(
    model: ModelConfig, steps: ChunkSteps, lengths: Sequence[int], weights_dtype: str | None
) -> tuple[CostProfile, list[Any]]:
    """Measure; return the profile, and the rows of the table."""
    num_chunks = {"alone": 1, "in_batch": FLAGS.num_batched_chunks}
    sampling = Sampling(FLAGS.repeats, 1e-3 * FLAGS.sample_ms)
    with ProgressBar("measuring", shows_progress()) as progress:
        measured = measure(steps, sampling, list(num_chunks.values()), lengths, progress)
    by_kind = dict(zip(num_chunks, measured, strict=True))
    profile = CostProfile(
        subject=subject_of(model, weights_dtype),
        model=FLAGS.model,
        jax_version=jax.__version__,
        command=shlex.join([Path(sys.executable).name, *sys.argv]),
        num_batched_chunks=FLAGS.num_batched_chunks,
        cost=FLAGS.cost,
        curves={kind: cost_points(by_kind[kind], count) for kind, count in num_chunks.items()},
    )
    rows = [
        [kind, point.context_len, *(1e3 * seconds for seconds in point[1:]), 100 * one.spread]
        for kind, points in profile.curves.items()
        for point, one in zip(points, by_kind[kind], strict=True)
    ]
    return profile, rows
