"""An engine process on the fake runner that dies on schedule: `python worker.py FD`.

The schedule is the next line of the file that `PENSIEVE_FAULTS` names: which process is killed, after how
many bytes in which direction. Without a line it runs on. Integrity is checked after every step.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pensieve_jax.core.clock import WallClock
from pensieve_jax.engine.engine import Engine
from pensieve_jax.history.database import check_is_there
from pensieve_jax.history.opening import is_postgres
from pensieve_jax.server.async_engine import EngineInfo
from pensieve_jax.server.engine_process.engine_server import EngineServer
from pensieve_jax.server.engine_process.messages import Failed, Submit, sent_error
from pensieve_jax.server.engine_process.wire import FrameWriter
from pensieve_jax.server.engine_process.worker import EXIT_REFUSED, _first_message
from pensieve_jax.text import byte_tokenizer
from tests.engine.harness import Harness, small_config

FINGERPRINT = "test"
MODEL = "random:fake-tiny"
PLAN, FORKS, PRAGMA = "PENSIEVE_FAULTS", "PENSIEVE_FORKS", "PENSIEVE_PRAGMA"
DEATHS, POISON = "PENSIEVE_DEATHS", "poison"
_STEPS_TO_DEATH = 4


front_pid: int | None = None
"""Pid of the front end, if that is not this process's parent."""


class PlannedKill(NamedTuple):
    """A kill of `who` after `num_bytes` bytes in direction `way` at the engine's end of the wire."""

    who: Literal["engine", "front", "both"]
    way: Literal["in", "out"]
    num_bytes: int


class KillingSocket(socket.socket):
    """Socket that passes the planned number of bytes, then kills."""

    kill: PlannedKill | None = None
    left = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        if self.kill is None or self.kill.way == "out":
            return super().recv(size, flags)
        if not self.left:
            self._die()
        data = super().recv(min(size, self.left) if self.left else size, flags)
        self.left -= len(data)
        return data

    def send(self, data: Any, flags: int = 0) -> int:
        if self.kill is None or self.kill.way == "in":
            return super().send(data, flags)
        if not self.left:
            self._die()
        sent = super().send(data[: self.left] if self.left else data, flags)
        self.left -= sent
        if not self.left:
            self._die()
        return sent

    def _die(self) -> None:
        assert self.kill is not None
        if self.kill.who != "engine":
            os.kill(front_pid or os.getppid(), signal.SIGKILL)
        if self.kill.who != "front":
            os.kill(os.getpid(), signal.SIGKILL)
        self.kill = None


class CheckedServer(EngineServer):
    """Checks after every step that pages, chunks, conversations and requests agree.

    The pragmas in the file that `PENSIEVE_PRAGMA` names run once on the history's own connection. A turn
    whose messages have the text `POISON` kills this process some steps later, if `PENSIEVE_DEATHS` names a
    file, which gets a line.
    """

    def _submit(self, message: Submit, *arguments: Any) -> None:
        super()._submit(message, *arguments)
        if POISON in str(message):
            self._steps_to_live = _STEPS_TO_DEATH

    _steps_to_live: int | None = None

    def run_once(self) -> None:
        deaths = os.environ.get(DEATHS)
        if deaths is not None and self._steps_to_live is not None and self._engine.has_unfinished:
            self._steps_to_live -= 1
            if not self._steps_to_live:
                with open(deaths, "a") as file:
                    file.write(f"{os.getpid()}\n")
                os.kill(os.getpid(), signal.SIGKILL)
        pragma = os.environ.get(PRAGMA)
        if pragma is not None and os.path.exists(pragma):
            connection = self._engine._store.inner._connection  # type: ignore[attr-defined]
            connection.execute(Path(pragma).read_text())
            os.unlink(pragma)
        super().run_once()
        if not self._engine.closed:
            self._engine.check_integrity()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with KillingSocket(fileno=int(sys.argv[1])) as front:
        start = _first_message(front)
        if start is None:
            return 0
        assert start.history is not None
        from pensieve_jax.core.errors import PensieveError

        try:
            engine = new_engine(start.history, start.may_make_history)
        except PensieveError as error:
            front.sendall(FrameWriter().frame(Failed(sent_error(error))))
            return EXIT_REFUSED
        front.kill = _next_kill()
        front.left = front.kill.num_bytes if front.kill else 0
        info = EngineInfo(
            model_name="fake",
            source=MODEL,
            fingerprint=FINGERPRINT,
            history=start.history,
            limits=engine.limits,
            max_num_running=8,
            chunk_tokens=16,
            description={
                "model": {"name": "fake"},
                "cache": {"gpu_pages": 60, "cpu_slots": 30, "summary": "60 pages of a fake KV cache"},
            },
        )
        CheckedServer(engine, byte_tokenizer(), front, info=info).run()
    return 0


def new_engine(history: str, may_make_history: bool) -> Engine:
    """Return a small engine on a real clock, with a real history."""
    if not may_make_history and not is_postgres(history):
        check_is_there(Path(history))
    config = small_config(gpu_pages=60, cpu_pages=30)
    harness = Harness(config, path=history, tokenizer=byte_tokenizer(), clock=WallClock())  # type: ignore[arg-type]
    harness.scheduled = _Forgetful()
    return harness.engine


class _Forgetful(list[Any]):
    """List that stays empty: the harness records every step, which would grow without end in a server."""

    def append(self, _: Any) -> None:
        pass


def _next_kill() -> PlannedKill | None:
    plan = os.environ.get(PLAN)
    if plan is None:
        return None
    path = Path(plan)
    first, _, rest = path.read_text().partition("\n")
    path.write_text(rest)
    return PlannedKill(*json.loads(first)) if first and first != "null" else None


if __name__ == "__main__":
    sys.exit(main())
