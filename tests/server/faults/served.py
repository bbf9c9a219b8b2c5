"""A server of two processes, controlled from outside: started, killed, and restarted at the same port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from tests.deadlines import TIMEOUT_S
from tests.server.faults.worker import PLAN, PlannedKill
from tests.server.processes import engine_of

ROOT = Path(__file__).parents[3]


class FaultyServer:
    """A server that is restarted whenever it is found dead, until it is closed.

    Attributes:
        history: its file.
        num_starts: starts of the front end.
    """

    def __init__(self, directory: Path, deaths: Sequence[PlannedKill] = (), **environment: str) -> None:
        self.history = directory / "history.sqlite"
        self._plan = directory / "plan"
        self._plan.write_text("".join(json.dumps(death) + "\n" for death in deaths))
        self._log = (directory / "log").open("ab")
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), PLAN: str(self._plan), **environment}
        self._port = 0
        self.num_starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def num_deaths_left(self) -> int:
        return len(self._plan.read_text().splitlines())

    @property
    def log(self) -> str:
        return (self.history.parent / "log").read_text()

    @property
    def engine_pid(self) -> int:
        assert self.process is not None
        return engine_of(self.process.pid)

    def start(self) -> None:
        """Start it and wait until it is ready; retry if it dies on the way, as an init system would."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not self._started():
            assert time.monotonic() < deadline_s, self.log[-3000:]

    def _started(self) -> bool:
        command = [sys.executable, "-m", "tests.server.faults.front", str(self.history), str(self._port)]
        self.num_starts += 1
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, cwd=ROOT, env=self._environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        if not line:
            self._reap()
            return False
        self._port = int(line.rsplit(":", 1)[1])
        return True

    def revive(self) -> None:
        """Restart it if its front end is dead."""
        assert self.process is not None
        if self.process.poll() is not None:
            self._reap()
            self.start()

    def kill_both(self) -> None:
        """Kill the front end and its engine with SIGKILL."""
        assert self.process is not None
        engine = self.engine_pid
        for pid in (self.process.pid, engine):
            os.kill(pid, signal.SIGKILL)
        self._reap()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        return httpx2.request(
            method, self.url + path, json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False
        )

    def close(self) -> int:
        """Drain it and wait; return the front end's exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        status = self._reap()
        self._log.close()
        return status

    def _reap(self) -> int:
        assert self.process is not None and self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(TIMEOUT_S)

    def __enter__(self) -> FaultyServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
