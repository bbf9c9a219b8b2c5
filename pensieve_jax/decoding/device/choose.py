"""The program that ends every step: from logits to a packed result.

Owns: the choice between the sampler of whole rows and that of a split vocabulary, the placement of logits
before it, and the packing of what the host reads.
Does not know: where logits come from, or how an id is chosen (`sampler`, `split_sampler`).

This is a program of its own because the sampler has few shapes and many modes, while a forward pass has many
shapes and no modes. The host knows which mode a batch needs, and a compiled forward pass is expensive.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from model_defs.sharding import constrain, vocabulary_axis
from pensieve_jax.decoding.device import sampler
from pensieve_jax.decoding.device.split_sampler import sample_split
from pensieve_jax.decoding.sampling_rows import SamplerMode, SamplingRows, StepResult


class Scores(NamedTuple):
    """The output of a forward pass."""

    logits: jax.Array  # f32[S, V], of the rows to sample; the vocabulary is split like the embedding table
    rows: SamplingRows[jax.Array]  # how to sample them


def logits_spec(vocab_size: int, mesh: Mesh) -> PartitionSpec:
    """Return how logits are partitioned between `score` and the sampler."""
    return PartitionSpec(None, vocabulary_axis(vocab_size, mesh))


@functools.partial(
    jax.jit, static_argnames=("mode", "num_top", "max_num_samples", "cutoff_backend", "split_over")
)
def choose(
    logits: jax.Array,
    scores: jax.Array,
    rows: SamplingRows[jax.Array],
    words: jax.Array | None = None,
    *,
    mode: SamplerMode,
    num_top: int,
    max_num_samples: int,
    cutoff_backend: str,
    split_over: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample, and pack what the host reads.

    Args:
      logits: f32[S, V] of the model.
      scores: f32[S, V] that the choice uses; the same array if no row of the step adjusts its logits.
      rows: how to sample each row.
      words: words of the devices that exchange sums, or None; see `ExchangeMemory.words`.
      mode: what to compute.
      num_top: number of most likely ids to return.
      max_num_samples: maximum of S over all buckets.
      cutoff_backend: as in `sampler.sample`.
      split_over: devices that each have a part of the vocabulary's logits; None if the logits are whole.

    Returns:
      i32[max_num_samples] ids for the next step (the same length for every bucket), and the packed result
      i32[S * (2 + 2 * K) + 1], whose last word is nonzero if a device lost another. K is `num_top`, or 0 if
      the mode has no most likely ids.
    """
    if split_over is not None and not mode.truncates:
        samples = sample_split(logits, scores, rows, mode=mode, num_top=num_top, mesh=split_over)
    else:
        if split_over is not None:
            # Gather here, so that the search has whole rows.
            logits, scores = constrain(logits, split_over), constrain(scores, split_over)
        samples = sampler.sample(
            logits, scores, rows, mode=mode, num_top=num_top, cutoff_backend=cutoff_backend
        )
    parts = [jnp.ravel(lax.bitcast_convert_type(part, jnp.int32)) for part in samples]
    lost = jnp.zeros(1, jnp.int32) if words is None else words[:, 0].max(keepdims=True)
    next_ids = jnp.pad(samples.token_ids, (0, max_num_samples - samples.token_ids.shape[0]))
    return next_ids, jnp.concatenate([*parts, lost])


def lost_a_device(words: np.ndarray) -> bool:
    """Return whether a device was missing from the sums behind the words that `choose` packed."""
    return bool(words[-1])


def unpack_result(words: np.ndarray, num_samples: int) -> StepResult:
    """Return what `choose` packed, as arrays on the host."""
    num_top = (len(words) // num_samples - 2) // 2
    ends = np.cumsum([num_samples, num_samples, num_samples * num_top])
    token_ids, logprobs, top_ids, top_logprobs = np.split(words[:-1], ends)
    shape = (num_samples, num_top)
    return StepResult(
        token_ids,
        logprobs.view(np.float32),
        top_ids.reshape(shape),
        top_logprobs.view(np.float32).reshape(shape),
    )
