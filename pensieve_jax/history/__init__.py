"""The durable history: the raw tokens of turns, from which KV state is recomputed when no tier holds it.

Owns: the records, the `HistoryStore` protocol, the stores on SQLite and Postgres, their reader for another
process, copies from one to the other, and the lock and the fingerprint of a history.
Does not know: jax, pages, scheduling, or how text becomes ids.
"""

from pensieve_jax.history.fingerprint import history_fingerprint
from pensieve_jax.history.opening import open_store
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.sqlite_store import SQLiteHistoryStore
from pensieve_jax.history.store import (
    CUT_FINISH_REASON,
    ConversationInfo,
    ConversationRecord,
    Cut,
    HistoryStore,
    TurnRecord,
)
from pensieve_jax.text.messages import Message

__all__ = [
    "CUT_FINISH_REASON",
    "ConversationInfo",
    "ConversationRecord",
    "Cut",
    "HistoryReader",
    "HistoryStore",
    "Message",
    "SQLiteHistoryStore",
    "TurnRecord",
    "history_fingerprint",
    "open_store",
]
