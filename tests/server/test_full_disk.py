"""A history that cannot be written, seen from outside: typed errors, no loss, and service once there is room.

A history that is gone ends the server.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.history import open_store
from pensieve_jax.server.main import EXIT_DAMAGED
from tests.deadlines import TIMEOUT_S
from tests.server.faults.served import FaultyServer
from tests.server.faults.worker import PRAGMA

LONG = "a text that takes more than a page " * 300


class Broken:
    """A server whose history connection runs pragmas on demand."""

    def __init__(self, directory: Path) -> None:
        self.pragma = directory / "pragma"
        self.server = FaultyServer(directory, **{PRAGMA: str(self.pragma)})

    def say(self, pragma: str) -> None:
        """Run a pragma on the engine's connection; return once it has run."""
        part = self.pragma.with_suffix(".part")
        part.write_text(pragma)
        part.rename(self.pragma)
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.pragma.exists():
            assert time.monotonic() < deadline_s
            self.server.ask("GET", "/v1/pensieve/stats")


@pytest.fixture
def broken(tmp_path):
    broken = Broken(tmp_path)
    yield broken
    assert broken.server.close() == 0, broken.server.log[-3000:]


def is_refused(answer: Any) -> None:
    """Check for a 500 in the API's format, without a hint to retry at once."""
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == "history_failed", error
    assert error["type"] == "server_error" and answer.headers["x-should-retry"] == "false"


def rows(history: Path) -> dict[str, int]:
    with sqlite3.connect(f"file:{history}?mode=ro", uri=True) as connection:
        found = {
            name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in ("turns", "responses", "conversations", "items", "idempotency")
        }
    connection.close()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("breaks", "mends"),
    [
        ("PRAGMA max_page_count = 1", "PRAGMA max_page_count = 1000000"),  # at least the current size
        ("PRAGMA query_only = 1", "PRAGMA query_only = 0"),
    ],
    ids=["full", "read-only"],
)
def test_a_history_that_cannot_be_written(broken, breaks, mends):
    server = broken.server
    ask, limits = server.ask, {"max_output_tokens": 4, "temperature": 0}
    conversation = ask("POST", "/v1/conversations", {}).json()["id"]
    first = ask("POST", "/v1/responses", {"input": "hi", "conversation": conversation, **limits}).json()
    engine, before = server.engine_pid, rows(server.history)
    broken.say(breaks)
    said: list[dict[str, Any]] = [
        {"input": LONG[:120], "conversation": conversation, **limits},
        {"input": LONG[:120], "previous_response_id": first["id"], **limits},
        {"input": LONG[:120], "background": True, **limits},
    ]
    # Free space in pages is used up first: the last refusal must be reported.
    refused, kept = [], []
    for _ in range(40):
        for body in said:
            answer = ask("POST", "/v1/responses", body)
            if answer.status_code == 200:
                kept.append(answer.json())
            else:
                is_refused(answer)
                refused.append(body)
        if len(refused) > 2 * len(said):
            break
    assert len(refused) > 2 * len(said)
    is_refused(ask("POST", "/v1/conversations", {"items": [{"role": "user", "content": LONG}]}))
    is_refused(ask("POST", "/v1/responses", said[0], **{"Idempotency-Key": "k"}))
    streamed = ask("POST", "/v1/responses", {**said[0], "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    told = {event["type"]: event for event in events}
    assert told["error"]["code"] == "history_failed" and events[-1]["type"] == "response.failed"
    # Requests that need no space are still served.
    assert ask("GET", f"/v1/responses/{first['id']}").json()["id"] == first["id"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert ask("POST", "/v1/chat/completions", chat).status_code == 200
    assert ask("POST", "/v1/responses", {"input": "hi", "store": False, **limits}).status_code == 200
    foreground = [response for response in kept if not response["background"]]
    broken.say(mends)
    for body in (*said[:2], {**said[0], "input": "k"}):
        answer = ask("POST", "/v1/responses", body)
        assert answer.status_code == 200, answer.text
        foreground.append(answer.json())
    assert server.engine_pid == engine, "the engine was started again"
    items = ask("GET", f"/v1/conversations/{conversation}/items?limit=100").json()["data"]
    assert len(items) == 2 + 2 * sum(response.get("conversation") is not None for response in foreground)
    for response in (first, *foreground):
        assert ask("GET", f"/v1/responses/{response['id']}").json()["output"] == response["output"]
    background = len(kept) + 3 - len(foreground)
    after = rows(server.history)
    assert after["responses"] == before["responses"] + len(foreground) + background
    assert "Traceback" not in server.log


def start(history: Path) -> subprocess.CompletedProcess[str]:
    """Run `pensieve serve` to its end."""
    launcher = Path(__file__).parents[2] / "scripts" / "serve.py"
    command = [sys.executable, str(launcher), "--model=random:llama-tiny", "--port=0", f"--history={history}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.long  # three starts that import JAX; commands/test_serve.py has a short one
def test_an_unusable_history_is_reported_in_one_line_and_ends_the_command(tmp_path):
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE recipes(name TEXT)")
    connection.close()
    taken = tmp_path / "taken.sqlite"
    with open_store(taken, fingerprint="test"):
        for history, word in (
            (foreign, "foreign.sqlite"),
            (taken, f"process {os.getpid()} has open"),
            (tmp_path / "nowhere" / "history.sqlite", "nowhere"),
        ):
            done = start(history)
            said = [line for line in done.stderr.strip().splitlines() if not line.startswith('{"time":')]
            assert done.returncode == 2 and done.stdout == "", done
            assert len(said) == 1 and word in said[0], done.stderr


@pytest.mark.long
def test_a_history_that_was_removed_ends_the_server_with_its_engine(tmp_path):
    """An engine with a new file would commit turns, and confirm them, that the front end never finds."""
    with FaultyServer(tmp_path) as server:
        body = {"input": "hi", "max_output_tokens": 4}
        assert server.ask("POST", "/v1/responses", body).status_code == 200
        for file in tmp_path.glob(f"{server.history.name}*"):
            file.unlink()
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.process is not None
        assert server.process.wait(TIMEOUT_S) == EXIT_DAMAGED
        assert "which is missing or empty" in server.log and not server.history.exists()
