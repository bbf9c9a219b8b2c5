"""Cutoffs in plain XLA, for any device, by counting passes over all keys.

Owns: the search by bits. Does not know: what keys and masses stand for. Called by: `api`.

No result depends on the order of a sum, so the vocabulary may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.sampling_cutoffs.rule import halves, total_mass, wanted_mass

_WORD = np.uint32
# Bits of the cutoff that one pass over all keys settles; divides 32. On an H200, for 128 rows of 32,000 ids,
# two bits take 0.53 ms, one bit 0.74 and four 0.99: more bits need fewer passes, but more sums in each.
_BITS_A_PASS = 2


def xla_cutoffs(keys: jax.Array, masses: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """See `api.cutoffs`; arguments are already checked."""
    num_kept = jnp.where(top_k > 0, top_k, np.iinfo(np.int32).max)
    by_count = _largest_cutoff(keys, lambda is_kept: is_kept.sum(axis=-1, dtype=jnp.int32) >= num_kept)
    high, low = halves(jnp.where(keys >= by_count[:, None], masses, _WORD(0)))

    def mass_of(is_kept: jax.Array) -> jax.Array:
        sums = [jnp.where(is_kept, part, _WORD(0)).sum(axis=-1, dtype=jnp.uint32) for part in (high, low)]
        return total_mass(*sums)

    wanted = wanted_mass(top_p, mass_of(jnp.ones_like(keys, bool)))
    by_mass = _largest_cutoff(keys, lambda is_kept: mass_of(is_kept) >= wanted)
    return jnp.maximum(by_count, jnp.where(top_p < 1, by_mass, _WORD(0)))


def _largest_cutoff(keys: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return u32[S]: per row the largest c for which the ids with `keys >= c` are enough; 0 if there is none.

    The search settles a few bits at a time from the top, without a sort or a data-dependent loop length.
    """

    def settle_bits(i: jax.Array, cutoff: jax.Array) -> jax.Array:
        shift = _WORD(32 - _BITS_A_PASS) - _WORD(_BITS_A_PASS) * i.astype(jnp.uint32)
        # If a cutoff keeps enough, so does every lower one: the digit is the number of sufficient candidates.
        candidates = [cutoff | (_WORD(digit) << shift) for digit in range(1, 2**_BITS_A_PASS)]
        digit = sum(is_enough(keys >= candidate[:, None]).astype(jnp.uint32) for candidate in candidates)
        return cutoff | (digit << shift)

    return lax.fori_loop(0, 32 // _BITS_A_PASS, settle_bits, jnp.zeros(keys.shape[0], jnp.uint32))
