"""The engine process's log: lines in the server's format, without messages of unexpected errors."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest

from pensieve_jax import AsyncEngine, EngineConfig
from pensieve_jax.server.engine_process.messages import Start
from pensieve_jax.server.engine_process.wire import FrameWriter
from tests.server.engine_process.fakes import TIMEOUT_S

SECRET = "words of a prompt"
# An engine that logs, fails in a thread, and then fails itself, without a model or a device.
WORKER = f"""
import logging, sys, threading
from pensieve_jax.server.engine_process import engine_server, worker

def fail(*_):
    raise RuntimeError({SECRET!r})

class Engine:
    grammars = None

class Parts:
    engine, tokenizer = Engine, None

class Server:
    def __init__(self, *_, **more):
        pass

    def run(self):
        engine_server._log.error("The connection to the front end is closed: %s", "it is gone.")
        logging.getLogger("pensieve_jax.device.model_runner").warning("A step failed.")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        fail()

worker.assembled = worker._info = lambda *_: Parts
worker.EngineServer = Server
"""
SERVE = "sys.exit(worker.main())"


def greeting(**more) -> Start:
    return Start("random:llama-tiny", "auto", None, "normal", EngineConfig(), False, **more)


@pytest.mark.parametrize(
    "log_format", ["json", *(pytest.param(name, marks=pytest.mark.long) for name in ("text", "auto"))]
)
def test_log_lines_have_the_chosen_format(log_format: str) -> None:
    ended = run_worker(WORKER + SERVE, log_format)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and SECRET not in ended.stderr and len(lines) == 4
    if log_format == "text":
        assert lines[0].endswith(" The connection to the front end is closed: it is gone.")
        assert "builtins.RuntimeError" in lines[2] and "builtins.RuntimeError" in lines[3]
        return
    found = [json.loads(line) for line in lines]
    assert [line["level"] for line in found] == ["error", "warning", "critical", "critical"]
    assert found[0]["message"] == "The connection to the front end is closed: it is gone."
    assert {line["error"]["kind"] for line in found[2:]} == {"builtins.RuntimeError"}


def test_a_startup_failure_is_reported_with_its_message() -> None:
    """No prompt exists yet that the message might quote, and the operator needs the cause."""
    ended = run_worker(WORKER + "worker.assembled = fail\n" + SERVE, "json")
    assert ended.returncode == 1 and ended.stderr.endswith(f"RuntimeError: {SECRET}\n")


@pytest.mark.long
def test_closing_its_own_socket_is_not_mistaken_for_the_front_ends_end() -> None:
    """The thread that watches the front end stops before the error is reported, however long that takes."""
    serve = """
try:
    worker.main()
except RuntimeError:
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in others:
        thread.join()
    sys.exit(7)
"""
    assert run_worker(WORKER + "worker.assembled = fail\n" + serve, "json").returncode == 7


def run_worker(code: str, log_format: str) -> subprocess.CompletedProcess[str]:
    """Run a process of this code to its end, after sending it what to serve."""
    front, engine = socket.socketpair()
    with front, engine:
        threading.Thread(
            target=front.sendall, args=(FrameWriter().frame(greeting(log_format=log_format)),)
        ).start()
        return subprocess.run(
            [sys.executable, "-c", code, str(engine.fileno())],
            pass_fds=[engine.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


def test_the_caller_chooses_the_log_format() -> None:
    engine = AsyncEngine.start("random:llama-tiny", log_format="json")
    assert engine._begin.args[0].log_format == "json"  # type: ignore[attr-defined]
    assert AsyncEngine.start("random:llama-tiny")._begin.args[0].log_format is None  # type: ignore[attr-defined]
