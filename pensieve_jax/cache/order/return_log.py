"""Idle times of conversations and their outcomes: the observations of the model of returns.

Owns: one row per conversation that may return, and the times of the model's fits. A row closes when the
conversation returns, is ended, or has been idle for longer than the horizon.
Does not know: chunks, tiers or retention values. A conversation without any KV in the cache stays observed,
because its return is what the model predicts.
Called by `learning`.
"""

from __future__ import annotations

import numpy as np

from pensieve_jax.cache.order.returns import HORIZON_S, Array, ReturnModel, exposure_of

_FIT_AFTER = 32  # returns
_MIN_ROWS = 64


class ReturnLog:
    """Idle conversations by id, as rows of arrays: a scan of 10,000 takes 1 ms.

    Attributes:
      model: the model that counts every row that closes.
      num_returns: rows that closed because their conversation returned.
    """

    def __init__(self, model: ReturnModel) -> None:
        self.model = model
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []  # by row
        self._free: list[int] = []
        self._since_s = np.full(_MIN_ROWS, np.inf)
        self._buckets = np.zeros(_MIN_ROWS, np.int64)
        self._num_used = 0
        self.num_returns = 0

    def __len__(self) -> int:
        """Return the number of conversations that may return."""
        return len(self._rows)

    def left(self, conversation_id: str, bucket: int, now_s: float) -> None:
        """Open a row for a conversation that became idle after a turn of `bucket`."""
        row = self._rows.get(conversation_id)
        if row is None:
            row = self._rows[conversation_id] = self._new_row(now_s)
            self._ids[row] = conversation_id
        self._since_s[row], self._buckets[row] = now_s, bucket

    def returned(self, conversation_id: str, now_s: float) -> None:
        """Close a row by a return; ignores a conversation that became idle unobserved (before a restart)."""
        if self._close(conversation_id, now_s, returned=True):
            self.num_returns += 1
            if self.num_returns % _FIT_AFTER == 0:
                self.fit(now_s)

    def ended(self, conversation_id: str, now_s: float) -> None:
        """Close a row without a return: it cannot return, or is no longer observed."""
        self._close(conversation_id, now_s, returned=False)

    def fit(self, now_s: float) -> None:
        """Fit the model again, including the conversations that are idle now."""
        self._close_old(now_s)
        self.model.fit(self.open_exposure_s(now_s))

    def open_exposure_s(self, now_s: float) -> Array:
        """Return the seconds that currently idle conversations spent idle: f64[NUM_BUCKETS, NUM_BINS]."""
        since_s, buckets = self._since_s[: self._num_used], self._buckets[: self._num_used]
        return exposure_of(buckets, np.maximum(now_s - since_s, 0.0))  # 0 for free rows: since_s is infinite

    def _close(self, conversation_id: str, now_s: float, *, returned: bool) -> bool:
        row = self._rows.pop(conversation_id, None)
        if row is None:
            return False
        idle_s = min(max(now_s - float(self._since_s[row]), 0.0), HORIZON_S)
        self.model.close(int(self._buckets[row]), idle_s, returned=returned)
        self._since_s[row] = np.inf
        self._free.append(row)
        return True

    def _close_old(self, now_s: float) -> None:
        idle_s = now_s - self._since_s[: self._num_used]
        for row in np.flatnonzero(idle_s >= HORIZON_S).tolist():
            self.ended(self._ids[row], now_s)

    def _new_row(self, now_s: float) -> int:
        if not self._free and self._num_used == len(self._since_s):
            self._close_old(now_s)  # fits close old rows too, but happen only after returns
            if len(self._free) < self._num_used // 4:  # else this scan would repeat after a few rows
                self._since_s = np.concatenate([self._since_s, np.full_like(self._since_s, np.inf)])
                self._buckets = np.concatenate([self._buckets, np.zeros_like(self._buckets)])
        if self._free:
            return self._free.pop()
        self._num_used += 1
        self._ids.append("")
        return self._num_used - 1
