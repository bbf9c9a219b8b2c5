"""`pensieve serve` with an engine process on the fake runner: it starts without a model or a device.

A test's own code runs before `main`, in the same process.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

from pensieve_jax import AsyncEngine, EngineConfig
from pensieve_jax.commands import serve
from pensieve_jax.commands.launch import run
from pensieve_jax.server.engine_process import spawn
from pensieve_jax.server.engine_process.messages import Start
from tests.server.faults.served import ROOT


def main() -> None:
    """Serve until a signal ends it, with the flags of the command line; then exit the process."""
    AsyncEngine.start = staticmethod(_start)  # type: ignore[method-assign, assignment]
    serve.define_flags()
    run(serve.main)


def _start(model: str, *, history: str, **_: Any) -> AsyncEngine:
    greeting = Start(model, "auto", history, "normal", EngineConfig(), False)
    return AsyncEngine(functools.partial(spawn.ProcessHandle.begin, greeting, "tests.server.faults.worker"))


def started(before: str, *flags: str, log: Any = subprocess.PIPE, **more: Any) -> subprocess.Popen[str]:
    """Start a process that runs `before`, and then serves at any free port; stderr goes to `log`."""
    code = f"from tests.server.faults import command\n{before}\ncommand.main()"
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, "--port=0", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        **more,
    )
