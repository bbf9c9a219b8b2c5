"""Cutoffs in plain XLA, for any device: passes of counting over all keys.

Owns: the search bit by bit. Does not know: what keys and masses stand for.

Nothing here depends on the order of a sum, so a vocabulary may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.sampling_cutoffs.rule import halves, total_mass, wanted_mass

_WORD = np.uint32
# Of a cutoff, settled by one look at all keys; divides 32. On an H200 two bits take 0.53 ms for 128 rows of
# 32,000 ids, one bit takes 0.74 and four 0.99: fewer looks, but of more sums each.
_BITS_A_PASS = 2


def xla_cutoffs(keys: jax.Array, masses: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """See `api.cutoffs`; arguments are already checked."""
    num_kept = jnp.where(top_k > 0, top_k, np.iinfo(np.int32).max)
    by_count = _largest_cutoff(keys, lambda kept: kept.sum(axis=-1, dtype=jnp.int32) >= num_kept)
    high, low = halves(jnp.where(keys >= by_count[:, None], masses, _WORD(0)))

    def mass_of(kept: jax.Array) -> jax.Array:
        sums = [jnp.where(kept, part, _WORD(0)).sum(axis=-1, dtype=jnp.uint32) for part in (high, low)]
        return total_mass(*sums)

    wanted = wanted_mass(top_p, mass_of(jnp.ones_like(keys, bool)))
    by_mass = _largest_cutoff(keys, lambda kept: mass_of(kept) >= wanted)
    return jnp.maximum(by_count, jnp.where(top_p < 1, by_mass, _WORD(0)))


def _largest_cutoff(keys: jax.Array, is_enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """u32[S]: per row the largest c for which the ids with `keys >= c` are enough; 0 where none is.

    A few bits at a time from the top: passes of counting, with no sort and no data-dependent loop length.
    """

    def settle_bits(i: jax.Array, cutoff: jax.Array) -> jax.Array:
        shift = _WORD(32 - _BITS_A_PASS) - _WORD(_BITS_A_PASS) * i.astype(jnp.uint32)
        # Whatever is enough for a cutoff is enough for any below it: the digit is how many are enough.
        candidates = [cutoff | (_WORD(digit) << shift) for digit in range(1, 2**_BITS_A_PASS)]
        digit = sum(is_enough(keys >= candidate[:, None]).astype(jnp.uint32) for candidate in candidates)
        return cutoff | (digit << shift)

    return lax.fori_loop(0, 32 // _BITS_A_PASS, settle_bits, jnp.zeros(keys.shape[0], jnp.uint32))
