"""From logits to a packed result: the program that ends every step.

Owns: the choice between a sampler of whole rows and one of a split vocabulary, how logits lie on the devices
before it, and the packing of what the host reads.
Does not know: where logits come from, or how an id is chosen (`sampler`, `split_sampler`).

The choice is a program of its own because the sampler has few shapes and many modes, and a forward pass is
the other way round: what a batch needs of the sampler is known on the host, and a compiled forward pass is
costly.
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
    """What a forward pass ends with."""

    logits: jax.Array  # f32[S, V], of the rows to sample; the vocabulary is split as the table is
    rows: SamplingRows[jax.Array]  # how to sample them


def logits_spec(vocab_size: int, mesh: Mesh) -> PartitionSpec:
    """How logits lie on the devices between `score` and the sampler."""
    return PartitionSpec(None, vocabulary_axis(vocab_size, mesh))


@functools.partial(
    jax.jit, static_argnames=("mode", "num_top", "max_num_samples", "cutoff_backend", "split_over")
)
def choose(
    logits: jax.Array,
    rows: SamplingRows[jax.Array],
    words: jax.Array | None = None,
    *,
    mode: SamplerMode,
    num_top: int,
    max_num_samples: int,
    cutoff_backend: str,
    split_over: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sample, and pack what the host wants to know.

    Args:
      logits: f32[S, V].
      rows: how to sample each of them.
      words: of the devices that exchange, or None; see `ExchangeMemory.words`.
      mode: what has to be computed.
      num_top: most likely ids to return.
      max_num_samples: of all buckets.
      cutoff_backend: as of `sampler.sample`.
      split_over: devices that each have a part of the vocabulary's logits; None: the logits are whole.

    Returns:
      i32[max_num_samples] ids for the next step, the same length whatever the bucket, and the packed
      result i32[S * (2 + 2 * num_top) + 1], whose last word is not 0 if a device lost another.
    """
    if split_over is not None and not mode.truncates:
        samples = sample_split(logits, rows, mode=mode, num_top=num_top, mesh=split_over)
    else:
        if split_over is not None:
            logits = constrain(logits, split_over)  # gathered once, for a search of whole rows
        samples = sampler.sample(logits, rows, mode=mode, num_top=num_top, cutoff_backend=cutoff_backend)
    parts = [jnp.ravel(lax.bitcast_convert_type(part, jnp.int32)) for part in samples]
    lost = jnp.zeros(1, jnp.int32) if words is None else words[:, 0].max(keepdims=True)
    next_ids = jnp.pad(samples.token_ids, (0, max_num_samples - samples.token_ids.shape[0]))
    return next_ids, jnp.concatenate([*parts, lost])


def lost_a_device(words: np.ndarray) -> bool:
    """Whether what `choose` packed is of sums that a device did not take part in."""
    return bool(words[-1])


def unpack_result(words: np.ndarray, num_samples: int, num_top: int) -> StepResult:
    """The host's view of what `choose` packed."""
    ends = np.cumsum([num_samples, num_samples, num_samples * num_top])
    token_ids, logprobs, top_ids, top_logprobs = np.split(words[:-1], ends)
    shape = (num_samples, num_top)
    return StepResult(
        token_ids,
        logprobs.view(np.float32),
        top_ids.reshape(shape),
        top_logprobs.view(np.float32).reshape(shape),
    )
