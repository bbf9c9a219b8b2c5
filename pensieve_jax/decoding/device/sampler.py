"""Sampling on the device: from logits to token ids.

Owns: greedy and random choice, the min-p, top-k and top-p cuts, banned ids and log-probabilities; and the set
of ids that are possible choices under rounding. A row's id depends only on (seed, absolute position, scores).
It does not depend on the batch, the row's index in it, padding, or sharding of the vocabulary, for two
reasons. The noise is a counter-based hash of (seed, position, token id), implemented here because the bits of
`jax.random` depend on global flags. The top-k and top-p cuts are found by integer sums, which do not depend
on the order of additions.
Does not know: requests, plans, models or the KV cache; nor how a cutoff is found (`sampling_cutoffs`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.devices import on_every_device
from pallas_kernels.sampling_cutoffs import MASS_BITS, cutoffs
from pensieve_jax.decoding.sampling_rows import SamplerMode, SamplingRows

_WORD = np.uint32
_MAX_TOP_K = 16
_MAX_SCORE_ERROR = 60.0  # float32 can represent e**60 and e**-60


class VocabularyPart(NamedTuple):
    """The ids of one device: from `first_id` on, if the vocabulary is split over the mesh axis `axis`."""

    first_id: int | jax.Array = 0
    axis: str | None = None


WHOLE = VocabularyPart()


class Samples(NamedTuple):
    """The chosen ids; K is 0 if the mode does not compute the most likely ids."""

    token_ids: jax.Array  # i32[S]
    # f32[S]: of the chosen ids, without temperature, cuts or bans. Not finite if a logit of the row is NaN or
    # infinity, or if no id is possible: the normalizer and the chosen logit show it at no further cost.
    logprobs: jax.Array
    top_ids: jax.Array  # i32[S, K]: most likely first, lowest id first on ties
    top_logprobs: jax.Array  # f32[S, K]


def all_modes() -> tuple[SamplerMode, ...]:
    """Return every mode that computes something different, cheapest first."""
    choices = ((False, False), (True, False), (True, True))
    return tuple(SamplerMode(*choice, top) for top in (False, True) for choice in choices)


def mode_for(draws: bool, truncates: bool, top_logprobs: bool) -> SamplerMode:
    """Return the member of `all_modes` for these needs; if every row is greedy, cuts do not matter."""
    return SamplerMode(draws, draws and truncates, top_logprobs)


def sample(
    logits: jax.Array,
    scores: jax.Array,
    rows: SamplingRows[jax.Array],
    *,
    mode: SamplerMode,
    num_top: int,
    cutoff_backend: str = "xla",
) -> Samples:
    """Choose one id per row.

    Cuts apply in this order: banned ids, temperature, min-p, top-k, then top-p over what top-k left. Ids that
    tie with the last one kept by a cut are kept as well, and the most likely id is always kept.

    Args:
      logits: f32[S, V] of the model, V at most 2**19; may be sharded over the vocabulary. Log-probabilities
        and the most likely ids are theirs.
      scores: f32[S, V], the logits after penalties, biases and masks, which the choice uses; the same array
        if no row has any.
      rows: how to sample each row.
      mode: what to compute; it must cover what `rows` need.
      num_top: K, the number of most likely ids to return; at most V.
      cutoff_backend: name of the back end in `sampling_cutoffs` that finds the cuts; all give the same bits.
    """
    token_ids = jnp.argmax(
        decision_scores(scores, rows, mode=mode, cutoff_backend=cutoff_backend), axis=-1
    ).astype(jnp.int32)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum instead of a gather: it stays local where the vocabulary is sharded.
    is_chosen = lax.broadcasted_iota(jnp.int32, logits.shape, 1) == token_ids[:, None]
    chosen = jnp.where(is_chosen, logits, 0.0).sum(axis=-1)
    if mode.top_logprobs:
        top_logits, top_ids = most_likely(logits, num_top)
        top_logprobs = top_logits - log_normalizer[:, None]
    else:
        top_ids, top_logprobs = no_alternatives(logits.shape[0])
    return Samples(token_ids, chosen - log_normalizer, top_ids, top_logprobs)


def most_likely(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return f32[S, count] logits and i32[S, count] ids: the highest first, the lowest id first on ties.

    `lax.top_k` is called for at most 16 at a time, since its GPU kernel has no more, and sorting is slow.
    """
    lowest = np.finfo(np.float32).min
    values, ids = lax.top_k(logits, min(count, _MAX_TOP_K))
    # A logit of -inf must stay above the ids that are taken.
    left = jnp.maximum(logits, lowest)
    token_iota = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    while values.shape[1] < count:
        last, last_id = values[:, -1:], ids[:, -1:]
        is_taken = (logits > last) | ((logits == last) & (token_iota <= last_id))
        more, more_ids = lax.top_k(
            jnp.where(is_taken, -jnp.inf, left), min(count - values.shape[1], _MAX_TOP_K)
        )
        more = jnp.where(more == lowest, -jnp.inf, more)
        values, ids = jnp.concatenate([values, more], axis=1), jnp.concatenate([ids, more_ids], axis=1)
    return values, ids.astype(jnp.int32)


