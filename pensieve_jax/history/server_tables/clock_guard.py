"""Whether the time of a deletion can be trusted: a clock that is ahead must delete nothing.

Owns: the latest time that a deletion has trusted, stored as a note, and how far a clock may be ahead of it.
Does not know: what is deleted, or who confirms a time.

The note only increases. Without one, as in a history that an earlier release wrote, the newest row counts.
The note counts before rows, because a server whose clock is ahead writes rows that are dated ahead.
"""

from __future__ import annotations

from typing import Final

from pensieve_jax.core.errors import ClockAheadError
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.server_tables.changes import Expire

MAX_AHEAD_S: Final = 24 * 3600.0
_NOTE: Final = "note:trusted_time"
# Rows in order of insertion, so that the newest is found without reading the others.
_NEWEST: Final = (
    "SELECT created_at_s FROM turns ORDER BY rowid DESC LIMIT 1",
    "SELECT created_at_s FROM responses ORDER BY rowid DESC LIMIT 1",
    "SELECT max(last_active_s) FROM conversations WHERE metadata IS NOT NULL",
    "SELECT max(last_active_s) FROM conversations WHERE owner = '' AND metadata IS NULL",
)


def check(connection: Connection, change: Expire) -> None:
    """Note the time of a deletion, or raise ClockAheadError if it is far ahead and not confirmed."""
    noted = connection.execute("SELECT value FROM meta WHERE key = ?", (_NOTE,)).fetchone()
    trusted_s = _newest_s(connection) if noted is None else float(noted[0])
    is_confirmed = change.confirmed_until_s is not None and change.now_s <= change.confirmed_until_s
    if trusted_s is not None and change.now_s > trusted_s + MAX_AHEAD_S and not is_confirmed:
        raise ClockAheadError(change.now_s, trusted_s)
    latest_s = change.now_s if noted is None else max(change.now_s, trusted_s or 0.0)
    connection.execute("DELETE FROM meta WHERE key = ?", (_NOTE,))
    connection.execute("INSERT INTO meta VALUES (?, ?)", (_NOTE, repr(float(latest_s))))


def _newest_s(connection: Connection) -> float | None:
    """Return the time of the newest row, or None for a history without rows."""
    rows = [connection.execute(query).fetchone() for query in _NEWEST]
    return max((row[0] for row in rows if row is not None and row[0] is not None), default=None)
