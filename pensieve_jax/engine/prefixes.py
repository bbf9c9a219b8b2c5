"""The shared prefixes that have KV state, by their tokens.

Owns: one cached sequence per prefix; it holds the full chunks, and each conversation the rest.
Does not know: conversations, or where the state is. Nothing is computed before the first turn that uses it.
Called by: the engine.
"""

from __future__ import annotations

from pensieve_jax.cache import CachedSequence, CacheManager
from pensieve_jax.core.prefix import SharedPrefix


class PrefixTable:
    """Prefixes in use since the engine's state was made; one that nobody uses is evicted like any history."""

    def __init__(self, cache: CacheManager) -> None:
        """None."""
        self._cache = cache
        self._sequences: dict[SharedPrefix, CachedSequence] = {}

    def __len__(self) -> int:
        """Prefixes."""
        return len(self._sequences)

    def begin(self, sequence: CachedSequence, prefix: SharedPrefix) -> None:
        """Let an empty, idle sequence begin with the full chunks of a prefix, if it has any."""
        if len(prefix.token_ids) < self._cache.chunk_tokens:
            return
        shared = self._sequences.get(prefix)
        if shared is None:
            name = f"\0prefix-{len(self._sequences)}"  # never a caller's id: those have no NUL
            shared = self._sequences[prefix] = self._cache.open_prefix(name, len(prefix.token_ids))
        self._cache.share(sequence, shared)
