"""Starts an engine in a separate process.

Owns: the socket pair, the start of the process, waiting for its end, and killing it.
Does not know: the protocol on the socket, or when to restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

from pensieve_jax.server.engine_process.messages import Start

WORKER: Final = "pensieve_jax.server.engine_process.worker"
_ROOT = Path(__file__).parents[3]  # the directory from which the package is imported


class EngineHandle(Protocol):
    """Handle of a started engine.

    Attributes:
      front: the front end's end of the socket pair.
      greeting: the message that the engine must get first, if any.
    """

    front: socket.socket
    greeting: Start | None

    async def wait(self) -> str:
        """Wait until the engine has ended; return how, as a phrase that follows "it"."""
        ...

    def kill(self) -> None:
        """Kill the engine at once, if that is possible."""
        ...


type Begin = Callable[[], Awaitable[EngineHandle]]
"""Function that starts an engine."""


class ProcessHandle:
    """Handle of an engine in a separate process."""

    def __init__(self, process: asyncio.subprocess.Process, front: socket.socket, greeting: Start) -> None:
        self.front = front
        self.greeting: Start | None = greeting
        self.process = process

    @staticmethod
    async def begin(greeting: Start, worker: str = WORKER) -> ProcessHandle:
        """Run the module `worker` in a new interpreter; a fork would copy the locks of other threads."""
        front, engine = socket.socketpair()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", worker, str(engine.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[engine.fileno()],
                start_new_session=True,  # only the front end handles Ctrl-C in a terminal
                env={**os.environ, "PYTHONPATH": path},
            )
        except BaseException:
            front.close()
            raise
        finally:
            engine.close()
        return ProcessHandle(process, front, greeting)

    async def wait(self) -> str:
        """Wait until the process has ended; return how."""
        status = await self.process.wait()
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
