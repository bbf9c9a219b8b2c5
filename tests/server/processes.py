"""The processes of a running server."""

from __future__ import annotations

from pathlib import Path

from pensieve_jax.server.http.text_processes import WORKER


def engine_of(front: int) -> int:
    """Return the pid of the engine, the only child of the front end that reads no long texts."""
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    (engine,) = (pid for pid in children if WORKER not in Path(f"/proc/{pid}/cmdline").read_text())
    return int(engine)
