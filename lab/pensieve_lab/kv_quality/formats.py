"""Storage formats of keys and values, each as a function from rows to the values read back.

Owns: the compared formats by name, and dense attention over the values read back.
Does not know: models, texts or figures.
Called by `kv_quality.quality` and others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from model_defs.attention import FULL, AttentionOptions, DenseAttention
from pallas_kernels.attention_names import KV_DTYPES
from pallas_kernels.ragged_paged_attention import stored_as

EXACT: Final = "float32"
"""Reference format of the comparisons."""
UNSCALED: Final = "float8_e4m3fn_unscaled"
"""A plain cast to e4m3, which saturates; vLLM's format with `kv_cache_dtype="fp8"` and no scales given."""
_LARGEST_E4M3: Final = 448.0


def _unscaled(rows: jax.Array) -> jax.Array:
    largest = np.float32(_LARGEST_E4M3)
    kept = jnp.minimum(jnp.maximum(rows.astype(jnp.float32), -largest), largest)
    return kept.astype(jnp.float8_e4m3fn).astype(jnp.float32)


STORES: Final[dict[str, Callable[[jax.Array], jax.Array]]] = {
    EXACT: lambda rows: rows,
    "bfloat16": lambda rows: rows.astype(jnp.bfloat16).astype(jnp.float32),
    **{name: functools.partial(stored_as, kv_dtype=name) for name in KV_DTYPES},
    UNSCALED: _unscaled,
}
"""Maps rows [..., head_dim] to the values that attention reads in their place."""
FORMATS: Final = tuple(name for name in STORES if name != EXACT)


class StoredAttention:
    """`DenseAttention` over the values that a format gives back; records each layer's keys and values."""

    def __init__(self, store: str) -> None:
        """Set the format `store`."""
        self._store, self._dense = STORES[store], DenseAttention()
        self.keys: list[jax.Array] = []  # [T, num_kv_heads, head_dim] of each layer, as the model made them
        self.values: list[jax.Array] = []

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
        self.keys.append(k)
        self.values.append(v)
        return self._dense(layer_index, q, self._store(k), self._store(v), options=options, sinks=sinks)
