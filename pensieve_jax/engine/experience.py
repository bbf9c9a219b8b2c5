"""What an order has learned, kept with the history, so that a restart does not forget it.

Owns: when it is written, how it is read, and what happens to one that cannot be.
Does not know: what was learned, or how a note is stored.

It is worth little beside the turns: where it cannot be written or read, that is logged and nothing fails.
"""

from __future__ import annotations

import json
import logging

from pensieve_jax.cache import CacheManager, LearnedState
from pensieve_jax.cache.order.policies import LearnedPolicy
from pensieve_jax.core.errors import HistoryError
from pensieve_jax.history import HistoryStore

_NOTE = "experience"
_WRITE_AFTER = 256  # turns: what a killed process forgets
_log = logging.getLogger(__name__)


def kept_experience(store: HistoryStore, policy: str) -> LearnedState | None:
    """What the history holds for an order that learns; None where that is nothing, or cannot be read."""
    if policy != LearnedPolicy.name:
        return None
    try:
        text = store.note(_NOTE)
        return None if text is None else LearnedState.from_dict(json.loads(text))
    # ConfigError is a ValueError, and so are errors of JSON.
    except (HistoryError, ValueError, RecursionError) as error:
        _log.warning("What was learned of returns cannot be read, and begins anew: %s", error)
        return None


class LearnedStateStore:
    """Writes what a cache has learned, now and then."""

    def __init__(self, store: HistoryStore, cache: CacheManager) -> None:
        """Nothing to write yet."""
        self._store = store
        self._cache = cache
        self._num_turns = 0

    def count(self, num_turns: int) -> None:
        """So many turns were committed."""
        self._num_turns += num_turns
        if self._num_turns >= _WRITE_AFTER:
            self.write()

    def write(self) -> None:
        """Write it now, if there is any and a turn was committed since."""
        experience = self._cache.turns.experience() if self._num_turns else None
        self._num_turns = 0
        if experience is None:
            return
        try:
            self._store.keep_note(_NOTE, json.dumps(experience.to_dict()))
        except HistoryError as error:
            _log.warning("What was learned of returns could not be written: %s", error)

    def forget(self) -> None:
        """Begin anew, here and in the history; raises HistoryError."""
        self._store.keep_note(_NOTE, None)
        self._cache.turns.begin(None)
        self._num_turns = 0
