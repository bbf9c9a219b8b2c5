"""Sampling from logits whose vocabulary is split over devices, without gathering the logits.

Owns: what devices exchange about a row. In one exchange of a few words, each device sends its best score, the
id, and its part of the log-probabilities. If rows are drawn, devices exchange the largest logit before that.
Does not know: how scores are computed; `sampler` does that for a part of the vocabulary as for the whole.

Ids equal those of whole rows to the bit: maxima do not depend on rounding order, and among equal scores the
first device, which has the lower ids, wins. The normalizer of log-probabilities is summed device by device,
so log-probabilities may differ from those of whole rows in the last place. Top-k and top-p are not supported:
their cutoffs are found in two or more dozens of passes, and each would need an exchange, while gathering
128 rows of 32,000 logits is one exchange.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from model_defs.sharding import TENSOR_AXIS
from pensieve_jax.decoding.device.sampler import (
    Samples,
    VocabularyPart,
    decision_scores,
    most_likely,
    no_alternatives,
)
from pensieve_jax.decoding.sampling_rows import SamplerMode, SamplingRows


def sample_split(
    logits: jax.Array,
    scores: jax.Array,
    rows: SamplingRows[jax.Array],
    *,
    mode: SamplerMode,
    num_top: int,
    mesh: Mesh,
) -> Samples:
    """Return what `sampler.sample` returns, for f32[S, V] split over `mesh`; the mode must not truncate."""
    assert not mode.truncates
    shard = jax.shard_map(
        functools.partial(_sample_part, mode=mode, num_top=num_top),
        mesh=mesh,
        in_specs=(PartitionSpec(None, TENSOR_AXIS), PartitionSpec(None, TENSOR_AXIS), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,  # all devices compute the same result from the same words
    )
    samples: Samples = shard(logits, scores, rows)
    return samples


def _sample_part(
    logits: jax.Array, scores: jax.Array, rows: SamplingRows[jax.Array], *, mode: SamplerMode, num_top: int
) -> Samples:
    num_rows, width = logits.shape
    first_id = lax.axis_index(TENSOR_AXIS) * width
    decisive = decision_scores(scores, rows, mode=mode, part=VocabularyPart(first_id, TENSOR_AXIS))
    place = jnp.argmax(decisive, axis=-1)
    highest = logits.max(axis=-1)
    shift = jnp.where(highest > -jnp.inf, highest, 0.0)  # all ids of a part may be impossible
    floats = [
        jnp.take_along_axis(decisive, place[:, None], axis=1),
        jnp.take_along_axis(logits, place[:, None], axis=1),
        highest[:, None],
        jnp.exp(logits - shift[:, None]).sum(axis=-1, keepdims=True),
    ]
    ids = [(first_id + place)[:, None]]
    num_kept = min(num_top, width) if mode.top_logprobs else 0
    if num_kept:
        top_logits, top_places = most_likely(logits, num_kept)
        floats, ids = [*floats, top_logits], [*ids, first_id + top_places]
    words = jnp.concatenate(
        [
            lax.bitcast_convert_type(jnp.concatenate(floats, axis=1), jnp.int32),
            *(i.astype(jnp.int32) for i in ids),
        ],
        axis=1,
    )
    told = lax.all_gather(words, TENSOR_AXIS)  # i32[devices, S, 5 + 2 * num_kept]
    best, chosen, highest, mass = (lax.bitcast_convert_type(told[..., i], jnp.float32) for i in range(4))
    winner = jnp.argmax(best, axis=0)[None]
    token_ids = jnp.take_along_axis(told[..., 4 + num_kept], winner, axis=0)[0]
    most = highest.max(axis=0)
    log_normalizer = most + jnp.log((mass * jnp.exp(highest - most)).sum(axis=0))
    logprobs = jnp.take_along_axis(chosen, winner, axis=0)[0] - log_normalizer
    if not num_kept:
        return Samples(token_ids, logprobs, *no_alternatives(num_rows))
    top = lax.bitcast_convert_type(_rows_of(told[..., 4 : 4 + num_kept]), jnp.float32)
    top_logits, places = lax.top_k(top, num_top)
    top_ids = jnp.take_along_axis(_rows_of(told[..., 5 + num_kept :]), places, axis=1)
    return Samples(token_ids, logprobs, top_ids, top_logits - log_normalizer[:, None])


def _rows_of(reported: jax.Array) -> jax.Array:
    """Reshape [devices, S, K] to [S, devices * K]; equal values keep the order of ids, which is by device."""
    return jnp.moveaxis(reported, 0, 1).reshape(reported.shape[1], -1)
