"""A request with an idempotency key runs once on routes that store its turn; others list the key."""

from __future__ import annotations

import asyncio
import json

import pytest

from pensieve_jax.history.server_tables.changes import DeleteResponse
from pensieve_jax.server.http.settings import ServerSettings
from tests.server.fakes import MODEL, sampled
from tests.server.stale_keys import found_before_its_deletion
from tests.server.stored_server import StoredServer

REPLY = sampled([*b"hi there! And more.", 257])
KEY = {"Idempotency-Key": "k"}
HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"messages": HELLO, "store": True, "logprobs": True, "top_logprobs": 2, "stop": ["!"]}
TEXT = {"prompt": "Hello", "store": True, "logprobs": 2, "echo": False, "return_token_ids": True}
MESSAGE = {"messages": HELLO, "max_tokens": 40, "stop_sequences": ["!"]}
STORED = {
    "chat": ("/v1/chat/completions", CHAT),
    "text": ("/v1/completions", TEXT),
    "message": ("/v1/messages", MESSAGE),
}
every_route = pytest.mark.parametrize("path, fields", STORED.values(), ids=STORED)


@pytest.fixture
def server(tmp_path):
    running = StoredServer(
        tmp_path / "history.sqlite",
        REPLY,
        settings=ServerSettings(chat_history="durable"),
    )
    yield running
    running.close()


async def post(server: StoredServer, path, fields, headers=KEY):
    status, _, raw = await server.harness.open("POST", path, {"model": MODEL, **fields}, headers).whole()
    return status, raw


def ask(server: StoredServer, path, fields, headers=KEY):
    status, raw = asyncio.run(post(server, path, fields, headers))
    return status, json.loads(raw)


def data_of(raw: bytes) -> list:
    lines = [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def told(events: list) -> tuple:
    """Return what the events of a stream say, however it was divided."""
    ids = {one["id"] for one in events if "id" in one}
    ids |= {one["message"]["id"] for one in events if "message" in one}
    choices = [choice for one in events for choice in one.get("choices", ())]
    deltas = [one["delta"] for one in (*choices, *events) if "delta" in one]
    text = "".join(one.get("content") or one.get("text") or "" for one in (*deltas, *choices))
    ids_of_tokens = [token for one in choices for token in one.get("token_ids", ())]
    reasons = [one["finish_reason"] for one in choices if one["finish_reason"]]
    stops = [one for one in deltas if "stop_reason" in one]
    usage = [one["usage"] for one in events if one.get("usage")]
    return ids, text, ids_of_tokens, reasons, stops, usage


@every_route
def test_the_same_key_gives_the_same_answer(server, path, fields):
    status, first = ask(server, path, fields)
    server.clock.advance(100.0)
    assert status == 200
    assert ask(server, path, fields) == (200, first) and len(server.engine.turns) == 1
    status, error = ask(server, path, {**fields, "temperature": 0.5})
    assert status == 422 and "another body" in error["error"]["message"]
    assert ask(server, path, fields, {"Idempotency-Key": "other"})[0] == 200
    assert ask(server, path, fields, {})[0] == 200
    assert len(server.engine.turns) == 3


@every_route
def test_a_key_is_free_once_its_reply_is_deleted(server, path, fields):
    assert ask(server, path, fields)[0] == 200
    known = server.reader.idempotent("", "k", server.clock.now())
    server.engine.store.apply(DeleteResponse(owner="", response_id=known.result_id))
    with found_before_its_deletion(server.reader, known):
        assert ask(server, path, fields)[0] == 200
    assert len(server.engine.turns) == 2


@every_route
def test_the_same_key_gives_the_same_stream(server, path, fields):
    streamed = {**fields, "stream": True}
    if path != "/v1/messages":
        streamed["stream_options"] = {"include_usage": True}
    _, first = asyncio.run(post(server, path, streamed))
    _, again = asyncio.run(post(server, path, streamed))
    first_told = told(data_of(first))
    assert told(data_of(again)) == first_told and len(server.engine.turns) == 1
    assert first_told[1].startswith("hi there") and first_told[5]


@every_route
def test_a_key_waits_for_the_request_that_runs(server, path, fields):
    server.engine.script = None

    async def scenario():
        first = server.harness.open("POST", path, {"model": MODEL, **fields}, KEY)
        await server.engine.submitted.wait()
        again = server.harness.open("POST", path, {"model": MODEL, **fields}, KEY)
        other, _ = await post(server, path, {**fields, "temperature": 0.5})
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(server.engine.turns) == 1
        REPLY(server.engine.turns[0])
        return other, await first.whole(), await again.whole()

    other, first, again = asyncio.run(scenario())
    assert other == 422 and len(server.engine.turns) == 1
    assert first[0] == again[0] == 200 and first[2] == again[2]


@every_route
def test_a_request_whose_client_left_may_be_sent_again(server, path, fields):
    server.engine.script = None

    async def scenario():
        first = server.harness.open("POST", path, {"model": MODEL, **fields}, KEY)
        await server.engine.submitted.wait()
        first.leave()
        await first.task
        server.engine.script = REPLY
        return await post(server, path, fields)

    status, _ = asyncio.run(scenario())
    assert status == 200 and len(server.engine.turns) == 2 and server.engine.num_committed == 1


def test_the_key_of_a_deleted_completion_is_free(server):
    path, fields = STORED["chat"]
    _, first = ask(server, path, fields)
    response_id = first["id"].replace("chatcmpl-", "resp_")

    async def delete():
        status, *_ = await server.harness.open("DELETE", f"/v1/responses/{response_id}").whole()
        assert status == 200

    asyncio.run(delete())
    assert ask(server, path, fields)[1]["id"] != first["id"]


def test_a_key_belongs_to_one_route(server):
    body = {"messages": HELLO, "max_tokens": 40}
    assert ask(server, "/v1/messages", body)[0] == 200
    assert ask(server, "/v1/chat/completions", body)[0] == 422

    async def respond():
        async with server.responses.background.lifespan():
            return await post(server, "/v1/responses", {"input": "Hello"})

    assert asyncio.run(respond())[0] == 422


REFUSED = {
    "replies": ("/v1/chat/completions", {**CHAT, "n": 2}, "2 replies"),
    "prompts": ("/v1/completions", {**TEXT, "prompt": ["a", "b", "c"]}, "3 replies"),
    "scores": ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}, "prompt_logprobs"),
    "echo": ("/v1/completions", {**TEXT, "echo": True}, "echo"),
    "long": ("/v1/chat/completions", CHAT, "300 characters"),
}


