"""A real front end with an engine process on the fake runner: `python front.py HISTORY PORT`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from pensieve_jax import EngineConfig
from pensieve_jax.commands.launch import EXIT_BAD_INPUT
from pensieve_jax.core.errors import PensieveError
from pensieve_jax.server.app import make_application
from pensieve_jax.server.engine_process import spawn
from pensieve_jax.server.engine_process.async_llm import AsyncEngine
from pensieve_jax.server.engine_process.messages import Start
from pensieve_jax.server.engine_process.supervisor import RestartPolicy
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.logs import log_to
from pensieve_jax.server.main import serve
from pensieve_jax.server.sockets import bind
from tests.server.faults import worker
from tests.server.faults.worker import FORKS

WORKER = "tests.server.faults.worker"


class ForkServer:
    """A process that has imported everything, and forks an engine process for each socket that it receives.

    It is forked before the front end opens the history: SQLite does not survive a fork.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        front = os.getpid()
        if not os.fork():
            self._ours.close()
            _fork_engines(theirs, front)
        theirs.close()

    async def begin(self, greeting: Start) -> spawn.EngineHandle:
        front, engine = socket.socketpair()
        socket.send_fds(self._ours, [b"another"], [engine.fileno()])
        engine.close()
        return ForkedEngine(greeting, front, int(self._ours.recv(32)))


def _fork_engines(socket_: socket.socket, front: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no parent waits for them
    while True:
        message, descriptors, *_ = socket.recv_fds(socket_, 32, 1)
        if not message:
            os._exit(0)
        pid = os.fork()
        if not pid:
            worker.front_pid = front
            _run_engine(descriptors[0])
        os.close(descriptors[0])
        socket_.send(str(pid).encode())


def _run_engine(descriptor: int) -> NoReturn:
    os.setsid()
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 4096)
    sys.argv = ["worker", str(descriptor)]
    status = 1
    try:
        status = worker.main()
    except BaseException:
        traceback.print_exc()
    os._exit(status)


class ForkedEngine:
    """Handle of an engine that the fork server forked."""

    def __init__(self, greeting: Start, front: socket.socket, pid: int) -> None:
        self.greeting: Start | None = greeting
        self.front = front
        self._pid = pid

    async def wait(self) -> str:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self._pid)
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return "ended"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def main(history: str, port: str, keys_file: str | None = None) -> int:
    log_to()
    greeting = Start("fake", "auto", str(Path(history).absolute()), "normal", EngineConfig(), False)
    settings = ServerSettings(api_keys_file=keys_file, max_in_flight_per_key=1000)
    keys = ApiKeys(keys_file)
    own_process = functools.partial(spawn.ProcessHandle.begin, worker=WORKER)
    begin = ForkServer().begin if FORKS in os.environ else own_process
    return serve(
        lambda: AsyncEngine(
            functools.partial(begin, greeting),
            restarts=RestartPolicy(max_restarts=10**6, first_delay_s=0.0),
        ),
        functools.partial(make_application, settings=settings, keys=keys),
        bind("127.0.0.1", int(port)),
        drain_s=5.0,
        announce=lambda engine, address: print(f"serving at {address}", flush=True),
    )


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except PensieveError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
