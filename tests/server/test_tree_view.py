"""Trees of turns over HTTP: the length of lists, the items of replies, and names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.history.server_tables.changes import HistoryChange
from pensieve_jax.history.trees import TITLE_PREFIX, TreeSummary
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.tree_view import MAX_TITLE_CHARACTERS
from pensieve_jax.server.tree_view import ROUTES as TREE_ROUTES
from tests.server.fakes import Harness, ask
from tests.server.scripted import ScriptedServer
from tests.server.stored_server import StoredServer

TREES = "/v1/pensieve/trees"
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call>'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoredServer]:
    with closing(StoredServer(tmp_path / "history.sqlite")) as made:
        yield made


def respond(server: StoredServer, text: str) -> str:
    """Create a response, and return the root of its tree."""
    status, answer = ask(server.harness, "POST", "/v1/responses", {"input": text})
    assert status == 200, answer
    return str(answer["id"]).removeprefix("resp_")[:16]


def titles(server: StoredServer) -> list[str | None]:
    return [row["title"] for row in ask(server.harness, "GET", TREES)[1]["data"]]


def rename(server: StoredServer, root: str, title: Any) -> tuple[int, Any]:
    status, answer = ask(server.harness, "POST", f"{TREES}/{root}", {"title": title})
    return status, answer if status == 200 else answer["error"]["param"]


def test_trees_are_read_outside_the_event_loop():
    """One owner may have many trees."""
    threads: list[int] = []

    class History:
        def trees(self, owner: str, limit: int) -> list[Any]:
            threads.append(threading.get_ident())
            return []

        def tree(self, owner: str, root: str, limit: int) -> list[Any]:
            threads.append(threading.get_ident())
            return []

    harness = Harness(TREE_ROUTES, history=History())
    assert ask(harness, "GET", "/v1/pensieve/trees") == (200, {"data": []})
    assert ask(harness, "GET", "/v1/pensieve/trees/x")[0] == 404
    assert len(threads) == 2 and threading.get_ident() not in threads


def test_a_list_of_trees_has_the_requested_length():
    class History:
        def trees(self, owner: str, limit: int) -> list[TreeSummary]:
            return [TreeSummary("0" * 16, 1, "word", float(limit))]

    harness = Harness(TREE_ROUTES, history=History())
    for query, limit in (("", 100), ("?limit=7", 7), ("?limit=1000", 1000)):
        ((row,),) = ask(harness, "GET", f"/v1/pensieve/trees{query}")[1].values()
        assert (row["last_active"], row["first_text"]) == (limit, "word")
    for wrong in ("0", "1001", "x", ""):
        status, body = ask(harness, "GET", f"/v1/pensieve/trees?limit={wrong}")
        assert (status, body["error"]["param"]) == (400, "limit")


def test_a_reply_is_divided_into_the_items_of_its_response(tmp_path: Path) -> None:
    with closing(ScriptedServer(tmp_path / "h.sqlite", [f"<think>\nHm.\n</think>\n\nSo.\n{CALL}"])) as server:
        tool = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
        _, made = ask(server.harness, "POST", "/v1/responses", {"input": "a cat?", "tools": [tool]})
        _, told = ask(server.harness, "GET", f"{TREES}/{made['id'].removeprefix('resp_')[:16]}")
    assert [item["type"] for item in made["output"]] == ["reasoning", "message", "function_call"]
    assert told["data"][0]["output"] == made["output"]


def test_a_tree_gets_a_name_another_one_and_none(server: StoredServer) -> None:
    roots = [respond(server, text) for text in ("hi", "ho")]
    assert titles(server) == [None, None]
    for title in ("Trip to Rome", "Ï" * MAX_TITLE_CHARACTERS):
        assert rename(server, roots[0], title) == (200, {"root": roots[0], "title": title})
        assert sorted(titles(server), key=str) == sorted([title, None], key=str)
    _, stored = ask(server.harness, "GET", f"/v1/conversations/{TITLE_PREFIX}{roots[0]}")
    assert stored["metadata"] == {"title": title}
    for _ in range(2):
        assert rename(server, roots[0], None) == (200, {"root": roots[0], "title": None})
        assert titles(server) == [None, None]


def test_a_wrong_name_and_an_unknown_tree_are_refused(server: StoredServer) -> None:
    root = respond(server, "hi")
    for wrong in ("", "x" * (MAX_TITLE_CHARACTERS + 1), 7):
        assert rename(server, root, wrong) == (400, "title")
    assert ask(server.harness, "POST", f"{TREES}/{root}", {})[1]["error"]["param"] == "title"
    assert rename(server, "f" * 16, "Trip")[0] == 404
    assert titles(server) == [None]


def test_a_name_counts_as_a_conversation_of_its_key(tmp_path: Path) -> None:
    settings = ServerSettings(max_conversations_per_key=1)
    with closing(StoredServer(tmp_path / "history.sqlite", settings=settings)) as server:
        roots = [respond(server, text) for text in ("hi", "ho")]
        assert rename(server, roots[0], "One")[0] == 200
        assert rename(server, roots[1], "Two")[0] == 429
        assert rename(server, roots[0], "Once more")[0] == 200


def test_names_that_come_at_the_same_time_are_all_taken(server: StoredServer, monkeypatch) -> None:
    apply = server.engine.apply

    async def later(change: HistoryChange) -> None:
        await asyncio.sleep(0)
        await apply(change)

    monkeypatch.setattr(server.engine, "apply", later)
    root = respond(server, "hi")

    async def scenario() -> list[int]:
        path, names = f"{TREES}/{root}", ("One", "Two", "Three")
        asked = [server.harness.open("POST", path, {"title": name}) for name in names]
        return [(await one.whole())[0] for one in asked]

    assert asyncio.run(scenario()) == [200, 200, 200]
    assert titles(server)[0] in ("One", "Two", "Three")
