"""A history file as the first version of the schema had it, made without this release's code.

Owns: that schema, word for word, and how its rows were packed.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

APPLICATION_ID = 0x50454E53
SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL);
CREATE TABLE conversations(
  conversation_id TEXT PRIMARY KEY NOT NULL,
  num_tokens INTEGER NOT NULL CHECK (num_tokens >= 0),
  num_turns INTEGER NOT NULL CHECK (num_turns >= 0),
  last_active_s REAL NOT NULL
);
CREATE TABLE turns(
  conversation_id TEXT NOT NULL,
  turn_index INTEGER NOT NULL CHECK (turn_index >= 0),
  prompt_ids BLOB NOT NULL CHECK (typeof(prompt_ids) = 'blob' AND length(prompt_ids) % 4 = 0),
  output_ids BLOB NOT NULL CHECK (typeof(output_ids) = 'blob' AND length(output_ids) % 4 = 0),
  seed INTEGER NOT NULL,
  finish_reason TEXT NOT NULL,
  created_at_s REAL NOT NULL,
  messages TEXT,
  output_text TEXT,
  checksum INTEGER NOT NULL,
  PRIMARY KEY (conversation_id, turn_index)
);
"""

type Said = tuple[Sequence[int], Sequence[int]]  # a prompt and a reply


def make(
    path: Path, fingerprint: str, conversations: Iterable[tuple[str, Sequence[Said]]], *, wal: bool = True
) -> None:
    """A history of these conversations; their turns end at 0.5, 1.5, ... and have seeds at the limits."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        if wal:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN")
        for statement in SCHEMA.split(";\n"):
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('fingerprint', ?)", (fingerprint,))
        connection.execute("INSERT INTO meta VALUES ('note:experience', 'learned')")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
        for name, turns in conversations:
            num_tokens = 0
            for index, (prompt, output) in enumerate(turns):
                packed = [struct.pack(f"<{len(ids)}i", *ids) for ids in (prompt, output)]
                checksum = zlib.crc32(packed[1], zlib.crc32(packed[0], len(packed[0])))
                values = (
                    *(name, index, *packed, -1 if index % 2 else 2**62, "stop", index + 0.5),
                    *('[{"role":"user","content":"hi"}]', "ho", checksum),
                )
                connection.execute(f"INSERT INTO turns VALUES ({', '.join('?' * 10)})", values)
                num_tokens += len(prompt) + len(output)
            last_active_s = len(turns) - 0.5 if turns else 3.0
            connection.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?)", (name, num_tokens, len(turns), last_active_s)
            )
        connection.execute("COMMIT")
