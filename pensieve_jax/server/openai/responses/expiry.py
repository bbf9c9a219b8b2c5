"""The deletion of expired records and idle conversations.

Owns: when a server deletes, which times it confirms to the history, and what it logs while it must not.
Does not know: what has expired, or how a history detects a clock that is ahead.

The history refuses a time that is far ahead of the latest one that it trusts. At a start only an operator can
tell whether the clock is right. While the server runs, it can tell by itself: a clock that advances with the
time since the machine's start was not set, however long the machine slept.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from pensieve_jax.core.clock import time_since_boot, utc_text
from pensieve_jax.core.errors import ClockAheadError, PensieveError
from pensieve_jax.history.server_tables.changes import Expire
from pensieve_jax.server.http.services import Services

_log = logging.getLogger(__name__)
_DAY_S: Final = 24 * 3600.0
_PERIOD_S: Final = 600.0
_MAX_DRIFT_S: Final = 600.0
"""Difference of two clocks that is not taken for a change of one of them."""


class Expiry:
    """The periodic deletions of one server. Used by the event loop's thread only."""

    def __init__(
        self,
        services: Services,
        locks: set[tuple[str, str]],
        elapsed_s: Callable[[], float] = time_since_boot,
    ) -> None:
        """`locks` contains the conversations with a running turn, which stay; `elapsed_s` never jumps."""
        self._services = services
        self._locks = locks
        self._elapsed_s = elapsed_s
        self._trusted: tuple[float, float] | None = None  # the time of the last deletion, by both clocks
        self._is_logged = False

    async def run(self) -> None:
        """Delete periodically, until this is cancelled."""
        while True:
            if self._services.engine.state == "ready":
                with suppress(PensieveError):  # retried after the interval
                    await self.sweep()
            await asyncio.sleep(_PERIOD_S)

    async def sweep(self) -> None:
        """Delete what has expired, unless the history refuses the clock; raise the engine's errors."""
        services, now_s, elapsed_s = self._services, self._services.now_s(), self._elapsed_s()
        days = services.settings.idle_conversation_days
        has_more = True
        try:
            # Each change deletes a few records, so that engine steps run in between.
            while has_more:
                change = Expire(
                    now_s=now_s,
                    idle_s=None if days is None else days * _DAY_S,
                    busy=tuple(self._locks),
                    confirmed_until_s=self._confirmed_until_s(now_s, elapsed_s),
                )
                await services.engine.apply(change)
                has_more = await services.read("", services.history.has_expired, change)
        except ClockAheadError as error:
            self._note_refusal(error)
            return
        self._trusted, self._is_logged = (now_s, elapsed_s), False
        services.metrics.expiry_suspended(False)

    def _confirmed_until_s(self, now_s: float, elapsed_s: float) -> float | None:
        """Return the latest time that is right according to the operator or to the other clock."""
        confirmed = self._services.settings.confirmed_until_s
        if self._trusted is None:
            return confirmed
        expected_s = self._trusted[0] + elapsed_s - self._trusted[1]
        return max(expected_s + _MAX_DRIFT_S, -math.inf if confirmed is None else confirmed)

    def _note_refusal(self, error: ClockAheadError) -> None:
        self._services.metrics.expiry_suspended(True)
        if self._is_logged:
            return
        self._is_logged = True
        now = utc_text(error.now_s)
        _log.warning(
            "nothing is deleted: the clock says %s, more than a day after %s, the newest time in the "
            "history; if the clock is right, start the server with --confirm_clock=%s",
            now,
            utc_text(error.trusted_s),
            now.partition("T")[0],
        )
