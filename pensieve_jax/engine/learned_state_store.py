"""Storage of a learning order's state in the history, so that it survives a restart.

Owns: when the state is written, how it is read, and the handling of errors.
Does not know: the content of the state, or how the history stores a note.
Called by the engine and the ledger.

The state matters much less than the turns, so an error in reading or writing it is logged and fails nothing.
"""

from __future__ import annotations

import json
import logging

from pensieve_jax.cache import CacheManager, LearnedState
from pensieve_jax.cache.order.policies import LearnedPolicy
from pensieve_jax.core.errors import HistoryError
from pensieve_jax.history import HistoryStore

_NOTE = "experience"
_WRITE_AFTER = 256  # turns; a killed process loses at most these observations
_log = logging.getLogger(__name__)


def load_learned_state(store: HistoryStore, policy: str) -> LearnedState | None:
    """Return the state that the history has for a learning order; None without one, or if it is invalid."""
    if policy != LearnedPolicy.name:
        return None
    try:
        text = store.note(_NOTE)
        return None if text is None else LearnedState.from_dict(json.loads(text))
    # ConfigError is a ValueError, and so are errors of JSON.
    except (HistoryError, ValueError, RecursionError) as error:
        _log.warning("The learned state of the eviction order cannot be read and starts empty: %s", error)
        return None


class LearnedStateStore:
    """The periodic writer of a cache's learned state."""

    def __init__(self, store: HistoryStore, cache: CacheManager) -> None:
        """Start with nothing to write."""
        self._store = store
        self._cache = cache
        self._num_turns = 0

    def count(self, num_turns: int) -> None:
        """Count committed turns, and write the state after every 256."""
        self._num_turns += num_turns
        if self._num_turns >= _WRITE_AFTER:
            self.write()

    def write(self) -> None:
        """Write the state now, if the order learns and a turn was committed since the last write."""
        learned_state = self._cache.turns.learned_state() if self._num_turns else None
        self._num_turns = 0
        if learned_state is None:
            return
        try:
            self._store.keep_note(_NOTE, json.dumps(learned_state.to_dict()))
        except HistoryError as error:
            _log.warning("The learned state of the eviction order could not be written: %s", error)

    def forget(self) -> None:
        """Discard the state, in the cache and in the history; raises HistoryError."""
        self._store.keep_note(_NOTE, None)
        self._cache.turns.begin(None)
        self._num_turns = 0
