"""The processes of a server that runs as a command."""

from __future__ import annotations

from pathlib import Path

from pensieve_jax.server.http.text_processes import WORKER


def engine_pid(front: int) -> int:
    """Return the id of a front end's engine process; its other children read long texts."""
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    texts = WORKER.encode()
    (engine,) = [int(pid) for pid in children if texts not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return engine