@pytest.mark.parametrize("path, fields, said", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_returned_again_is_refused(server, path, fields, said):
    headers = {"Idempotency-Key": "k" * 300} if "300" in said else KEY
    status, body = ask(server, path, fields, headers)
    assert status == 400 and body["error"]["param"] == "Idempotency-Key"
    assert said in body["error"]["message"] and not server.engine.turns


UNSTORED = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, "store": False}),
    "text": ("/v1/completions", {"prompt": "Hello"}),
    "message": ("/v1/messages", MESSAGE),
}


def ignored(server: StoredServer, path, fields) -> tuple[int, str]:
    async def fetch():
        return await server.harness.open("POST", path, {"model": MODEL, **fields}, KEY).whole()

    status, headers, _ = asyncio.run(fetch())
    return status, headers.get("x-ignored-fields", "")


@pytest.mark.parametrize("path, fields", UNSTORED.values(), ids=UNSTORED)
def test_a_key_of_a_turn_that_is_not_stored_is_listed(tmp_path, path, fields):
    server = StoredServer(tmp_path / "history.sqlite", REPLY)
    assert ignored(server, path, fields) == (200, "Idempotency-Key")
    server.close()


def test_every_route_takes_a_key_or_lists_it(server):
    """A route that creates nothing has nothing to return again."""
    taking = set()
    for route in server.routes:
        if route.method == "POST":
            path = route.path.replace("{conversation_id}", "conv_1").replace("{response_id}", "resp_1")
            _, listed = ignored(server, path, {"model": "another"})
            if "Idempotency-Key" not in listed:
                taking.add(route.path)
    assert taking == {
        "/v1/responses",
        "/v1/conversations",
        "/v1/conversations/{conversation_id}/items",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
    }


@every_route
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_another_server_has_answered_meanwhile_may_be_sent_again(
    server, path, fields, is_streamed, monkeypatch
):
    assert ask(server, path, fields)[0] == 200
    monkeypatch.setattr(server.reader, "idempotent", lambda *_: None)  # it was not there yet
    status, raw = asyncio.run(post(server, path, {**fields, "stream": is_streamed}))
    assert status == (200 if is_streamed else 409) and b"idempotency_key_in_use" in raw
    services = server.harness.services
    assert services.limits.num_in_engine == len(services.running_keys) == 0
    monkeypatch.undo()
    assert ask(server, path, fields)[0] == 200
    assert server.engine.num_committed == 1
