"""Whether a key may store more, asked before a turn is computed.

Owns: the look-up of what an owner stores, and how old it may be.
Does not know: how amounts are counted, or the quotas of changes, which the history checks itself.

A turn that was computed is always stored. So a key may exceed its quota by the turns that it had running when
it reached the quota.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from pensieve_jax.core.errors import StorageQuotaError
from pensieve_jax.history.server_tables.changes import StorageQuota
from pensieve_jax.history.server_tables.quotas import check_room
from pensieve_jax.history.stored_amounts import StoredAmounts

_MAX_AGE_S: Final = 1.0
"""Age of an answer that is used again if the history is on another machine."""
_MAX_OWNERS: Final = 10_000


class StorageCheck:
    """The check of one server. Used by the event loop's thread only."""

    def __init__(self, history: Any, quota: StorageQuota, read: Callable[..., Awaitable[Any]]) -> None:
        """Check with what the reader `history` says; `read` runs a read of it for an owner."""
        self._history = history
        self._quota = quota
        self._read = read
        self._recent: dict[str, tuple[float, StoredAmounts]] = {}

    async def check(self, owner: str) -> None:
        """Raise StorageQuotaError unless the owner may store another response; raise HistoryError.

        A remembered amount only admits: what an owner has just deleted must not refuse.
        """
        quota = self._quota
        if self._history is None or (quota.responses is None and quota.bytes is None):
            return
        now_s, found = time.monotonic(), self._recent.get(owner)
        if found is not None and now_s - found[0] <= _MAX_AGE_S:
            with suppress(StorageQuotaError):
                check_room(found[1], quota)
                return
        amounts = await self.stored(owner)
        if self._history.is_remote:
            if len(self._recent) >= _MAX_OWNERS:
                self._recent.clear()
            # A look-up may take long, and a later one may have ended before it.
            self._recent[owner] = max((now_s, amounts), self._recent.get(owner, (now_s, amounts)))
        check_room(amounts, quota)

    async def stored(self, owner: str) -> StoredAmounts:
        """Return what an owner stores now; raise HistoryError."""
        amounts: StoredAmounts = await self._read(owner, self._history.stored_by, owner)
        return amounts
