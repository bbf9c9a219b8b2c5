"""A background response that kills every engine that runs it, on two servers with one Postgres."""

from __future__ import annotations

import os
import random
import re
import subprocess
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.deadlines import wait_until
from tests.seeds import enough, new_seed
from tests.server.faults import command
from tests.server.faults.served import TIMEOUT_S
from tests.server.faults.worker import DEATHS, POISON

pytestmark = pytest.mark.long
PATIENCE_S, PAUSE_S = 180.0, 0.05
ENDED = ("completed", "incomplete", "failed", "cancelled")


class Server:
    """`pensieve serve` with a fake engine, in two processes."""

    def __init__(self, history: str, directory: Path) -> None:
        self._history, self._deaths = history, directory / "deaths"
        self._log = (directory / "log").open("a")
        self.start()

    def start(self) -> None:
        environment = {**os.environ, DEATHS: str(self._deaths)}
        self.process: subprocess.Popen[str] = command.started(
            "", f"--history={self._history}", log=self._log, env=environment
        )
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found, "it did not start"
        self.http = httpx2.Client(base_url=found[0], timeout=TIMEOUT_S, trust_env=False)

    def kill(self) -> None:
        """Kill the front end; the engine notices that, and ends."""
        self.process.kill()
        self._reap()

    def close(self) -> None:
        self.process.terminate()
        assert self._reap() == 0
        self._log.close()

    def _reap(self) -> int:
        self.http.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(TIMEOUT_S)

    def queue(self, text: str, num_tokens: int) -> str:
        """Queue a response; send the request again while the engine starts, or if its death interrupted it.

        Whether an interrupted request was stored is not known, so each has a key.
        """
        body = {"input": text, "background": True, "max_output_tokens": num_tokens, "temperature": 0}
        key = {"idempotency-key": uuid.uuid4().hex}
        while (answer := self.http.post("/v1/responses", json=body, headers=key)).status_code != 200:
            assert answer.status_code == 503 or answer.json()["error"]["code"] == "step_failed", answer.text
            threading.Event().wait(PAUSE_S)
        return str(answer.json()["id"])

    def response(self, response_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/responses/{response_id}").json()
        return found


@pytest.fixture
def two(postgres, tmp_path) -> Iterator[tuple[Server, Server]]:
    url = postgres.url()
    servers: list[Server] = []
    try:
        for _ in range(2):
            servers.append(Server(url, tmp_path))
        yield servers[0], servers[1]
        for server in servers:
            server.close()
    finally:
        for server in servers:
            server.process.kill()


@pytest.fixture
def deaths(tmp_path):
    """Return the number of engines that died of the poison."""
    path = tmp_path / "deaths"
    return lambda: len(path.read_text().splitlines()) if path.exists() else 0


def check_ends(server: Server, guilty: str, innocent: list[str]) -> None:
    found = {one: server.response(one) for one in innocent}
    assert {one["status"] for one in found.values()} <= {"completed", "incomplete"}, found
    failed = server.response(guilty)
    assert (failed["status"], failed["error"]["pensieve_code"]) == ("failed", "engine_died_running")


@pytest.mark.parametrize("killed", ["none", "the server that runs it", "the other server"])
def test_two_engines_die_of_a_poisonous_response_at_most(two, deaths, killed, tmp_path):
    one, other = two
    draw = random.Random(new_seed())
    for _ in range(enough(1, 5)):
        before = deaths()
        innocent = [one.queue(f"hi {number}", 300) for number in range(3)]
        guilty = one.queue(POISON, 100)
        innocent += [server.queue(f"ho {n}", 30) for n in range(3) for server in two]
        wait_until(lambda before=before: deaths() > before)
        if killed != "none":
            threading.Event().wait(draw.uniform(0, 2.0))
            dying = one if killed == "the server that runs it" else other
            dying.kill()
            dying.start()
        for server in two:
            wait_for_ends(server, guilty, *innocent)
            check_ends(server, guilty, innocent)
        assert deaths() - before <= 2, (tmp_path / "log").read_text()[-3000:]
        assert [server.http.get("/health").status_code for server in two] == [200, 200]


def wait_for_ends(server: Server, *response_ids: str) -> None:
    """Wait for two starts of an engine, and for Postgres to end the session of a killed server."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / PAUSE_S)):
        if all(server.response(one)["status"] in ENDED for one in response_ids):
            return
        pause.wait(PAUSE_S)
    raise AssertionError("the responses never ended")
