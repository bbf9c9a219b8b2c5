"""Scores of given tokens on the device: from logits to log-probabilities, ranks and most likely ids.

Owns: the computation, and the words in which its result goes to the host.
Does not know: which tokens are scored, or how logits are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pensieve_jax.decoding.prompt_rows import PromptScores


def score_targets(logits: jax.Array, targets: jax.Array, *, num_top: int) -> jax.Array:
    """Return the packed scores of one id per row, i32[N, 2 + 2 * num_top].

    Args:
      logits: f32[N, V], whole rows.
      targets: i32[N], the ids to score.
      num_top: K, the number of most likely ids to return; at most V.
    """
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.where(ids == targets[:, None], logits, 0.0).sum(axis=-1)
    is_before = (logits > target[:, None]) | ((logits == target[:, None]) & (ids < targets[:, None]))
    ranks = 1 + is_before.sum(axis=-1, dtype=jnp.int32)
    top_logits, top_ids = lax.top_k(logits, num_top)
    floats = jnp.concatenate([target[:, None], top_logits], axis=1) - log_normalizer[:, None]
    words = lax.bitcast_convert_type(floats, jnp.int32)
    return jnp.concatenate([words[:, :1], ranks[:, None], top_ids.astype(jnp.int32), words[:, 1:]], axis=1)


def unpack_scores(words: Sequence[np.ndarray], num_rows: int, num_top: int) -> PromptScores:
    """Return the scores of the first `num_rows` rows that runs of `score_targets` packed."""
    rows = np.concatenate(words)[:num_rows]
    logprobs, ranks, top_ids, top_logprobs = np.split(rows, [1, 2, 2 + num_top], axis=1)
    return PromptScores(
        np.ascontiguousarray(logprobs[:, 0]).view(np.float32),
        ranks[:, 0],
        top_ids,
        np.ascontiguousarray(top_logprobs).view(np.float32),
    )
