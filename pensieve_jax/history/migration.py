"""Brings a history of an older version to the newest one, in one transaction.

Owns: what the tables of version 1 were, and what becomes of each row.
Does not know: files or locks; `database` has checked that the file is a sound history of this model.

Version 1 had no tree: a conversation was its turns by number. Each becomes a path of its own. Token ids and
their checksums are copied as they are, and a conversation keeps the counts it had: what was damaged in one is
told when that one is read, as before, and harms no other.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from pensieve_jax.history import schema

VERSION_1_COLUMNS: Final = {
    "meta": {"key", "value"},
    "conversations": {"conversation_id", "num_tokens", "num_turns", "last_active_s"},
    "turns": {
        *("conversation_id", "turn_index", "prompt_ids", "output_ids", "seed"),
        *("finish_reason", "created_at_s", "messages", "output_text", "checksum"),
    },
}

# Ids as `new_turn_id` makes them: a root that a conversation's turns share, and a part of each one's own.
_STEPS: Final = (
    "ALTER TABLE turns RENAME TO old_turns",
    "ALTER TABLE conversations RENAME TO old_conversations",
    *schema.TABLES,
    "CREATE TABLE roots(conversation_id TEXT PRIMARY KEY, root TEXT NOT NULL)",
    "INSERT INTO roots SELECT conversation_id, lower(hex(randomblob(8))) FROM old_turns "
    "GROUP BY conversation_id",
    "CREATE TABLE places(conversation_id TEXT, turn_index INTEGER, turn_id TEXT, num_tokens INTEGER, "
    "PRIMARY KEY (conversation_id, turn_index))",
    """INSERT INTO places
  SELECT conversation_id, turn_index, root || lower(hex(randomblob(8))),
    sum((length(prompt_ids) + length(output_ids)) / 4)
      OVER (PARTITION BY conversation_id ORDER BY turn_index)
  FROM old_turns JOIN roots USING (conversation_id)""",
    """INSERT INTO turns
  SELECT '', turn_id,
    (SELECT turn_id FROM places AS before WHERE before.conversation_id = places.conversation_id
      AND before.turn_index < places.turn_index ORDER BY before.turn_index DESC LIMIT 1),
    turn_index, num_tokens, prompt_ids, output_ids, seed, finish_reason, created_at_s, messages, output_text,
    NULL, NULL, 0, checksum
  FROM places JOIN old_turns USING (conversation_id, turn_index) ORDER BY conversation_id, turn_index""",
    """INSERT INTO conversations
  SELECT '', conversation_id,
    (SELECT turn_id FROM places WHERE places.conversation_id = old_conversations.conversation_id
      ORDER BY turn_index DESC LIMIT 1),
    num_turns, NULL,
    coalesce((SELECT min(created_at_s) FROM old_turns
      WHERE old_turns.conversation_id = old_conversations.conversation_id), last_active_s),
    last_active_s, num_tokens, num_turns
  FROM old_conversations""",
    *(f"DROP TABLE {table}" for table in ("places", "roots", "old_turns", "old_conversations")),
    f"PRAGMA user_version = {schema.SCHEMA_VERSION}",
)


def migrate(connection: sqlite3.Connection) -> None:
    """Version 1 becomes the newest; what fails, or is killed, leaves version 1 as it was.

    The file needs room for both versions while it lasts.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        for statement in _STEPS:
            connection.execute(statement)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
