"""The processes of a running server."""

from __future__ import annotations

from pathlib import Path

from pensieve_jax.server.http.text_processes import WORKER
from tests.deadlines import wait_until


def engine_of(front: int) -> int:
    """Return the pid of the engine, the only child of the front end that reads no long texts.

    Waits while there are two: a child looks like its parent until it runs its own program.
    """
    found: list[int] = []

    def is_one() -> bool:
        children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
        commands = {int(pid): _command_of(pid) for pid in children}
        found[:] = [pid for pid, command in commands.items() if command and WORKER not in command]
        return len(found) == 1

    wait_until(is_one)
    return found[0]


def _command_of(pid: str) -> str:
    """Return the command line of a process; "" for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
