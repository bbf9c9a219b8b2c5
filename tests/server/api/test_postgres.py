"""The API on a history in Postgres: two servers share it, and it goes away and comes back."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

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
    """Status, headers and body of an answer."""
    data = json.dumps(body).encode() if body else None
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.headers, json.load(answer)


def done(server, method, path, **body):
    status, _, found = ask(server, method, path, **body)
    assert status == 200, found
    return found


def test_what_one_server_has_said_the_other_goes_on_from(servers):
    one, other = servers
    conversation = done(one, "POST", "/conversations", metadata={"a": "b"})["id"]
    done(one, "POST", "/responses", input="hi", conversation=conversation)
    second = done(other, "POST", "/responses", input="and?", conversation=conversation)
    third = done(one, "POST", "/responses", input="so?", previous_response_id=second["id"])
    assert len(done(one, "GET", f"/conversations/{conversation}/items")["data"]) == 4
    done(other, "DELETE", f"/responses/{third['id']}")
    assert ask(one, "GET", f"/responses/{third['id']}")[0] == 404


def test_while_postgres_is_away_clients_are_told_to_come_back(servers, postgres):
    kept = done(servers[0], "POST", "/responses", input="hi")["id"]
    postgres.stop()
    try:
        for status, headers, found in (
            ask(servers[0], "GET", f"/responses/{kept}"),
            ask(servers[0], "POST", "/responses", input="and?", previous_response_id=kept),
            ask(servers[0], "POST", "/conversations", metadata={"a": "b"}),
        ):
            assert (status, found["error"]["code"]) == (503, "history_unavailable"), found
            assert headers["retry-after"] == "1"
            assert "postgresql" not in found["error"]["message"], "where it is concerns no client"
    finally:
        postgres.start()
    for server in servers:
        done(server, "GET", f"/responses/{kept}")
        done(server, "POST", "/responses", input="and?", previous_response_id=kept)
