"""Rows of a step whose choice needs a mask of allowed ids, such as the rows of a grammar.

Owns: the protocol `LateRow`, the late rows of the turns in progress, the masks of a step's rows, and the
limits of their time.
Does not know: grammars, devices, or what a turn does with its tokens.
Called by the engine, which chooses a step's ids later if a row's mask needs an id that is still in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from pensieve_jax.core.conversation import PENDING_TOKEN
from pensieve_jax.core.errors import GrammarFailedError, PensieveError
from pensieve_jax.core.token_masks import ALL_IDS, every_id
from pensieve_jax.scheduler import Grant, Request

MAX_STEP_S: Final = 0.045
"""Time of the masks of a step. The grammar library ends one after about 50 ms, so a step waits for 0.1 s."""
ROW_S: Final = 0.1
ROW_TOKEN_S: Final = 0.001


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


@dataclass(slots=True)
class _TimedRow:
    """A late row, the ids that it has not read yet, and its time.

    Attributes:
      row: the row.
      unread: ids of the reply since its last mask.
      num_masks: masks so far.
      seconds: what they took, with the ids that were read for them.
      last_s: what the last one took.
      num_waited: steps since that had no time left for its mask.
    """

    row: LateRow
    unread: list[int] = field(default_factory=list)
    num_masks: int = 0
    seconds: float = 0.0
    last_s: float = 0.0
    num_waited: int = 0

    @property
    def rank(self) -> float:
        """Key that orders the rows of a step: the time of its last mask, divided as long as it waits."""
        return self.last_s / (1 + self.num_waited)


class LateRows:
    """The late rows of the turns in progress.

    A client's grammar must not delay the steps of others. So the masks of a step may take `MAX_STEP_S`. Rows
    whose last masks took least go first, and those that find no time left wait for the next step. A row fails
    once one of its masks takes more than `MAX_STEP_S`, or all of them more than `ROW_S` and `ROW_TOKEN_S` for
    each token. This is time of the thread, since a busy machine is not the grammar's fault.

    Attributes:
      failed: turns whose row could not continue, with the error; the caller ends them and removes them here.
      waiting: requests for whose masks the last call of `words` had no time. What is chosen for them means
        nothing; a later step must choose their next id.
      now_s: the clock, in seconds; a test has its own.
    """

    def __init__(self, vocab_size: int) -> None:
        """Start without rows, for a model of `vocab_size` ids."""
        self.now_s: Callable[[], float] = time.thread_time
        self.failed: dict[Request, PensieveError] = {}
        self.waiting: list[Request] = []
        self._vocab_size = vocab_size
        self._rows: dict[Request, _TimedRow] = {}

    def add(self, request: Request, row: LateRow) -> None:
        """Mask the choices of a request that is new."""
        self._rows[request] = _TimedRow(row)

    def drop(self, request: Request) -> None:
        """Forget a request, which may have no row."""
        self._rows.pop(request, None)
        self.failed.pop(request, None)

    def wait_for_ids(self, sampling: Iterable[Grant]) -> bool:
        """Return whether a mask of these grants needs an id that is still in flight."""
        if not self._rows:
            return False
        for grant in sampling:
            timed = self._rows.get(grant.request)
            if timed is None or not timed.row.waits:
                continue
            if grant.request.token_ids[grant.end - 1] == PENDING_TOKEN:
                return True
        return False

    def accept(
        self,
        sampling: Iterable[Grant],
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        discarded: Collection[Request] = (),
    ) -> None:
        """Continue the rows of a step's grants with the ids that it chose, except those of `discarded`.

        A row reads its ids when its next mask is made, so that this takes time of that step's masks. Ids
        whose log-probability is not finite mean nothing; the caller ends these turns.
        """
        if not self._rows:
            return
        are_real = np.isfinite(logprobs)
        for grant, token_id, is_real in zip(sampling, token_ids.tolist(), are_real, strict=False):
            timed = self._rows.get(grant.request)
            if timed is not None and is_real and grant.request not in discarded:
                timed.unread.append(token_id)

    def words(self, sampling: Iterable[Grant], num_rows: int) -> np.ndarray | None:
        """Return the masks of a step, i32[num_rows, ceil(V / 32)], or None if no row masks anything.

        A row without a mask has all bits set.
        """
        self.waiting = []
        found = [
            (number, grant.request, timed)
            for number, grant in enumerate(sampling if self._rows else ())
            if (timed := self._rows.get(grant.request)) is not None
        ]
        if not found:
            return None
        words = every_id(num_rows, self._vocab_size)
        is_masked, began_s = False, self.now_s()
        for place, (number, request, timed) in enumerate(sorted(found, key=lambda one: one[2].rank)):
            if place and self.now_s() - began_s + timed.last_s > MAX_STEP_S:
                timed.num_waited += 1
                self.waiting.append(request)
                continue
            try:
                is_masked |= self._fill(timed, words[number])
            except PensieveError as error:
                words[number] = ALL_IDS
                self._fail(request, error)
        return words if is_masked else None

    def _fill(self, timed: _TimedRow, words: np.ndarray) -> bool:
        """Fill the mask of one row and count its time; return whether it masks anything."""
        began_s = self.now_s()
        for token_id in timed.unread:
            timed.row.accept(token_id)
        timed.unread.clear()
        is_masked = timed.row.fill(words)
        timed.last_s = self.now_s() - began_s
        timed.seconds += timed.last_s
        timed.num_masks += 1
        timed.num_waited = 0
        if timed.last_s > MAX_STEP_S:
            took, limit = f"{1e3 * timed.last_s:.0f} ms", f"{1e3 * MAX_STEP_S:.0f} ms"
            raise GrammarFailedError(f"a mask of the reply took {took}; the limit is {limit}")
        if timed.seconds > ROW_S + ROW_TOKEN_S * timed.num_masks:
            took = f"{timed.seconds:.2f} s for {timed.num_masks} tokens"
            raise GrammarFailedError(f"the masks of the reply took {took}, which is too long")
        if is_masked and not words.any():
            raise GrammarFailedError("no token may come next: what the turn allows excludes each other")
        return is_masked

    def _fail(self, request: Request, error: PensieveError) -> None:
        """End the row of a turn, whose choices are not masked from here on."""
        del self._rows[request]
        self.failed[request] = error
