"""The tables of a history file, and the marks that identify such a file.

Owns: the schema, its version, and the application id.
Does not know: files, or what is written into the tables.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Mapping
from typing import Final

from pensieve_jax.history import stored_amounts

APPLICATION_ID: Final = 0x50454E53  # "PENS", at byte 68 of the file
SCHEMA_VERSION: Final = 4
OLDER_VERSIONS: Final = (2, 3)
"""Versions that a store changes to the newest one when it opens them.

In version 2 no turn replaced tokens. Until version 3, responses did not count their starts, and what each
owner stores was not counted.
"""

META: Final = "CREATE TABLE meta(key TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)"

# Covers the list of trees. Older files, created without this index or the next, get it when they are opened.
RESPONSES_BY_TREE: Final = (
    "CREATE INDEX IF NOT EXISTS responses_by_tree ON responses(owner, turn_id, completed_at_s) "
    "WHERE turn_id IS NOT NULL"
)

# Lists named conversations by idle time: with idle limits set, every submission to an engine needs it.
NAMED_BY_ACTIVITY: Final = (
    "CREATE INDEX IF NOT EXISTS named_by_activity "
    "ON conversations(owner, last_active_s DESC, conversation_id) WHERE metadata IS NULL"
)

# Lists a server's conversations by idle time, for those that expire.
KEPT_BY_ACTIVITY: Final = (
    "CREATE INDEX IF NOT EXISTS kept_by_activity ON conversations(last_active_s) WHERE metadata IS NOT NULL"
)

STARTS: Final = "starts INTEGER NOT NULL DEFAULT 0 CHECK (starts >= 0)"

# The CHECKs are part of what quick_check verifies. Every key begins with the owner: no look-up finds another
# owner's rows, and a look-up takes as long for them as for rows that do not exist.
#
# A turn never changes. `num_tokens` counts its whole path, from the first turn of its tree. `kept` is 1 for a
# turn that stays although no later turn, head or response needs it.
#
# `messages` is a JSON list, or an object of `messages` and what the chat template got beside them: `tools`,
# `arguments`, `prefill` and `generation_prompt`.
#
# `conversations` repeats the data of its head turn that a listing shows, so that a listing reads no tokens;
# both change in the same transaction. `metadata` is NULL for a conversation that a caller of the library
# names, and JSON for a server's.
#
# `turn_id` of a response is that of its reply; while it is queued, that of the turn that it continues.
# `job` of a queued response is what is needed to run it; once it has a reply, the log-probabilities of its
# tokens (`codec.pack_logprobs`), if they were requested.
#
# `starts` of a response counts its runs without a known end; see `server.openai.responses.background`.
#
# `response_id` of a key is that of the response to its request, or the name of the items that its request
# appended.
#
# `released`: turns that nothing in the file needed while a running turn continued them.
TABLES: Final = (
    """CREATE TABLE turns(
  owner TEXT NOT NULL,
  turn_id TEXT NOT NULL CHECK (length(turn_id) = 32),
  parent_id TEXT,
  turn_index INTEGER NOT NULL CHECK (turn_index >= 0),
  num_tokens INTEGER NOT NULL CHECK (num_tokens >= 0),
  prompt_ids BLOB NOT NULL CHECK (typeof(prompt_ids) = 'blob' AND length(prompt_ids) % 4 = 0),
  output_ids BLOB NOT NULL CHECK (typeof(output_ids) = 'blob' AND length(output_ids) % 4 = 0),
  seed INTEGER NOT NULL,
  finish_reason TEXT NOT NULL,
  created_at_s REAL NOT NULL,
  messages TEXT,
  output_text TEXT,
  usage TEXT,
  chain BLOB,
  kept INTEGER NOT NULL CHECK (kept IN (0, 1)),
  checksum INTEGER NOT NULL,
  PRIMARY KEY (owner, turn_id)
)""",
    "CREATE INDEX turns_by_parent ON turns(owner, parent_id) WHERE parent_id IS NOT NULL",
    "CREATE INDEX turns_by_chain ON turns(owner, chain) WHERE chain IS NOT NULL",
    """CREATE TABLE conversations(
  owner TEXT NOT NULL,
  conversation_id TEXT NOT NULL,
  head_turn TEXT,
  version INTEGER NOT NULL,
  metadata TEXT,
  created_at_s REAL NOT NULL,
  last_active_s REAL NOT NULL,
  num_tokens INTEGER NOT NULL CHECK (num_tokens >= 0),
  num_turns INTEGER NOT NULL CHECK (num_turns >= 0),
  PRIMARY KEY (owner, conversation_id)
)""",
    "CREATE INDEX conversations_by_head ON conversations(owner, head_turn) WHERE head_turn IS NOT NULL",
    NAMED_BY_ACTIVITY,
    KEPT_BY_ACTIVITY,
    """CREATE TABLE items(
  owner TEXT NOT NULL,
  conversation_id TEXT NOT NULL,
  position INTEGER NOT NULL CHECK (position >= 0),
  item_id TEXT NOT NULL,
  item TEXT NOT NULL,
  PRIMARY KEY (owner, conversation_id, position)
)""",
    "CREATE UNIQUE INDEX items_by_id ON items(owner, conversation_id, item_id)",
    f"""CREATE TABLE responses(
  owner TEXT NOT NULL,
  response_id TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('queued', 'completed', 'incomplete', 'cancelled', 'failed')),
  turn_id TEXT,
  request TEXT NOT NULL,
  input_items TEXT NOT NULL,
  output_item_id TEXT NOT NULL,
  created_at_s REAL NOT NULL,
  expires_at_s REAL NOT NULL,
  completed_at_s REAL,
  background INTEGER NOT NULL CHECK (background IN (0, 1)),
  body_sha256 TEXT NOT NULL,
  error TEXT,
  job BLOB,
  {STARTS},
  PRIMARY KEY (owner, response_id)
)""",
    RESPONSES_BY_TREE,
    "CREATE INDEX responses_by_end ON responses(expires_at_s)",
    "CREATE INDEX responses_by_body ON responses(owner, body_sha256, created_at_s) WHERE body_sha256 <> ''",
    "CREATE INDEX responses_queued ON responses(created_at_s) WHERE status = 'queued'",
    """CREATE TABLE idempotency(
  owner TEXT NOT NULL,
  key TEXT NOT NULL,
  body_sha256 TEXT NOT NULL,
  response_id TEXT NOT NULL,
  expires_at_s REAL NOT NULL,
  PRIMARY KEY (owner, key)
)""",
    "CREATE INDEX idempotency_by_response ON idempotency(owner, response_id)",
    "CREATE INDEX idempotency_by_end ON idempotency(expires_at_s)",
    "CREATE TABLE released(owner TEXT NOT NULL, turn_id TEXT NOT NULL, PRIMARY KEY (owner, turn_id))",
)


def create_tables(connection: sqlite3.Connection, *, fingerprint: str) -> None:
    """Create an empty history of the newest version; the caller holds a transaction."""
    connection.execute(META)
    for statement in (*TABLES, stored_amounts.TABLE, *stored_amounts.sqlite_triggers()):
        connection.execute(statement)
    connection.execute("INSERT INTO meta VALUES ('fingerprint', ?)", (fingerprint,))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade a history of an older version to the newest one; the caller holds a transaction.

    Reads all rows once, to count what each owner stores.
    """
    connection.execute(f"ALTER TABLE responses ADD COLUMN {STARTS}")
    connection.execute(stored_amounts.TABLE)
    connection.execute(stored_amounts.recount_in_sqlite())
    for statement in stored_amounts.sqlite_triggers():
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def columns_of(connection: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of a table's columns; empty if the table does not exist."""
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def how_to_read(version: int) -> str:
    """Return what to do with a history of another version than the newest one, without a full stop."""
    if version in OLDER_VERSIONS:
        return "open it once with a server or an LLM of this release, which changes it to that version"
    return "use the release that wrote it"


def columns_in(version: int) -> Mapping[str, frozenset[str]]:
    """Return the columns by table of a history of a version that is read."""
    columns = newest_columns()
    if version == SCHEMA_VERSION:
        return columns
    older = {table: names for table, names in columns.items() if table != "stored_amounts"}
    return older | {"responses": columns["responses"] - {"starts"}}


@functools.cache
def newest_columns() -> Mapping[str, frozenset[str]]:
    """Return the newest version's columns by table; cached, since every opened history needs them."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        create_tables(connection, fingerprint="")
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return {name: frozenset(columns_of(connection, name)) for name in names}
