"""The API on a history in Postgres: two servers share it, and Postgres stops and comes back."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request

import openai
import pytest

from pensieve_jax.core.errors import HistoryUnavailableError
from pensieve_jax.history.postgres_location import parse
from pensieve_jax.server.openai.responses import background
from tests.deadlines import TIMEOUT_S, wait_until
from tests.server.live import LiveServer
from tests.server.openai.responses.test_background import feed, turn_of

pytest.importorskip("psycopg", reason="needs the extra `postgres`")
from pensieve_jax.history.postgres_claims import PostgresClaims  # of that extra


def echo(turn):
    turn.feed("ho", (104, 111, 257))
    turn.finish()


@pytest.fixture
def servers(postgres):
    url = postgres.url()
    with LiveServer(url, echo) as one, LiveServer(url, echo) as other:
        yield one, other


def ask(server, method, path, **body):
    """Return status, headers and body of an answer."""
    data = json.dumps(body).encode() if body else None
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.headers, json.load(answer)


def done(server, method, path, **body):
    status, _, found = ask(server, method, path, **body)
    assert status == 200, found
    return found


def test_a_turn_of_one_server_is_continued_on_the_other(servers):
    one, other = servers
    conversation = done(one, "POST", "/conversations", metadata={"a": "b"})["id"]
    done(one, "POST", "/responses", input="hi", conversation=conversation)
    second = done(other, "POST", "/responses", input="and?", conversation=conversation)
    third = done(one, "POST", "/responses", input="so?", previous_response_id=second["id"])
    assert len(done(one, "GET", f"/conversations/{conversation}/items")["data"]) == 4
    done(other, "DELETE", f"/responses/{third['id']}")
    assert ask(one, "GET", f"/responses/{third['id']}")[0] == 404


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(background, "POLL_S", 0.02)
    monkeypatch.setattr(background, "RETRY_S", 0.01)


def looked(server):
    """Wait until it has completed a lookup of unfinished responses that starts now."""

    async def look() -> None:
        await server.responses.background.reconcile()

    server.wait_for(look())


def test_a_background_response_runs_on_one_server(postgres, soon):
    """Both servers keep looking; the other one runs it once the first has shut down."""
    url = postgres.url()
    with LiveServer(url, echo) as other:
        with LiveServer(url) as one:
            queued = done(one, "POST", "/responses", input="hi", background=True)["id"]
            turn = turn_of(one)
            looked(other)
            assert not other.engine.turns
            assert done(other, "GET", f"/responses/{queued}")["status"] == "queued"
            feed(one, turn, "well", end=True)
            wait_until(lambda: done(other, "GET", f"/responses/{queued}")["status"] == "completed")
            left = done(one, "POST", "/responses", input="ho", background=True)["id"]
            turn_of(one, 1)
            looked(other)
            assert not other.engine.turns
        wait_until(lambda: done(other, "GET", f"/responses/{left}")["status"] == "completed")
        assert [turn.turn_id for turn in other.engine.turns] == [left.removeprefix("resp_")]


@pytest.mark.long
def test_a_background_response_survives_a_restart_of_postgres(postgres, soon):
    """The engine could not commit its turn, and the outcome is unknown: it runs again."""

    def finish() -> None:
        turn.feed("ho", (104, 111, 257))
        try:
            turn.finish()
        except HistoryUnavailableError as error:
            turn.fail(error)

    with LiveServer(postgres.url()) as one:
        queued = done(one, "POST", "/responses", input="hi", background=True)["id"]
        turn = turn_of(one)
        postgres.stop()
        one.on_loop(finish)
        postgres.start()
        feed(one, turn_of(one, 1), "well", end=True)
        wait_until(lambda: done(one, "GET", f"/responses/{queued}")["status"] == "completed")


def test_a_response_that_another_server_cancels_ends_where_it_runs(postgres, soon):
    url = postgres.url()
    with LiveServer(url) as one, LiveServer(url) as other:
        queued = done(one, "POST", "/responses", input="hi", background=True)["id"]
        turn = turn_of(one)
        feed(one, turn, "h")
        assert done(other, "POST", f"/responses/{queued}/cancel")["status"] == "cancelled"
        wait_until(lambda: turn.cancelled)
        assert done(one, "GET", f"/responses/{queued}")["status"] == "cancelled"


def test_a_key_that_reaches_two_servers_at_once_has_one_answer(postgres):
    url = postgres.url()
    with contextlib.ExitStack() as stack:
        one, other = (stack.enter_context(LiveServer(url, script)) for script in (None, echo))
        client, second = (stack.enter_context(server.client()) for server in (one, other))
        key = {"extra_headers": {"idempotency-key": "k"}}
        late = []

        def ask() -> None:
            try:
                late.append(client.responses.create(input="hi", **key))
            except openai.ConflictError as error:
                late.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        turn = turn_of(one)
        answer = second.responses.create(input="hi", **key)
        feed(one, turn, "well", end=True)
        asking.join(TIMEOUT_S)
        (error,) = late
        assert error.body["code"] == "idempotency_key_in_use" and error.response.headers["retry-after"]
        assert client.responses.create(input="hi", **key).id == answer.id


def test_claims_of_a_lost_session_are_taken_again(postgres):
    one, other = PostgresClaims(parse(postgres.url())), PostgresClaims(parse(postgres.url("history_1")))
    namesake = PostgresClaims(one._location)
    with contextlib.closing(one), contextlib.closing(other), contextlib.closing(namesake):
        assert one.take("a") and one.take("a") and one.take("b") and other.take("a")
        assert not namesake.take("a") and not namesake.holds("a")
        postgres.stop()
        with pytest.raises(HistoryUnavailableError):
            one.take("c")
        postgres.start()
        assert namesake.take("b") and one.take("c")
        assert one.holds("a") and not one.holds("b") and not namesake.take("a")
        one.give_up("a")
        assert not one.holds("a") and not namesake.take("a")  # it notices with the next claim
        assert one.take("d") and namesake.take("a")
        one.keep_only(["d"])
        assert one.holds("d") and one.take("e") and namesake.take("c")
    with contextlib.closing(PostgresClaims(one._location)) as last:
        assert last.take("a") and last.take("d")


def test_while_postgres_is_away_clients_are_told_to_retry(servers, postgres):
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
