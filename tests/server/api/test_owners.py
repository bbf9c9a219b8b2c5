"""Whoever has another key learns nothing of what is kept: not that it is there, and no state of it."""

from __future__ import annotations

import hashlib

import pytest

from pensieve_jax.server.http.keys import ApiKeys
from tests.server.api.live import LiveServer
from tests.server.fakes import say


@pytest.fixture
def server(tmp_path):
    keys = tmp_path / "keys"
    lines = [f"{owner}:{hashlib.sha256(owner.encode()).hexdigest()}" for owner in ("ann", "bob")]
    keys.write_text("\n".join(lines))
    with LiveServer(tmp_path / "history.sqlite", say("hello"), keys=ApiKeys(str(keys))) as running:
        yield running


def ask(client, server, method: str, path: str, body=None) -> tuple[int, dict]:
    headers = {"authorization": f"Bearer {client.api_key}"}
    answer = client._client.request(method, f"{server.url}{path}", json=body, headers=headers)
    return answer.status_code, answer.json()


def test_another_keys_ids_are_as_unknown_as_any(server):
    with server.client(api_key="ann") as ann, server.client(api_key="bob") as bob:
        response = ann.responses.create(input="hi")
        conversation = ann.conversations.create(items=[{"role": "user", "content": "x"}])
        item = ann.conversations.items.list(conversation.id).data[0]
        reply = response.output[0].id
        unknown = {response.id: "resp_" + "0" * 32, conversation.id: "conv_" + "0" * 32}
        unknown |= {item.id: "msg_" + "0" * 48, reply: "msg_" + "0" * 32}
        one, other = f"/responses/{response.id}", f"/conversations/{conversation.id}"
        items = {"items": [{"role": "user", "content": "x"}]}
        for method, path, body in (
            ("GET", one, None),
            ("GET", f"{one}?stream=true", None),
            ("GET", f"{one}/input_items", None),
            ("POST", f"{one}/cancel", None),
            ("DELETE", one, None),
            ("GET", other, None),
            ("POST", other, {"metadata": {}}),
            ("GET", f"{other}/items", None),
            ("POST", f"{other}/items", items),
            ("GET", f"{other}/items/{item.id}", None),
            ("DELETE", f"{other}/items/{item.id}", None),
            ("DELETE", other, None),
            ("POST", "/responses", {"input": "and", "previous_response_id": response.id}),
            ("POST", "/responses", {"input": "and", "conversation": conversation.id}),
            ("POST", "/responses", {"input": [{"type": "item_reference", "id": reply}]}),
            ("POST", "/responses/input_tokens", {"input": "x", "previous_response_id": response.id}),
        ):
            status, said = ask(bob, server, method, path, body)
            guessed_path, guessed_body = path, str(body)
            for known, other_id in unknown.items():
                guessed_path = guessed_path.replace(known, other_id)
                guessed_body = guessed_body.replace(known, other_id)
                said = eval(str(said).replace(known, other_id))
            expected = ask(bob, server, method, guessed_path, body and eval(guessed_body))
            assert status == 404 and (status, said) == expected, path
        assert ann.responses.retrieve(response.id).output_text == "hello"


def test_no_state_is_shared_between_keys(server):
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and"},
    ]
    with server.client(api_key="ann") as ann, server.client(api_key="bob") as bob:
        ann.responses.create(input="hi")
        bob.responses.create(input=history)
        assert server.engine.turns[-1].spec.node.parent_id is None
        ann.responses.create(input=history)
        assert server.engine.turns[-1].spec.node.parent_id is not None


def test_keys_of_requests_and_retries_are_each_owners_own(server):
    with server.client(api_key="ann") as ann, server.client(api_key="bob") as bob:
        first = ann.responses.create(input="hi", extra_headers={"Idempotency-Key": "k"})
        other = bob.responses.create(input="hi", extra_headers={"Idempotency-Key": "k"})
        assert first.id != other.id
        third = bob.responses.create(input="another", extra_headers={"Idempotency-Key": "b"})
        assert third.id not in (first.id, other.id)
