"""How an engine comes to life, in a process of its own.

Owns: the socket pair, starting the other side, waiting for its end, and ending it by force.
Does not know: what is said over the socket, or when to start again.
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
from typing import Protocol

from pensieve_jax.server.engine_process.messages import Start

_WORKER = "pensieve_jax.server.engine_process.worker"
_ROOT = Path(__file__).parents[3]  # what the package is imported from


class EngineHandle(Protocol):
    """An engine that was started.

    Attributes:
      front: this side's end of the socket pair.
      greeting: what it has to be sent first.
    """

    front: socket.socket
    greeting: Start | None

    async def wait(self) -> str:
        """Until it has ended; how, in words that follow "it"."""
        ...

    def kill(self) -> None:
        """End it at once, where that can be done."""
        ...


type Begin = Callable[[], Awaitable[EngineHandle]]
"""Starts an engine."""


class ProcessHandle:
    """An engine in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, front: socket.socket, greeting: Start) -> None:
        self.front = front
        self.greeting: Start | None = greeting
        self.process = process

    @staticmethod
    async def begin(greeting: Start) -> ProcessHandle:
        """Start a process, by executing Python anew: a fork would copy the locks of other threads."""
        front, engine = socket.socketpair()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _WORKER, str(engine.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[engine.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for the front
                env={**os.environ, "PYTHONPATH": path},
            )
        except BaseException:
            front.close()
            raise
        finally:
            engine.close()
        return ProcessHandle(process, front, greeting)

    async def wait(self) -> str:
        """Until the process has ended."""
        status = await self.process.wait()
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
