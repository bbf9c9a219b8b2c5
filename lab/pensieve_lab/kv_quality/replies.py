"""Greedy replies of a model whose KV cache is stored in a format, in batches.

Owns: generation without an engine, one token of every row at a time over a plain array of keys and values.
Does not know: engines, pages or texts.
Called by the programs of KV quality.

Every prompt token is fed as if it had been generated, so that one compiled loop does all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model_defs.attention import FULL, AttentionOptions, refuse_options
from model_defs.registry import Model
from pensieve_jax.decoding.device.structure import ModelStructure
from pensieve_lab.kv_quality.formats import STORES

_AT_ONCE = 32
_LENGTH_STEP = 128  # loops are compiled for multiples of this length


def greedy_replies(
    model: Model,
    prompts: Sequence[np.ndarray],
    store: str,
    num_tokens: int,
    on_batch: Callable[[int], None] = lambda _: None,
) -> list[list[int]]:
    """Return each prompt's reply, up to its end token or `num_tokens`; similar lengths run together."""
    structure, leaves = ModelStructure.split(model)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    replies: dict[int, list[int]] = {}
    limit = model.config.max_position_embeddings
    for start in range(0, len(order), _AT_ONCE):
        some = order[start : start + _AT_ONCE]
        longest = max(len(prompts[index]) for index in some) + num_tokens
        length = min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, limit)
        ids = np.zeros((_AT_ONCE, length), np.int32)
        lengths = np.ones(_AT_ONCE, np.int32)
        for row, index in enumerate(some):
            lengths[row] = len(prompts[index])
            ids[row, : lengths[row]] = prompts[index]
        written = np.asarray(_generate(leaves, ids, lengths, structure=structure, store=store))
        for row, index in enumerate(some):
            reply = written[row, lengths[row] : lengths[row] + num_tokens].tolist()
            replies[index] = _until_end(reply, model.config.eos_token_ids)
        on_batch(len(some))
    return [replies[index] for index in range(len(prompts))]


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def compared(exact: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the number of identical replies, and how far the others agree."""
    pairs = list(zip(exact, other, strict=True))
    shares = [num_equal(one, two) / max(len(one), len(two)) for one, two in pairs]
    num_identical = sum(list(one) == list(two) for one, two in pairs)
    return {
        "num_identical": num_identical,
        "identical_percent": 100 * num_identical / len(pairs),
        "until_first_difference_percent": 100 * float(np.mean(shares)),
    }


def _until_end(reply: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    ends = [place for place, token_id in enumerate(reply) if token_id in eos_token_ids]
    return reply[: ends[0] + 1] if ends else reply


class _RowsAttention:
    """Attention of one token per row, all at one position, over the stored rows so far."""

    def __init__(
        self, caches: Sequence[tuple[jax.Array, jax.Array]], position: jax.Array, store: str
    ) -> None:
        """Take `caches`, K and V [B, S, num_kv_heads, head_dim] of each layer, updated in the list."""
        self.caches, self._position, self._store = list(caches), position, STORES[store]

    def __call__(
        self,
        layer_index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        options: AttentionOptions = FULL,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        refuse_options(options, sinks is not None, "comparisons of stored replies")
        num_rows, _, head_dim = q.shape
        rows = [self._store(one)[:, None] for one in (k, v)]
        keys, values = (
            lax.dynamic_update_slice_in_dim(cache, row, self._position, axis=1)
            for cache, row in zip(self.caches[layer_index], rows, strict=True)
        )
        self.caches[layer_index] = keys, values
        grouped = q.reshape(num_rows, k.shape[1], -1, head_dim) * head_dim**-0.5
        highest = lax.Precision.HIGHEST
        scores = jnp.einsum("bkgd,bskd->bkgs", grouped, keys, precision=highest)
        visible = jnp.arange(keys.shape[1]) <= self._position
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bkgs,bskd->bkgd", weights, values, precision=highest).reshape(q.shape)


@functools.partial(jax.jit, static_argnames=("structure", "store"))
def _generate(
    leaves: list[jax.Array], ids: jax.Array, lengths: jax.Array, *, structure: ModelStructure, store: str
) -> jax.Array:
    """Return i32[B, S]: each prompt and its greedy continuation up to the end of the row."""
    model = structure.merge(leaves)
    config, (num_rows, length) = model.config, ids.shape
    shape = num_rows, length, config.num_kv_heads, config.head_dim
    empty = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.num_layers)]

    def step(carry: Any, position: jax.Array) -> tuple[Any, None]:
        ids, caches = carry
        attention = _RowsAttention(caches, position, store)
        tokens = lax.dynamic_index_in_dim(ids, position, axis=1, keepdims=False)
        hidden = model(tokens, jnp.full(num_rows, position, jnp.int32), attention)
        chosen = model.compute_logits(hidden).argmax(axis=-1).astype(jnp.int32)
        given = lax.dynamic_index_in_dim(ids, position + 1, axis=1, keepdims=False)
        following = jnp.where(position + 1 < lengths, given, chosen)
        return (lax.dynamic_update_index_in_dim(ids, following, position + 1, axis=1), attention.caches), None

    (ids, _), _ = lax.scan(step, (jnp.asarray(ids), empty), jnp.arange(length - 1))
    return ids
