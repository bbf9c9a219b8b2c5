"""The cached state of one conversation: its chunks, their pages, and how far it was computed.

Owns: the chunk list with its states, and the row of page numbers that steps read.
Does not know: tokens, policies, or other sequences. Only `CacheManager` changes it.

Invariants: there is a chunk for every started `chunk_tokens` of `num_kv_tokens`, and further ones only
while they are reserved; the last chunk of an unpinned sequence is never dropped (losing it shortens
`num_kv_tokens` instead), so holes have computed tokens behind them; only the last computed chunk can be
partly valid.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from pensieve_jax.cache.states import ChunkEvent, ChunkState, next_state


class Role(Enum):
    """Who may take a sequence's pages."""

    IDLE = "idle"  # anybody, as the policy orders
    QUEUED = "queued"  # requests that arrived earlier
    RUNNING = "running"  # nobody: pinned

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python function


class Chunk:
    """One chunk: its state, and its page (0 where it has none)."""

    __slots__ = ("page", "state")

    def __init__(self) -> None:
        """Dropped, without a page."""
        self.state = ChunkState.DROPPED
        self.page = 0

    def apply(self, event: ChunkEvent) -> None:
        """Follow the transition table."""
        self.state = next_state(self.state, event)


class CachedSequence:
    """One conversation in the cache.

    Attributes:
      chunks: by position.
      num_kv_tokens: tokens [0, num_kv_tokens) were computed; those of dropped and reserved chunks are
        lost again.
      num_resident: chunks that are on the gpu.
      last_active_s: when its last turn ended, or began.
      arrival: arrival number of its queued or running request.
      role: who may take its pages.
    """

    def __init__(self, sequence_id: str) -> None:
        """Empty."""
        self.sequence_id = sequence_id
        self.chunks: list[Chunk] = []
        self.num_kv_tokens = 0
        self.num_resident = 0
        self.last_active_s = 0.0
        self.arrival = -1
        self.role = Role.IDLE
        self._page_row = np.zeros(16, np.int32)
        self._first_resident = 0  # no chunk before it is on the gpu

    @property
    def page_row(self) -> np.ndarray:
        """Page of every chunk, 0 where it has none: i32[num_chunks]."""
        return self._page_row[: len(self.chunks)]

    def set_page(self, index: int, page: int) -> None:
        """Record that chunk `index` owns `page` (0: none)."""
        self.chunks[index].page = page
        if index >= len(self._page_row):
            self._page_row = np.concatenate([self._page_row, np.zeros_like(self._page_row)])
        self._page_row[index] = page

    def resident_indices(self) -> list[int]:
        """Chunks on the gpu, leading first."""
        return [i for i, chunk in enumerate(self.chunks) if chunk.state is ChunkState.ON_GPU]

    @property
    def first_resident(self) -> int:
        """The leading chunk on the gpu; `len(chunks)` where none is. Cheap: the answer mostly moves on."""
        i, chunks = self._first_resident, self.chunks
        while i < len(chunks) and chunks[i].state is not ChunkState.ON_GPU:
            i += 1
        self._first_resident = i
        return i

    def on_filled(self, index: int) -> None:
        """Chunk `index` is on the gpu now, perhaps before the leading one so far."""
        self._first_resident = min(self._first_resident, index)

    def holes(self, chunk_tokens: int) -> list[tuple[int, int]]:
        """Token intervals below `num_kv_tokens` without valid KV, ascending and merged."""
        intervals: list[tuple[int, int]] = []
        for i, chunk in enumerate(self.chunks):
            start, end = i * chunk_tokens, min((i + 1) * chunk_tokens, self.num_kv_tokens)
            if chunk.state is ChunkState.ON_GPU or start >= end:
                continue
            if intervals and intervals[-1][1] == start:
                intervals[-1] = (intervals[-1][0], end)
            else:
                intervals.append((start, end))
        return intervals
