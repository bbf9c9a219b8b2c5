"""The program between logits and choice that applies penalties, biases and masks, and the counts it uses.

Owns: the changes of logits, in this order: repetition, frequency and presence penalties, biases, masks. It
also owns the counts of ids on the device: how a slot is seeded, and how a step adds the ids that the previous
step chose, which the host does not know yet.
Does not know: which rows a step has, or how an id is chosen from the scores (`sampler`).

A row's scores depend on its logits, its own parameters and its own ids. Counts, words and biases are whole on
every device. Each device changes its own part of the logits, so nothing is exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model_defs.sharding import TENSOR_AXIS
from pensieve_jax.core.token_masks import WORD_BITS, num_words
from pensieve_jax.decoding.adjustments import MAX_COUNT, PENALTIES


class Counts(NamedTuple):
    """Counts of ids, a row for each slot."""

    replies: jax.Array  # u16[slots, V]: occurrences in the reply
    contexts: jax.Array  # u32[slots, ceil(V / 32)]: a bit for each id that occurs in the context


class Penalties(NamedTuple):
    """Penalties of each row, f32[S, 1]; the fields are those of `PENALTIES`, in their order."""

    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array


def counts_shape(num_slots: int, vocab_size: int) -> Counts:
    """Return shapes and dtypes of the counts."""
    replies: jax.Array = jax.ShapeDtypeStruct((num_slots, vocab_size), np.uint16)  # type: ignore[assignment]
    words = (num_slots, num_words(vocab_size))
    contexts: jax.Array = jax.ShapeDtypeStruct(words, np.uint32)  # type: ignore[assignment]
    return Counts(replies, contexts)


def counts_bytes(num_slots: int, vocab_size: int) -> int:
    """Return the bytes of the counts on each device."""
    return sum(one.size * one.dtype.itemsize for one in counts_shape(num_slots, vocab_size))


@functools.partial(jax.jit, static_argnames=("num_slots", "vocab_size", "mesh"))
def new_counts(*, num_slots: int, vocab_size: int, mesh: Mesh) -> Counts:
    """Return counts of no ids, whole on every device."""
    counts = Counts(*(jnp.zeros(one.shape, one.dtype) for one in counts_shape(num_slots, vocab_size)))
    made: Counts = lax.with_sharding_constraint(counts, NamedSharding(mesh, PartitionSpec()))
    return made


@functools.partial(jax.jit, donate_argnames=("counts",))
def seed(counts: Counts, words: jax.Array) -> Counts:
    """Add ids to the counts of one slot.

    Args:
      counts: counts of all slots; donated, and updated in place.
      words: i32[2 + NUM_SEED_IDS], as `adjustments.seeds` packs them.
    """
    slot, clears, codes = words[0], words[1] > 0, words[2:]
    vocab_size = counts.replies.shape[1]
    is_reply = codes >= 0
    added = jnp.zeros(vocab_size, jnp.int32).at[jnp.where(is_reply, codes, vocab_size)].add(1, mode="drop")
    held = lax.dynamic_index_in_dim(counts.replies, slot, keepdims=False).astype(jnp.int32)
    reply = jnp.minimum(jnp.where(clears, 0, held) + added, MAX_COUNT).astype(jnp.uint16)
    num_bits = counts.contexts.shape[1] * WORD_BITS
    has = jnp.zeros(num_bits, jnp.bool).at[jnp.where(is_reply, num_bits, -1 - codes)].set(True, mode="drop")
    bits = has.reshape(-1, WORD_BITS).astype(jnp.uint32) << jnp.arange(WORD_BITS, dtype=jnp.uint32)
    marked = lax.dynamic_index_in_dim(counts.contexts, slot, keepdims=False)
    context = jnp.where(clears, 0, marked) | bits.sum(axis=1, dtype=jnp.uint32)
    return Counts(
        lax.dynamic_update_index_in_dim(counts.replies, reply, slot, 0),
        lax.dynamic_update_index_in_dim(counts.contexts, context, slot, 0),
    )


@functools.partial(jax.jit, static_argnames=("split_over",))
def adjust(
    logits: jax.Array, words: jax.Array, bias: jax.Array, *, split_over: Mesh | None = None
) -> jax.Array:
    """Return the scores of rows without penalties.

    Args:
      logits: f32[S, V].
      words: i32[S, ceil(V / 32)]: bit `id % 32` of word `id // 32` is set if the row may choose the id.
      bias: i32[2, S, MAX_BIASED_IDS], as in `Adjustment`.
      split_over: devices that each have a part of the vocabulary's logits; None if the logits are whole.
    """
    return _on_parts(_biased_and_masked, split_over)(logits, words, bias)


@functools.partial(jax.jit, static_argnames=("split_over",), donate_argnames=("counts",))
def adjust_counted(
    logits: jax.Array,
    words: jax.Array,
    bias: jax.Array,
    counts: Counts,
    counted: jax.Array,
    prev_ids: jax.Array,
    *,
    split_over: Mesh | None = None,
) -> tuple[jax.Array, Counts]:
    """Return the scores of a step with penalties, and the counts with the ids in flight.

    Args:
      logits, words, bias, split_over: as in `adjust`.
      counts: counts of all slots; donated, and updated in place.
      counted: i32[2 + len(PENALTIES), S], as in `Adjustment`.
      prev_ids: i32[at least S], the ids that the previous step chose.
    """
    slots, prev_samples = counted[0], counted[1]
    penalties = Penalties(*lax.bitcast_convert_type(counted[2:], jnp.float32)[..., None])
    counts = _with_ids_in_flight(counts, slots, prev_samples, prev_ids)
    rows = jnp.maximum(slots, 0)  # a row without a slot has penalties that change nothing
    shard = _on_parts(_penalized_part, split_over)
    return shard(logits, words, bias, counts, rows, penalties), counts


def penalized(
    logits: jax.Array, num_in_reply: jax.Array, is_in_context: jax.Array, penalties: Penalties
) -> jax.Array:
    """Return f32[S, V] logits with penalties.

    Args:
      logits: f32[S, V].
      num_in_reply: u16[S, V], occurrences of each id in the row's reply.
      is_in_context: bool[S, V], whether the row's context has the id; its reply need not be included.
      penalties: of each row.
    """
    is_in_reply = num_in_reply > 0
    repetition = penalties.repetition_penalty
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    scores = jnp.where(is_in_context | is_in_reply, repeated, logits)
    scores -= penalties.frequency_penalty * num_in_reply.astype(jnp.float32)
    return scores - jnp.where(is_in_reply, penalties.presence_penalty, 0.0)


def biased(scores: jax.Array, bias: jax.Array, first_id: int | jax.Array = 0) -> jax.Array:
    """Return scores f32[S, V] of the ids from `first_id` on, with biases i32[2, S, B] added."""
    width = scores.shape[1]
    places = bias[0] - first_id
    is_here = (bias[0] >= 0) & (places >= 0) & (places < width)
    places = jnp.where(is_here, places, width)  # out of bounds, hence dropped
    rows = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    return scores.at[rows, places].add(lax.bitcast_convert_type(bias[1], jnp.float32), mode="drop")


def has_bits(words: jax.Array, first_id: int | jax.Array, num_ids: int) -> jax.Array:
    """Return bool[S, num_ids], the bits of the ids from `first_id` on in [S, ceil(V / 32)] words."""
    bits = (words[:, :, None] >> jnp.arange(WORD_BITS, dtype=words.dtype)) & 1
    whole = bits.reshape(words.shape[0], -1)
    return lax.dynamic_slice_in_dim(whole, first_id, num_ids, axis=1) == 1


def _biased_and_masked(
    first_id: int | jax.Array, scores: jax.Array, words: jax.Array, bias: jax.Array
) -> jax.Array:
    allowed = has_bits(words, first_id, scores.shape[1])
    return jnp.where(allowed, biased(scores, bias, first_id), -jnp.inf)


def _penalized_part(
    first_id: int | jax.Array,
    logits: jax.Array,
    words: jax.Array,
    bias: jax.Array,
    counts: Counts,
    slots: jax.Array,
    penalties: Penalties,
) -> jax.Array:
    width = logits.shape[1]
    # One gather that reads only this device's ids.
    num_in_reply = jax.vmap(lambda slot: lax.dynamic_slice(counts.replies, (slot, first_id), (1, width))[0])(
        slots
    )
    is_in_context = has_bits(counts.contexts[slots], first_id, width)
    scores = penalized(logits, num_in_reply, is_in_context, penalties)
    return _biased_and_masked(first_id, scores, words, bias)


def _with_ids_in_flight(
    counts: Counts, slots: jax.Array, prev_samples: jax.Array, prev_ids: jax.Array
) -> Counts:
    """Count the ids that the previous step chose for these rows."""
    num_slots = counts.replies.shape[0]
    ids = prev_ids[jnp.maximum(prev_samples, 0)]
    held = counts.replies[jnp.maximum(slots, 0), ids]
    more = jnp.where(held < MAX_COUNT, held + np.uint16(1), held)
    places = jnp.where((prev_samples >= 0) & (slots >= 0), slots, num_slots)  # out of bounds, hence dropped
    return counts._replace(replies=counts.replies.at[places, ids].set(more, mode="drop"))


def _on_parts(work: Callable[..., jax.Array], split_over: Mesh | None) -> Callable[..., jax.Array]:
    """Return `work` on whole logits, or on each device's part of them; its other arguments are whole.

    `work` gets the part's first id, the logits, and its other arguments.
    """
    if split_over is None:
        return functools.partial(work, 0)

    def part(logits: jax.Array, *others: jax.Array) -> jax.Array:
        return work(lax.axis_index(TENSOR_AXIS) * logits.shape[1], logits, *others)

    spec = PartitionSpec(None, TENSOR_AXIS)

    def run(logits: jax.Array, *others: jax.Array) -> jax.Array:
        shard = jax.shard_map(
            part,
            mesh=split_over,
            in_specs=(spec, *[PartitionSpec()] * len(others)),
            out_specs=spec,
            check_vma=False,
        )
        scores: jax.Array = shard(logits, *others)
        return scores

    return run


assert Penalties._fields == tuple(PENALTIES)
