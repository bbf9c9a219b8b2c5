"""The KV cache of shared prefixes, by their tokens.

Owns: one cached sequence per prefix. It has the prefix's full chunks; each conversation has the rest. Nothing
is computed before the first turn that uses the prefix.
Does not know: conversations, or the tier of a chunk.
Called by the engine, `ConversationTable` and the submission of turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve_jax.cache import CachedSequence, CacheManager
from pensieve_jax.core.prefix import SharedPrefix


class PrefixTable:
    """The cached sequences of prefixes; an unused one is evicted like any history."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._sequences: dict[tuple[int, ...], CachedSequence] = {}  # by tokens
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def begin(self, sequence: CachedSequence, prefix: SharedPrefix) -> None:
        """Make an empty, idle sequence share the full chunks of a prefix, if it has any."""
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
        """Make the empty, idle sequence of a loaded history share the prefix that the history begins with."""
        shared = self.find(token_ids)
        if shared is not None:
            self._cache.share(sequence, shared)

    def find(self, token_ids: Sequence[int]) -> CachedSequence | None:
        """Return the sequence of the longest prefix that a history begins with, or None."""
        found = [
            beginning for beginning in self._sequences if tuple(token_ids[: len(beginning)]) == beginning
        ]
        return self._sequences[max(found, key=len)] if found else None

    def release(self, prefix: SharedPrefix) -> None:
        """Release a prefix; its chunks stay only as long as conversations in memory share them.

        Another handle for the same tokens stays valid; its next turn computes the chunks again.
        """
        prefix.released = True
        shared = self._sequences.pop(prefix.token_ids, None)
        if shared is not None:
            self._cache.release_prefix(shared)

    def forget_unused(self) -> None:
        """Forget prefixes without KV that no conversation in memory shares."""
        for beginning, shared in list(self._sequences.items()):
            if not shared.users and not shared.holds_state:
                self._cache.release_prefix(shared)
                del self._sequences[beginning]
