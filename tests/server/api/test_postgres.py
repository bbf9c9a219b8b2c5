"""The API on a history in Postgres: two servers share it, and it goes away and comes back."""

from __future__ import annotations

import httpx
import pytest

from tests.server.api.live import LiveServer

pytest.importorskip("psycopg", reason="needs the extra `postgres`")


def echo(turn):
    turn.feed("ho", (104, 111, 257))
    turn.finish()


@pytest.fixture
def servers(postgres):
    url = postgres.url()
    with LiveServer(url, echo) as one, LiveServer(url, echo) as other:
        yield one, other


def ask(server, method, path, **body):
    options = {"json": body} if body else {}
    return httpx.request(method, f"{server.url}{path}", timeout=30, **options)


def test_what_one_server_has_said_the_other_goes_on_from(servers):
    one, other = servers
    conversation = ask(one, "POST", "/conversations", metadata={"a": "b"}).json()["id"]
    first = ask(one, "POST", "/responses", input="hi", conversation=conversation)
    assert first.status_code == 200, first.text
    second = ask(other, "POST", "/responses", input="and?", conversation=conversation)
    assert second.status_code == 200, second.text
    third = ask(one, "POST", "/responses", input="so?", previous_response_id=second.json()["id"])
    assert third.status_code == 200, third.text
    items = ask(one, "GET", f"/conversations/{conversation}/items").json()["data"]
    assert len(items) == 4
    assert ask(other, "DELETE", f"/responses/{third.json()['id']}").status_code == 200
    assert ask(one, "GET", f"/responses/{third.json()['id']}").status_code == 404


def test_while_postgres_is_away_clients_are_told_to_come_back(servers, postgres):
    server = servers[0]
    kept = ask(server, "POST", "/responses", input="hi").json()["id"]
    postgres.stop()
    try:
        for answer in (
            ask(server, "GET", f"/responses/{kept}"),
            ask(server, "POST", "/responses", input="and?", previous_response_id=kept),
            ask(server, "POST", "/conversations", metadata={}),
        ):
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"]["code"] == "history_unavailable"
            assert answer.headers["retry-after"] == "1"
    finally:
        postgres.start()
    for server in servers:
        assert ask(server, "GET", f"/responses/{kept}").status_code == 200
        assert ask(server, "POST", "/responses", input="and?", previous_response_id=kept).status_code == 200
