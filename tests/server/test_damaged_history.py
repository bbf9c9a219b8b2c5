"""A history that is damaged while the server runs: not ready, no stored turns, one line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve_jax.core.errors import HistoryCorruptError
from pensieve_jax.history.server_tables.changes import CreateConversation
from tests.engine.harness import Harness
from tests.history.damage import damage
from tests.server.stored_server import StoredServer

TURN = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 4}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history"


@pytest.fixture
def server(path: Path) -> Iterator[StoredServer]:
    server = StoredServer(path)
    yield server
    server.close()


def ask(server: StoredServer, method: str, path: str, body=None) -> tuple[int, dict, str]:
    async def work():
        return await server.harness.open(method, path, body).whole()

    status, headers, raw = asyncio.run(work())
    return status, json.loads(raw), headers.get("x-should-retry", "")


def test_the_server_tells_and_goes_on_with_turns_that_are_not_stored(
    server: StoredServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status, made, _ = ask(server, "POST", "/v1/conversations", {})
    assert status == 200 and ask(server, "GET", "/ready")[0] == 200
    damage(path)
    for _ in range(3):
        status, answer, retry = ask(server, "GET", f"/v1/conversations/{made['id']}")
        assert (status, answer["error"]["code"], retry) == (503, "history_damaged", "false")
        assert str(path) not in json.dumps(answer)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(lines) == 1 and str(path) in lines[0] and "damaged" in lines[0]
    status, answer, _ = ask(server, "GET", "/ready")
    assert (status, answer["error"]["code"]) == (503, "history_damaged")
    for route, body in (
        ("/v1/conversations", {}),
        ("/v1/responses", {"model": "fake", "input": "Hello"}),
        ("/v1/responses", {"model": "fake", "input": "Hello", "background": True}),
        ("/v1/chat/completions", {**TURN, "store": True}),
    ):
        status, answer, _ = ask(server, "POST", route, body)
        assert (status, answer["error"]["code"]) == (503, "history_damaged"), (route, answer)
    assert server.engine.turns == []
    assert ask(server, "GET", "/health")[0] == 200


def test_a_store_that_finds_damage_refuses_every_change_and_the_engine_every_stored_turn(path: Path) -> None:
    harness = Harness(path=path)
    harness.turn("a", 20, seed=1, max_tokens=5)
    facts = harness.facts(harness.prompt(5, seed=3), max_tokens=5)
    damage(path)
    with pytest.raises(HistoryCorruptError, match="damaged while it was open"):
        harness.store.load("a")
    assert harness.engine.stats()["history_is_damaged"] == 1
    change = CreateConversation(owner="ann", conversation_id="conv_1", metadata="{}", created_at_s=1.0)
    with pytest.raises(HistoryCorruptError, match="an earlier call found this"):
        harness.engine.apply(change)
    with pytest.raises(HistoryCorruptError, match="stores no more turns"):
        harness.submit(facts, "b")
    assert harness.run(harness.submit(facts, None))[0].token_ids == harness.expected(facts)
