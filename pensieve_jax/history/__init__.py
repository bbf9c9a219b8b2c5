"""The durable raw tokens of turns: what KV state is recomputed from when no tier holds it.

Owns: the records, the `HistoryStore` protocol, the stores on SQLite and Postgres and their reader for another
process, copies from one to the other, the lock and the fingerprint of a history.
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
