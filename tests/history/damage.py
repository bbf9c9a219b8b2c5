"""Damages the file of a history that is open."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def damage(path: Path) -> None:
    """Overwrite every page but the first; all connections read the file anew."""
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("INSERT INTO meta VALUES ('damage', '')")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page_bytes,) = other.execute("PRAGMA page_size").fetchone()
    finally:
        other.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(page_bytes)
        file.write(b"\xff" * (size - page_bytes))
