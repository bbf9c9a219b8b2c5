"""How an engine comes to life: in a process of its own, or on a thread of this one.

Owns: the socket pair, starting the other side, waiting for its end, and ending it by force.
Does not know: what is said over the socket, or when to start again.
The thread is for tests: it shares Python's lock with the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from pensieve_jax.engine.engine import Engine
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_jax.server.engine_process.messages import Start
from pensieve_jax.text import Tokenizer

_WORKER = "pensieve_jax.server.engine_process.worker"
_ROOT = Path(__file__).parents[3]  # what the package is imported from


class Life(Protocol):
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


type Begin = Callable[[], Awaitable[Life]]
"""Starts an engine."""


class ProcessLife:
    """An engine in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, front: socket.socket, greeting: Start) -> None:
        """Made by `begin`."""
        self.front = front
        self.greeting: Start | None = greeting
        self.process = process

    @staticmethod
    async def begin(greeting: Start) -> ProcessLife:
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
        return ProcessLife(process, front, greeting)

    async def wait(self) -> str:
        """Until the process has ended."""
        status = await self.process.wait()
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


type Parts = tuple[Engine, Tokenizer | None, EngineInfo]
"""What a thread serves."""


class ThreadLife:
    """An engine on a thread of this process."""

    def __init__(self, make: Callable[[], Parts]) -> None:
        """Start the thread, which makes the engine itself."""
        self.front, self._engine_end = socket.socketpair()
        self.greeting: Start | None = None
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._run, daemon=True, name="engine").start()

    async def wait(self) -> str:
        """Until the thread has ended."""
        await self._ended.wait()
        return "ended"

    def kill(self) -> None:
        """A thread cannot be killed; it ends with its socket."""
        with contextlib.suppress(OSError):
            self._engine_end.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            engine, tokenizer, info = self._make()
            EngineServer(engine, tokenizer, self._engine_end, info=info).run()
        finally:
            self._engine_end.close()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._ended.set)
