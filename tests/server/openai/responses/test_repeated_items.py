"""Items that are resent because the answer was lost are in their conversation once."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from pensieve_jax.core.errors import EngineClosedError
from pensieve_jax.history.server_tables.changes import AppendItems, CreateConversation
from pensieve_jax.history.server_tables.idempotency_table import NEW_CONVERSATION
from pensieve_jax.server.openai.responses.conversations import LIFETIME_S, MAX_UNANSWERED, Appends
from pensieve_jax.server.turns.idempotency import KEY_LIFETIME_S
from tests.deadlines import TIMEOUT_S
from tests.server.openai.responses.test_left_behind import DIED, NO_ANSWER, losing
from tests.server.stale_keys import found_before_its_deletion

RETRY = {"x-stainless-retry-count": "1"}
KEY = {"Idempotency-Key": "k"}
DOWN = EngineClosedError("The engine accepts no calls: it is starting.")


@pytest.fixture
def client(server):
    with server.client(timeout=TIMEOUT_S) as made:
        yield made


def items(*texts: str) -> list:
    return [{"role": "user", "content": text} for text in texts]


def texts_of(client, conversation: str) -> list[str]:
    page = client.conversations.items.list(conversation, order="asc")
    return [item.content[0].text for item in page.data]


def opened(server, conversation: str, texts, headers: dict):
    """Send a request to append; the caller decides how much of its answer to read."""
    path = f"/v1/conversations/{conversation}/items"
    return server.harness.open("POST", path, {"items": items(*texts)}, headers)


async def leave_before_the_answer(server, conversation: str, *texts: str) -> None:
    """Append them, and disconnect once the engine has the change."""
    asked = opened(server, conversation, texts, {})
    asked.takes.clear()
    while not any(isinstance(change, AppendItems) for change in server.engine.changes):
        await asyncio.sleep(0)
    asked.leave()
    asked.takes.set()
    await asked.task


@pytest.mark.parametrize("error", [NO_ANSWER, DIED])
def test_an_append_whose_answer_was_lost_is_answered_at_the_retry(server, client, error):
    made = client.conversations.create().id
    with losing(server, AppendItems, error):
        answer = client.conversations.items.create(made, items=items("pay 5", "now"))
    assert texts_of(client, made) == ["pay 5", "now"]
    listed = client.conversations.items.list(made, order="asc").data
    assert [item.id for item in answer.data] == [item.id for item in listed]


@pytest.mark.parametrize("headers", [RETRY, KEY], ids=["retry", "key"])
def test_a_late_append_happens_once(server, client, headers):
    """A stuck engine applies it after its client got an error for the missing answer and sent it again."""
    made, engine, late = client.conversations.create().id, server.engine, []
    apply = engine.apply

    async def apply_late(change) -> None:
        late.append(change)
        raise NO_ANSWER

    server.on_loop(lambda: setattr(engine, "apply", apply_late))
    first = {} if headers is RETRY else headers
    with pytest.raises(openai.InternalServerError):
        client.conversations.items.create(made, items=items("pay 5", "now"), extra_headers=first)
    server.on_loop(lambda: setattr(engine, "apply", apply))
    server.wait_for(apply(late[0]))
    for _ in range(2):
        answer = client.conversations.items.create(made, items=items("pay 5", "now"), extra_headers=headers)
        assert len(answer.data) == 2
        if headers is RETRY:
            break  # it has been answered: later items are new
    assert texts_of(client, made) == ["pay 5", "now"]


def test_a_retry_appends_what_never_arrived(server, client):
    made = client.conversations.create().id
    with losing(server, AppendItems, DOWN, applies=False), pytest.raises(openai.InternalServerError):
        client.conversations.items.create(made, items=items("pay 5"))
    assert server.on_loop(server.harness.services.tables["appends_unanswered"]) == 1
    client.conversations.items.create(made, items=items("pay 5"), extra_headers=RETRY)
    assert server.on_loop(server.harness.services.tables["appends_unanswered"]) == 0
    assert texts_of(client, made) == ["pay 5"]


def test_the_same_items_may_be_sent_twice_on_purpose(client):
    made = client.conversations.create().id
    for headers in ({}, {}, RETRY, KEY, {"Idempotency-Key": "other"}):
        client.conversations.items.create(made, items=items("yes"), extra_headers=headers)
    assert texts_of(client, made) == ["yes"] * 5


def test_a_repeated_append_is_answered_alike_though_its_conversation_is_deleted(server, client):
    """Its key goes with the conversation, which is deleted once the repeated request has found it."""
    made, history = client.conversations.create().id, server.harness.services.history
    first = client.conversations.items.create(made, items=items("yes"), extra_headers=KEY)
    idempotent, found = history.idempotent, []

    def deleted_behind(*arguments, **more):
        if found:
            return None
        found.append(idempotent(*arguments, **more))
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "idempotent", deleted_behind)
        again = client.conversations.items.create(made, items=items("yes"), extra_headers=KEY)
    assert found[0] is not None and again.to_dict() == first.to_dict()


def test_a_key_is_for_one_body_and_one_conversation(client):
    made, other = client.conversations.create().id, client.conversations.create().id
    first = client.conversations.items.create(made, items=items("yes", "no"), extra_headers=KEY)
    again = client.conversations.items.create(made, items=items("yes", "no"), extra_headers=KEY)
    assert again.to_dict() == first.to_dict()
    for sent in (items("yes"), items("yes", "no", "yes"), items("no", "yes")):
        with pytest.raises(openai.UnprocessableEntityError) as raised:
            client.conversations.items.create(made, items=sent, extra_headers=KEY)
        assert raised.value.code == "idempotency_key_reused"
    client.conversations.items.create(other, items=items("no"), extra_headers=KEY)
    assert (texts_of(client, made), texts_of(client, other)) == (["yes", "no"], ["no"])


def test_a_key_creates_one_conversation(server, client):
    first = client.conversations.create(items=items("yes"), extra_headers=KEY)
    again = client.conversations.create(items=items("yes"), extra_headers=KEY)
    assert again.to_dict() == first.to_dict() and texts_of(client, first.id) == ["yes"]
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        client.conversations.create(items=items("no"), extra_headers=KEY)
    assert raised.value.code == "idempotency_key_reused"
    # The scopes are apart: an append and a response may have the same key.
    client.conversations.items.create(first.id, items=items("no"), extra_headers=KEY)
    assert texts_of(client, first.id) == ["yes", "no"]
    client.conversations.delete(first.id)
    assert client.conversations.create(items=items("no"), extra_headers=KEY).id != first.id
    assert client.conversations.create().id != client.conversations.create().id


def test_a_key_is_free_once_its_conversation_is_deleted(server, client):
    services = server.harness.services
    first = client.conversations.create(extra_headers=KEY).id
    known = services.history.idempotent("", "k", services.now_s(), conversation_id=NEW_CONVERSATION)
    client.conversations.delete(first)
    with found_before_its_deletion(services.history, known):
        assert client.conversations.create(extra_headers=KEY).id != first


def test_simultaneous_requests_with_one_key_create_one_conversation(server):
    async def ask():
        asked = [
            server.harness.open("POST", "/v1/conversations", {"items": items("yes")}, KEY) for _ in range(8)
        ]
        return [await one.whole() for one in asked]

    answers = server.wait_for(ask())
    assert {status for status, _, _ in answers} == {200}
    assert len({json.loads(raw)["id"] for _, _, raw in answers}) == 1


@pytest.mark.parametrize("error", [NO_ANSWER, DIED])
def test_a_conversation_whose_answer_was_lost_is_found_by_its_key(server, client, error):
    with losing(server, CreateConversation, error):
        made = client.conversations.create(items=items("pay 5"), extra_headers=KEY)
    assert sum(isinstance(change, CreateConversation) for change in server.engine.changes) <= 2
    assert client.conversations.create(items=items("pay 5"), extra_headers=KEY).id == made.id
    assert texts_of(client, made.id) == ["pay 5"]


def test_a_key_keeps_its_body_whatever_happened_to_its_items(server, client):
    """An item that is deleted later is not appended again, and does not change the body."""
    made = client.conversations.create().id
    first = client.conversations.items.create(made, items=items("yes", "no"), extra_headers=KEY)
    for item in reversed(first.data):
        client.conversations.items.delete(item.id, conversation_id=made)
        left = texts_of(client, made)
        again = client.conversations.items.create(made, items=items("yes", "no"), extra_headers=KEY)
        assert again.to_dict() == first.to_dict() and texts_of(client, made) == left
        with pytest.raises(openai.UnprocessableEntityError) as raised:
            client.conversations.items.create(made, items=items("other"), extra_headers=KEY)
        assert raised.value.code == "idempotency_key_reused"
    assert texts_of(client, made) == []


def test_a_retry_without_a_key_is_not_refused_because_of_a_later_deletion(server, client):
    made = client.conversations.create().id

    async def retry() -> tuple:
        return await opened(server, made, ("yes", "no"), RETRY).whole()

    server.wait_for(leave_before_the_answer(server, made, "yes", "no"))
    first = client.conversations.items.list(made, order="asc").data[0]
    client.conversations.items.delete(first.id, conversation_id=made)
    status, _, body = server.wait_for(retry())
    assert status == 200 and json.loads(body)["data"][0]["id"] == first.id
    assert texts_of(client, made) == ["no"]


def test_a_key_is_free_again_after_a_day(server, client):
    """This holds whether or not the old one has been deleted yet; the earlier items stay."""
    made = client.conversations.create().id
    client.conversations.items.create(made, items=items("yes"), extra_headers=KEY)
    server.harness.clock.advance(KEY_LIFETIME_S - 1)
    client.conversations.items.create(made, items=items("yes"), extra_headers=KEY)
    assert texts_of(client, made) == ["yes"]
    server.harness.clock.advance(2)
    for text in ("yes", "no"):
        client.conversations.items.create(made, items=items(text), extra_headers=KEY)
        assert texts_of(client, made)[-1] == text
        server.harness.clock.advance(KEY_LIFETIME_S)
    assert texts_of(client, made) == ["yes", "yes", "no"]


def test_a_deleted_conversation_uses_no_key(server, client):
    made = client.conversations.create().id
    client.conversations.items.create(made, items=items("yes"), extra_headers=KEY)
    client.responses.create(input="hi", background=True, extra_headers=KEY)  # a key of its own
    client.conversations.delete(made)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.create(made, items=items("yes"), extra_headers=KEY)
    history, now_s = server.harness.services.history, server.harness.clock.now()
    assert history.idempotent("", "k", now_s, conversation_id=made) is None
    assert history.idempotent("", "k", now_s) is not None


def test_items_that_were_appended_between_the_lookups_are_found(server, client):
    """The same request arrives twice at once with one key: the second finds what the first appended."""
    made = client.conversations.create().id

    async def both() -> list[tuple]:
        both = [opened(server, made, ("pay 5",), KEY) for _ in range(2)]
        return [await one.whole() for one in both]

    answers = server.wait_for(both())
    assert [answer[0] for answer in answers] == [200, 200] and answers[0][2] == answers[1][2]
    assert texts_of(client, made) == ["pay 5"]


def test_a_retry_gets_the_answer_that_its_client_did_not_wait_for(server, client):
    made = client.conversations.create().id

    async def retry() -> int:
        return (await opened(server, made, ("pay 5",), RETRY).whole())[0]

    server.wait_for(leave_before_the_answer(server, made, "pay 5"))
    assert server.wait_for(retry()) == 200
    assert texts_of(client, made) == ["pay 5"]


def test_answers_without_a_retry_are_dropped():
    appends = Appends()
    for number in range(MAX_UNANSWERED + 5):
        appends.begin("ann", "conv", None, str(number), is_retry=False, now_s=float(number % 3))
    assert len(appends) == MAX_UNANSWERED
    appends.begin("ann", "conv", None, "last", is_retry=False, now_s=LIFETIME_S + 3.0)
    assert len(appends) == 1


def test_the_error_of_a_dead_engine_is_reported_if_nothing_was_stored(server, client):
    made = client.conversations.create().id
    with (
        losing(server, AppendItems, DIED, applies=False),
        pytest.raises(openai.InternalServerError) as raised,
    ):
        client.conversations.items.create(made, items=items("pay 5"))
    assert raised.value.code == "step_failed" and texts_of(client, made) == []
