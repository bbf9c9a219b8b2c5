"""The durable raw tokens of conversations: what KV state is recomputed from when no tier holds it.

Owns: the records, the `HistoryStore` protocol, the SQLite store, the lock and the fingerprint of a history.
Does not know: jax, pages, scheduling, or how text becomes ids.
Called by: `assembly`, which opens one, and the engine (commit, list, load, truncate, delete).
"""

from pensieve_jax.history.fingerprint import history_fingerprint
from pensieve_jax.history.sqlite_store import SQLiteHistoryStore
from pensieve_jax.history.store import (
    CUT_FINISH_REASON,
    ConversationInfo,
    ConversationRecord,
    HistoryStore,
    TurnRecord,
)
from pensieve_jax.text.messages import Message

__all__ = [
    "CUT_FINISH_REASON",
    "ConversationInfo",
    "ConversationRecord",
    "HistoryStore",
    "Message",
    "SQLiteHistoryStore",
    "TurnRecord",
    "history_fingerprint",
]