def no_alternatives(num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return `Samples.top_ids` and `Samples.top_logprobs` for a mode that does not compute them."""
    return jnp.zeros((num_rows, 0), jnp.int32), jnp.zeros((num_rows, 0), jnp.float32)


def decision_scores(
    scores: jax.Array,
    rows: SamplingRows[jax.Array],
    *,
    mode: SamplerMode,
    cutoff_backend: str = "xla",
    part: VocabularyPart = WHOLE,
) -> jax.Array:
    """Return decision scores f32[S, V]; each row's id is the first maximum. Arguments are those of `sample`.

    Those of a greedy row are its `scores`. Those of a random row are its `scores`, shifted to a maximum of 0
    and divided by the temperature, plus noise. Banned and cut ids have -inf. With a `part` of the vocabulary,
    its ids get the same result as with the whole one; cuts need whole rows.
    """
    allowed = _allowed(scores, rows, part)
    if not mode.draws:
        return allowed
    scaled = _likely(_scaled(allowed, rows, part), rows)
    if mode.truncates:
        assert part is WHOLE
        scaled = _truncate(scaled, *_cuts(rows), cutoff_backend)
    return _with_noise(scaled, allowed, rows, part)


def possible_choices(
    scores: jax.Array, rows: SamplingRows[jax.Array], *, mode: SamplerMode, margin: jax.Array
) -> jax.Array:
    """Return bool[S, V]: ids that a row may choose if differences of scores are off by up to `margin`.

    For callers whose scores are rounded differently from those that the choice used. An id is possible if it
    may survive the cuts, and if no certain survivor is better by more than the margin. Of the ids within the
    margin of the last certain survivor, at least one survives as well. Relative to each other, masses are off
    by up to a factor of e**(margin / temperature), and so are the odds p / (1 - p) at which top-p cuts.
    Masses are whole units, so the smallest ones may be off by more.

    Args:
      scores: finite, or -inf; otherwise as in `sample`.
      rows: as in `sample`.
      mode: as in `sample`.
      margin: f32[].
    """
    allowed = _allowed(scores, rows, WHOLE)
    may_stay = allowed > -jnp.inf
    if not mode.draws:
        return may_stay & (allowed >= allowed.max(axis=-1, keepdims=True) - margin)
    off = jnp.where(rows.temperature > 0, margin / _divisors(rows), margin)[:, None]
    scaled = _scaled(allowed, rows, WHOLE)
    noised = _with_noise(scaled, allowed, rows, WHOLE)
    draws = rows.temperature[:, None] > 0
    edge = jnp.where(draws, _least_likely(rows), -jnp.inf)
    may_stay &= ~(scaled < edge - off)
    is_sure = ~(scaled < edge + off)
    # Of the ids within the margin of the best, the one with the highest true score survives. Rounding hides
    # which one that is, so use the lowest noised score among them.
    reached = _lowest_of(scaled >= -off, noised)
    if mode.truncates:
        least, last_sure = _outermost_cuts(scaled, rows, off, edge)
        may_stay &= ~(scaled < least)
        is_sure &= ~(scaled < last_sure + off)
        # The same holds around the last certain survivor of the other cuts, if min-p keeps all of these ids.
        around = _lowest_of(jnp.abs(scaled - last_sure) <= off, noised)
        reached = jnp.maximum(reached, jnp.where(last_sure - off >= edge + off, around, -jnp.inf))
    reached = jnp.maximum(reached, jnp.where(is_sure, noised, -jnp.inf).max(axis=-1, keepdims=True))
    return may_stay & (noised >= reached - off)


def _lowest_of(chosen: jax.Array, values: jax.Array) -> jax.Array:
    """Return the lowest of the chosen values of each row, f32[S, 1]; -inf for a row without any."""
    lowest = jnp.where(chosen, values, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(lowest < jnp.inf, lowest, -jnp.inf)


def _outermost_cuts(
    scores: jax.Array, rows: SamplingRows[jax.Array], off: jax.Array, edge: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the loosest and the tightest cut if scores are off by up to `off`; NaN if nothing is cut.

    `edge` is the lowest score that min-p keeps. Top-p applies to what min-p leaves, top-k is not affected.

    Returns:
      Two f32[S, 1]: the lowest score that may be kept, less its own error; and the score of the last id that
      is kept whatever the errors.
    """
    top_k, top_p = _cuts(rows)
    by_count = _least_kept(scores, top_k, jnp.ones_like(top_p), "xla")
    # Top-p applies to what top-k leaves. Top-k also leaves the ties of its last id, and rounding makes and
    # breaks ties. So top-k leaves at most all ids that may tie with the last, and at least none of them.
    most, fewest = ~(scores < by_count - off), ~(scores < by_count)
    has_ties = (top_k[:, None] > 0) & (fewest.sum(axis=-1, keepdims=True) > top_k[:, None])
    fewest &= ~(has_ties & (scores == by_count))
    most &= ~(scores < edge - off)
    fewest &= ~(scores < jnp.minimum(edge + off, 0.0))
    odds = jnp.exp(jnp.minimum(off[:, 0], _MAX_SCORE_ERROR))
    no_top_k = jnp.zeros_like(top_k)
    loose, tight = (
        _least_kept(
            jnp.where(left, scores, -jnp.inf), no_top_k, top_p / (top_p + (1 - top_p) * factor), "xla"
        )
        for left, factor in ((most, 1 / odds), (fewest, odds))
    )
    return jnp.fmax(loose, by_count) - off, jnp.fmax(tight, by_count)


def _allowed(scores: jax.Array, rows: SamplingRows[jax.Array], part: VocabularyPart) -> jax.Array:
    """Return the scores, with -inf for banned ids."""
    token_iota = part.first_id + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    allowed = scores
    for slot in range(rows.banned_ids.shape[1]):  # elementwise, hence fused and local to a vocabulary shard
        allowed = jnp.where(token_iota == rows.banned_ids[:, slot, None], -jnp.inf, allowed)
    return allowed


def _divisors(rows: SamplingRows[jax.Array]) -> jax.Array:
    """Return temperatures with a floor, so that greedy rows do not divide by 0; they ignore the quotient."""
    return jnp.maximum(rows.temperature, np.finfo(np.float32).tiny)


def _scaled(allowed: jax.Array, rows: SamplingRows[jax.Array], part: VocabularyPart) -> jax.Array:
    """Return scores divided by temperatures, shifted so that a row's maximum is 0."""
    # Subtract the maximum first, so that a tiny temperature gives 0 and -inf, never inf - inf.
    best = allowed.max(axis=-1, keepdims=True)
    if part.axis is not None:
        best = lax.pmax(best, part.axis)
    return (allowed - best) / _divisors(rows)[:, None]


def _likely(scaled: jax.Array, rows: SamplingRows[jax.Array]) -> jax.Array:
    """Return `scaled` scores (the best of a row is 0) with -inf for ids that min-p cuts."""
    return jnp.where(scaled < _least_likely(rows), -jnp.inf, scaled)


def _least_likely(rows: SamplingRows[jax.Array]) -> jax.Array:
    """Return the lowest scaled score that min-p keeps, f32[S, 1]; -inf if it is off.

    An id is at least `min_p` times as likely as the most likely one, whose score is 0, if its score is at
    least ln(`min_p`). So this cut needs neither a search nor the normalizer.
    """
    return jnp.log(rows.min_p)[:, None]


def _with_noise(
    scores: jax.Array, allowed: jax.Array, rows: SamplingRows[jax.Array], part: VocabularyPart
) -> jax.Array:
    """Return scores plus noise for random rows, and `allowed` for greedy rows; the first maximum wins."""
    noise = _gumbel(rows.seed, rows.sample_positions, scores.shape[1], part.first_id)
    return jnp.where(rows.temperature[:, None] > 0, scores + noise, allowed)


def _cuts(rows: SamplingRows[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return top_k and top_p, disabled for greedy rows, because a row without cuts costs almost nothing."""
    draws = rows.temperature > 0
    return jnp.where(draws, rows.top_k, 0), jnp.where(draws, rows.top_p, 1.0)


def _truncate(scores: jax.Array, top_k: jax.Array, top_p: jax.Array, backend: str) -> jax.Array:
    """Return `scores` f32[S, V] (at most 0, the best 0) with -inf for every id that top-k or top-p cuts."""
    # Materialize the scores: if XLA recomputed them for the comparison, the division might round differently.
    scores = lax.optimization_barrier(scores)
    # Compare scores and not keys: the search changes the keys in place, so XLA would need a copy of them.
    # If nothing is cut, the least kept score is NaN, and no score is below NaN.
    return jnp.where(scores < _least_kept(scores, top_k, top_p, backend), -jnp.inf, scores)


def _least_kept(scores: jax.Array, top_k: jax.Array, top_p: jax.Array, backend: str) -> jax.Array:
    """Return the lowest score that both top-k and top-p keep, f32[S, 1]; NaN if nothing is cut."""
    masses = jnp.round(jnp.exp(scores) * 2.0**MASS_BITS).astype(jnp.uint32)
    return _scores_of(_find_cutoffs(_ordered_keys(scores), masses, top_k, top_p, backend))[:, None]


def _find_cutoffs(
    keys: jax.Array, masses: jax.Array, top_k: jax.Array, top_p: jax.Array, backend: str
) -> jax.Array:
    """Return `cutoffs`, computed on the mesh of the keys."""
    find = functools.partial(cutoffs, backend=backend)
    mesh = jax.typeof(keys).sharding.mesh
    if backend == "xla" or mesh.size <= 1:
        return find(keys, masses, top_k, top_p)
    # A kernel needs whole rows, so every device searches all rows, just as it samples all of them.
    return on_every_device(find, mesh)(keys, masses, top_k, top_p)


def _ordered_keys(scores: jax.Array) -> jax.Array:
    """Return u32[S, V] keys in the same order as the scores."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)  # -0.0 is 0.0
    is_negative = bits >> _WORD(31) == 1
    return jnp.where(is_negative, ~bits, bits | _WORD(1 << 31))


def _scores_of(keys: jax.Array) -> jax.Array:
    """Return the f32 scores whose `_ordered_keys` these are; key 0 becomes NaN."""
    bits = jnp.where(keys >> _WORD(31) == 1, keys & _WORD(2**31 - 1), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _gumbel(
    seed: jax.Array, positions: jax.Array, vocab_size: int, first_id: int | jax.Array = 0
) -> jax.Array:
    """Return Gumbel noise f32[S, V], a function of (seed, position, token id)."""
    row_key = _threefry2x32((seed[:, 1], seed[:, 0]), positions.astype(jnp.uint32))
    token_iota = jnp.asarray(first_id).astype(jnp.uint32) + lax.broadcasted_iota(
        jnp.uint32, (seed.shape[0], vocab_size), 1
    )
    words = _threefry2x32((row_key[0][:, None], row_key[1][:, None]), token_iota)
    # Uniform in (0, 1), finest near 0, where the largest noise comes from; never exactly 0 or 1.
    uniform = ((words[0] ^ words[1]).astype(jnp.float32) + 0.5) * 2.0**-32
    exponential = -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
    return -jnp.log(exponential)


def _threefry2x32(key: tuple[jax.Array, jax.Array], counter: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the two words of Threefry-2x32-20 for a 64-bit counter: 0 and `counter`.

    They equal what `jax.random` computes with a `threefry2x32` key, bit for bit: the result of `fold_in` with
    this counter, or, with partitionable bits, the two words whose XOR is `bits[counter]`.
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ _WORD(0x1BD11BDA))
    x0 = jnp.broadcast_to(keys[0], counter.shape)
    x1 = counter + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << _WORD(rotation)) | (x1 >> _WORD(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + _WORD(group + 1)
    return x0, x1
