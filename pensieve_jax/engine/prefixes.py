"""The shared prefixes that have KV state, by their tokens.

Owns: one cached sequence per prefix; it holds the full chunks, and each conversation the rest.
Does not know: conversations, or where the state is. Nothing is computed before the first turn that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax.cache import CachedSequence, CacheManager
from pensieve_jax.core.prefix import SharedPrefix


class PrefixTable:
    """Prefixes in use since the engine's state was made; one that nobody uses is evicted like any history."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._sequences: dict[tuple[int, ...], CachedSequence] = {}  # by tokens
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def begin(self, sequence: CachedSequence, prefix: SharedPrefix) -> None:
        """Let an empty, idle sequence begin with the full chunks of a prefix, if it has any."""
        if len(prefix.token_ids) < self._cache.chunk_tokens:
            return
        shared = self._sequences.get(prefix.token_ids)
        if shared is None:
            name = f"\0prefix-{self._num_opened}"  # never a caller's id: those have no NUL
            self._num_opened += 1
            shared = self._cache.open_prefix(name, len(prefix.token_ids))
            self._sequences[prefix.token_ids] = shared
        self._cache.share(sequence, shared)

    def rejoin(self, sequence: CachedSequence, token_ids: Sequence[int]) -> None:
        """Let the empty, idle sequence of a loaded history share the prefix that the history begins with."""
        shared = self.find(token_ids)
        if shared is not None:
            self._cache.share(sequence, shared)

    def find(self, token_ids: Sequence[int]) -> CachedSequence | None:
        """The sequence of the longest prefix that a history begins with."""
        found = [
            beginning for beginning in self._sequences if tuple(token_ids[: len(beginning)]) == beginning
        ]
        return self._sequences[max(found, key=len)] if found else None

    def release(self, prefix: SharedPrefix) -> None:
        """Leave a prefix's state to those in memory that begin with it; it goes with the last of them.

        An equal prefix is another handle and stays good: the next turn that is given it computes the state
        anew.
        """
        prefix.released = True
        shared = self._sequences.pop(prefix.token_ids, None)
        if shared is not None:
            self._cache.release_prefix(shared)

    def forget_unused(self) -> None:
        """Forget prefixes that have no state left and that no conversation in memory begins with."""
        for beginning, shared in list(self._sequences.items()):
            if not shared.users and not shared.holds_state:
                self._cache.release_prefix(shared)
                del self._sequences[beginning]
