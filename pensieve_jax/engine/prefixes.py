"""The shared prefixes that have KV state, by their tokens.

Owns: one cached sequence per prefix; it holds the full chunks, and each conversation the rest.
Does not know: conversations, or where the state is. Nothing is computed before the first turn that uses it.
Called by: the engine for first turns, and the table of conversations for what it loads and forgets.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax.cache import CachedSequence, CacheManager
from pensieve_jax.core.prefix import SharedPrefix


class PrefixTable:
    """Prefixes in use since the engine's state was made; one that nobody uses is evicted like any history."""

    def __init__(self, cache: CacheManager) -> None:
        """None."""
        self._cache = cache
        self._sequences: dict[SharedPrefix, CachedSequence] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        """Prefixes."""
        return len(self._sequences)

    def begin(self, sequence: CachedSequence, prefix: SharedPrefix) -> None:
        """Let an empty, idle sequence begin with the full chunks of a prefix, if it has any."""
        if len(prefix.token_ids) < self._cache.chunk_tokens:
            return
        shared = self._sequences.get(prefix)
        if shared is None:
            name = f"\0prefix-{self._num_opened}"  # never a caller's id: those have no NUL
            self._num_opened += 1
            shared = self._sequences[prefix] = self._cache.open_prefix(name, len(prefix.token_ids))
        self._cache.share(sequence, shared)

    def rejoin(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        """Let the empty, idle sequence of a loaded history share the prefix that the history begins with."""
        for prefix, shared in self._sequences.items():
            count = len(prefix.token_ids)
            if shared.num_kv_tokens < len(token_ids) and tuple(token_ids[:count]) == prefix.token_ids:
                self._cache.share(sequence, shared)
                return

    def forget_unused(self) -> None:
        """Forget prefixes that have no state left and that no conversation in memory begins with."""
        for prefix, shared in list(self._sequences.items()):
            if not shared.num_users and not shared.holds_state:
                self._cache.close_prefix(shared)
                del self._sequences[prefix]
