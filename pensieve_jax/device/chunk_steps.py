"""Steps that recompute chunks, and their durations: the measurement behind a cost profile.

Owns: the rows of these steps, the measurement of their attention alone, and the order of measurements.
Does not know: flags, files, or what a cost is used for.
Called by: `commands.profile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs import KV_PAGES_SPEC, TENSOR_AXIS, ModelConfig
from model_defs.attention import attention_options
from pallas_kernels.ragged_paged_attention import TileSpec, ragged_paged_attention
from pensieve_jax.config import EngineConfig
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.device.row_steps import RowSteps, StepRow, Timed, sample_rounds
from pensieve_jax.device.step_programs import bucket_tile_specs
from pensieve_jax.scheduler import StepPlan

_HEADS = PartitionSpec(None, TENSOR_AXIS, None)


@functools.partial(jax.jit, static_argnames=("model", "specs", "mesh"))
def attend_all_layers(
    pools: Sequence[jax.Array],
    q: jax.Array,
    rows: Sequence[jax.Array],
    *,
    model: ModelConfig,
    specs: tuple[TileSpec, ...],
    mesh: Mesh,
) -> jax.Array:
    """Run the attention of every layer for one step's rows and tiles.

    Each layer's output is the next layer's query; otherwise the compiler would drop all layers but the last.
    """
    num_rows = len(rows) - len(specs)

    def one_shard(pools: Sequence[jax.Array], q: jax.Array, rows: Sequence[jax.Array]) -> jax.Array:
        metadata, lists = rows[:num_rows], rows[num_rows:]
        sinks = jnp.zeros(q.shape[1], jnp.float32) if model.has_sinks else None
        for pages, kind in zip(pools, model.kinds, strict=True):
            options, place = attention_options(model, kind), model.windows.index(kind.window)
            # No layer decodes its pages ahead of its turn.
            tiles, q = jax.lax.optimization_barrier((lists[place], q))
            q = ragged_paged_attention(
                q,
                pages,
                *metadata,
                sm_scale=options.scale_of(q.shape[-1]),
                window=options.window,
                softcap=options.softcap,
                sinks=sinks,
                metadata=(specs[place], tiles),
                kv_dtype=specs[place].kv_dtype,
            )
        return q

    in_specs = ([KV_PAGES_SPEC] * len(pools), _HEADS, [PartitionSpec()] * len(rows))
    return jax.shard_map(one_shard, mesh=mesh, in_specs=in_specs, out_specs=_HEADS, check_vma=False)(
        pools, q, rows
    )


class ChunkSteps:
    """Sequences that grow together on a runner, and the steps that recompute their last chunks.

    Attributes:
      rows: the sequences.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, runner: ModelRunner, mesh: Mesh) -> None:
        """Create sequences of random tokens in scattered pages."""
        self._model, self._runner, self._mesh = model, runner, mesh
        self._chunk_tokens = config.cache.chunk_tokens
        self._dtype = runner.dtype
        backend = runner.kernels.attention.name
        self._specs = bucket_tile_specs(model, config, self._dtype, backend, mesh.devices.size)
        self.rows = RowSteps(config, runner, model.vocab_size, config.scheduler.running_limit)

    def plan(self, num_chunks: int, end: int) -> StepPlan:
        """Return a step that recomputes the chunk ending at `end` for the first `num_chunks` sequences."""
        return self.rows.plan([StepRow(i, end - self._chunk_tokens, end) for i in range(num_chunks)])

    def attention(self, plan: StepPlan) -> Timed:
        """Return the attention of all layers of `plan` alone, for random queries over the current pools."""
        num_tokens = plan.layout.num_tokens
        shape = (num_tokens, self._model.num_heads, self._model.head_dim)
        values = np.random.default_rng(0).standard_normal(shape, np.float32)
        q = jax.device_put(values, NamedSharding(self._mesh, _HEADS)).astype(self._dtype)
        metadata = [plan.kv_lens, plan.page_indices, plan.cu_q_lens, plan.num_rows, *plan.tiles]
        rows = jax.device_put(metadata, NamedSharding(self._mesh, PartitionSpec()))
        statics = {"model": self._model, "specs": self._specs[num_tokens], "mesh": self._mesh}

        def launch() -> jax.Array:
            # Every step replaces the pools, so look them up at each launch.
            return attend_all_layers(self._runner.pools, q, rows, **statics)

        return Timed(launch, jax.block_until_ready)


class Sampling(NamedTuple):
    """The number of samples and the target duration of each."""

    repeats: int
    sample_s: float


class Measured(NamedTuple):
    """Medians for one step at one context length, and the spread of its samples."""

    context_len: int
    attention_s: float
    total_s: float
    spread: float  # interquartile range of the whole step over its median


def measure(
    steps: ChunkSteps,
    sampling: Sampling,
    num_chunks: Sequence[int],
    lengths: Sequence[int],
    progress: Callable[[int, int, str], None],
) -> list[list[Measured]]:
    """Measure one step per number of chunks and context length.

    Everything is sampled in rounds (see `sample_rounds`); the first round is discarded.

    Args:
      steps: the sequences and their steps.
      sampling: number and duration of samples.
      num_chunks: the numbers of chunks to recompute in a step.
      lengths: context lengths, ascending from one chunk.
      progress: called with (number done, total number, what was done).

    Returns:
      For each number of chunks, one result per context length.
    """
    chunk, longest = lengths[0], lengths[-1]
    num_steps, num_rounds = longest // chunk, sampling.repeats + 1
    for end in range(chunk, longest + 1, chunk):
        grow = steps.rows.whole(steps.plan(max(num_chunks), end))
        grow.wait(grow.launch())
        progress(end // chunk, num_steps + num_rounds, "state to attend to")
    plans = [steps.plan(count, end) for count in num_chunks for end in lengths]
    timed = [make(plan) for plan in plans for make in (steps.attention, steps.rows.whole)]
    rounds = []
    for samples in sample_rounds(timed, num_rounds, sampling.sample_s):
        rounds.append(samples)
        progress(num_steps + len(rounds), num_steps + num_rounds, "rounds of samples")
    lower, medians, upper = np.percentile(rounds[1:], [25, 50, 75], axis=0).tolist()
    measured = [
        Measured(end, medians[i], medians[i + 1], (upper[i + 1] - lower[i + 1]) / medians[i + 1])
        for i, end in zip(range(0, len(timed), 2), len(num_chunks) * list(lengths), strict=True)
    ]
    return [measured[i : i + len(lengths)] for i in range(0, len(measured), len(lengths))]
