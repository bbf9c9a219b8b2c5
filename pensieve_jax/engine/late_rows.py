"""Rows of a step whose choice needs a mask of allowed ids, such as the rows of a grammar.

Owns: the protocol `LateRow`, the late rows of the turns in progress, and the masks of a step's rows.
Does not know: grammars, devices, or what a turn does with its tokens.
Called by the engine, which chooses a step's ids later if a row's mask needs an id that is still in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np

from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.core.errors import GrammarFailedError, PensieveError
from pensieve_jax.scheduler import Grant, Request

WORD_BITS: Final = 32
ALL_IDS: Final = -1  # a word that allows its 32 ids


class LateRow(Protocol):
    """The mask of one turn, which follows the turn's own ids.

    It lives as long as the turn: eviction, copies and suspension do not change it.

    Attributes:
      waits: whether the mask depends on the ids of the reply, so that it needs the id in flight.
    """

    @property
    def waits(self) -> bool: ...

    def accept(self, token_id: int) -> None:
        """Continue with the next id of the reply; raises a PensieveError that ends this turn alone."""
        ...

    def fill(self, words: np.ndarray) -> bool:
        """Clear the bits of ids that may not come next in `words`, i32[ceil(V / 32)]; set none.

        The bit of an id is bit `id % 32` of word `id // 32`. Bits that are clear already stay clear, so that
        several rows of one turn can fill the same words. Returns False if every id may come next, and then
        leaves `words` as they are. Raises a PensieveError that ends this turn alone.
        """
        ...


class JoinedRows:
    """Several late rows of one turn as one: an id is allowed if all of them allow it."""

    def __init__(self, rows: Sequence[LateRow]) -> None:
        self._rows = tuple(rows)

    @property
    def waits(self) -> bool:
        return any(row.waits for row in self._rows)

    def accept(self, token_id: int) -> None:
        for row in self._rows:
            row.accept(token_id)

    def fill(self, words: np.ndarray) -> bool:
        masked = False
        for row in self._rows:
            masked |= row.fill(words)
        return masked


class LateRows:
    """The late rows of the turns in progress.

    Attributes:
      failed: turns whose row could not continue, with the error; the caller ends them and removes them here.
    """

    def __init__(self, vocab_size: int) -> None:
        """Start without rows, for a model of `vocab_size` ids."""
        self.failed: dict[Request, PensieveError] = {}
        self._num_words = -(-vocab_size // WORD_BITS)
        self._rows: dict[Request, LateRow] = {}

    def add(self, request: Request, row: LateRow) -> None:
        """Mask the choices of a request that is new."""
        self._rows[request] = row

    def drop(self, request: Request) -> None:
        """Forget a request, which may have no row."""
        self._rows.pop(request, None)
        self.failed.pop(request, None)

    def wait_for_ids(self, sampling: Iterable[Grant]) -> bool:
        """Return whether a mask of these grants needs an id that is still in flight."""
        if not self._rows:
            return False
        for grant in sampling:
            row = self._rows.get(grant.request)
            if row is not None and row.waits and grant.request.token_ids[grant.end - 1] == PENDING_TOKEN:
                return True
        return False

    def accept(self, sampling: Iterable[Grant], token_ids: Sequence[int], logprobs: np.ndarray) -> None:
        """Continue the rows of a step's grants with the ids that it chose.

        Ids whose log-probability is not finite mean nothing; the caller ends these turns.
        """
        if not self._rows:
            return
        for grant, token_id, is_real in zip(sampling, token_ids, np.isfinite(logprobs), strict=False):
            row = self._rows.get(grant.request)
            if row is None or not is_real:
                continue
            try:
                row.accept(token_id)
            except PensieveError as error:
                self._fail(grant.request, error)

    def words(self, sampling: Iterable[Grant], num_rows: int) -> np.ndarray | None:
        """Return the masks of a step, i32[num_rows, ceil(V / 32)], or None if no row masks anything.

        A row without a mask has all bits set.
        """
        words: np.ndarray | None = None
        is_masked = False
        for number, grant in enumerate(sampling if self._rows else ()):
            row = self._rows.get(grant.request)
            if row is None:
                continue
            if words is None:
                words = np.full((num_rows, self._num_words), ALL_IDS, np.int32)
            try:
                is_masked |= row.fill(words[number])
                if not words[number].any():
                    raise GrammarFailedError("no token may come next")
            except PensieveError as error:
                words[number] = ALL_IDS
                self._fail(grant.request, error)
        return words if is_masked else None

    def _fail(self, request: Request, error: PensieveError) -> None:
        """End the row of a turn, whose choices are not masked from here on."""
        del self._rows[request]
        self.failed[request] = error
