"""The openai client, in strict mode, over a socket: every call of Responses and Conversations."""

from __future__ import annotations

import openai
import pytest

from tests.server.fakes import say
from tests.server.live import LiveServer

MESSAGE_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path / "history.sqlite", say("hello there")) as running:
        yield running


def kinds(events) -> list[str]:
    """Return the types of events; consecutive deltas count as one."""
    found: list[str] = []
    for event in events:
        if not found or found[-1] != event.type:
            found.append(event.type)
    return found


def test_a_response_and_its_continuation(server, client):
    first = client.responses.create(model="fake", input="hi", instructions="be kind", metadata={"a": "b"})
    assert first.output_text == "hello there" and first.status == "completed"
    assert first.metadata == {"a": "b"} and first.instructions == "be kind"
    assert first.usage.input_tokens == first.usage.total_tokens - first.usage.output_tokens > 0
    second = client.responses.create(
        model="fake", input="and", instructions="be kind", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    node = server.engine.turns[1].spec.node
    assert f"resp_{node.parent_id}" == first.id and f"resp_{node.turn_id}" == second.id
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()


def test_completed_at_is_the_time_of_the_commit(server, client):
    """The server answers later than the engine commits; a second apart, the two differed."""
    services, clock = server.harness.services, server.harness.clock
    server.on_loop(lambda: setattr(services, "now_s", lambda: clock.now() + 1.0))
    made = client.responses.create(input="hi")
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    events = list(client.responses.create(input="hi", stream=True))
    made = events[-1].response
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()


def test_other_instructions_make_another_context(server, client):
    first = client.responses.create(input="hi", instructions="be kind")
    client.responses.create(input="and", instructions="be brief", previous_response_id=first.id)
    spec = server.engine.turns[1].spec
    assert spec.node.parent_id is None
    assert [message["content"] for message in spec.messages] == ["be brief", "hi", "hello there", "and"]
    client.responses.create(input="and", previous_response_id=first.id)
    assert [message["role"] for message in server.engine.turns[2].spec.messages] == [
        "user",
        "assistant",
        "user",
    ]


def test_resent_messages_continue_their_turn(server, client):
    history = [{"role": "user", "content": "hi"}]
    first = client.responses.create(input=history)
    history += [*first.output, {"role": "user", "content": "and"}]
    second = client.responses.create(input=history)
    assert f"resp_{server.engine.turns[1].spec.node.parent_id}" == first.id
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.content[0].text for item in items] == ["hi", "hello there", "and"]
    assert [item.role for item in items] == ["user", "assistant", "user"]


def test_a_streamed_response(client):
    events = list(client.responses.create(input="hi", stream=True))
    assert kinds(events) == MESSAGE_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "hello there"
    assert client.responses.retrieve(events[0].response.id).to_dict() == events[-1].response.to_dict()


def test_the_clients_stream_helper(client):
    with client.responses.stream(model="fake", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "hello there" and final.status == "completed"
    assert kinds(events) == MESSAGE_EVENTS


def test_a_reply_that_reaches_its_token_limit_is_incomplete(client):
    response = client.responses.create(input="hi", max_output_tokens=4)
    assert response.status == "incomplete" and response.output_text == "hell"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    events = list(client.responses.create(input="hi", max_output_tokens=4, stream=True))
    assert events[-1].type == "response.incomplete"


def test_logprobs_of_tokens(client):
    asked = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(**asked)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(one.token for one in logprobs[:-1]) == "hello there"
    assert [len(one.top_logprobs) for one in logprobs] == [2] * len(logprobs)
    events = list(client.responses.create(**asked, stream=True))
    streamed = [
        one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs
    ]
    assert "".join(streamed).removesuffix("<eos>") == "hello there"
    assert client.responses.create(input="hi", top_logprobs=2).output[0].content[0].logprobs == []


def test_a_stored_response_is_replayed(client):
    response = client.responses.create(input="hi")
    events = list(client.responses.retrieve(response.id, stream=True))
    assert kinds(events) == MESSAGE_EVENTS
    assert len([event for event in events if event.type == "response.output_text.delta"]) == 11
    later = list(client.responses.retrieve(response.id, stream=True, starting_after=6))
    assert [event.to_dict() for event in later] == [event.to_dict() for event in events[7:]]


def test_unstored_responses_leave_nothing(server, client):
    response = client.responses.create(input="hi", store=False)
    assert response.store is False
    for missing in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.create(input="and", previous_response_id=response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            missing()
    assert server.engine.num_committed == 0
    # Their KV cache is still found by their messages, also for responses that are not stored.
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello there"},
        {"role": "user", "content": "and"},
    ]
    client.responses.create(input=history, store=False)
    assert f"resp_{server.engine.turns[1].spec.node.parent_id}" == response.id
    client.responses.create(input=history)
    assert server.engine.turns[2].spec.node.parent_id is None
    server.on_loop(server.engine.restart)
    client.responses.create(input=history, store=False)
    assert f"resp_{server.engine.turns[3].spec.node.parent_id}" != response.id


def test_in_memory_turns_that_the_engine_evicted_are_not_looked_up_twice(server, client):
    client.responses.create(input="hi", store=False)
    server.on_loop(server.engine.memory.clear)
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello there"},
        {"role": "user", "content": "and"},
    ]
    assert client.responses.create(input=history, store=False).status == "completed"
    refused, accepted = server.engine.turns[1:]
    assert refused.spec.node.parent_id is not None and accepted.spec.node.parent_id is None


def test_a_deleted_response_is_gone(client):
    first = client.responses.create(input="hi")
    second = client.responses.create(input="and", previous_response_id=first.id)
    client.responses.delete(first.id)
    for missing in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.input_items.list(first.id),
        lambda: client.responses.create(input="and", previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            missing()
    assert client.responses.retrieve(second.id).output_text == "hello there"
    third = client.responses.create(input="so", previous_response_id=second.id)
    assert third.status == "completed"


def test_input_tokens_of_a_context(client):
    first = client.responses.create(input="hi", instructions="be kind")
    counted = client.responses.input_tokens.count(
        input="and", instructions="be kind", previous_response_id=first.id
    )
    second = client.responses.create(input="and", instructions="be kind", previous_response_id=first.id)
    assert counted.input_tokens > second.usage.input_tokens  # the fake engine counts the prompt only
    replies = first.usage.output_tokens - 1  # the template writes another end marker than was sampled
    assert counted.input_tokens == first.usage.input_tokens + replies + second.usage.input_tokens


def test_conversations_and_their_items(client):
    made = client.conversations.create(
        metadata={"topic": "x"}, items=[{"type": "message", "role": "user", "content": "hi"}]
    )
    assert client.conversations.retrieve(made.id).metadata == {"topic": "x"}
    assert client.conversations.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    added = client.conversations.items.create(
        made.id, items=[{"type": "message", "role": "assistant", "content": "hello"}]
    )
    assert added.data[0].role == "assistant"
    listed = list(client.conversations.items.list(made.id, limit=1, order="asc"))  # in pages
    assert [item.content[0].text for item in listed] == ["hi", "hello"]
    assert client.conversations.items.retrieve(listed[0].id, conversation_id=made.id) == listed[0]
    client.conversations.items.delete(listed[1].id, conversation_id=made.id)
    assert [item.id for item in client.conversations.items.list(made.id)] == [listed[0].id]
    deleted = client.conversations.delete(made.id)
    assert deleted.deleted and deleted.id == made.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_responses_in_a_conversation(server, client):
    made = client.conversations.create()
    first = client.responses.create(input="hi", conversation=made.id)
    assert first.conversation.id == made.id
    second = client.responses.create(input="and", conversation={"id": made.id})
    assert f"resp_{server.engine.turns[1].spec.node.parent_id}" == first.id
    items = client.conversations.items.list(made.id, order="asc").data
    assert [item.content[0].text for item in items] == ["hi", "hello there", "and", "hello there"]
    assert items[1].id == first.output[0].id and items[3].id == second.output[0].id
    # A deleted item is no longer part of the context.
    client.conversations.items.delete(items[1].id, conversation_id=made.id)
    client.responses.create(input="so", conversation=made.id)
    spec = server.engine.turns[2].spec
    assert spec.node.parent_id is None
    assert [message["content"] for message in spec.messages] == ["hi", "and", "hello there", "so"]
    client.conversations.delete(made.id)
    assert client.responses.retrieve(first.id).output_text == "hello there"


def test_a_reference_to_an_item(server, client):
    first = client.responses.create(input="hi")
    given = client.responses.input_items.list(first.id).data[0]
    referred = [
        {"type": "item_reference", "id": given.id},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "and"},
    ]
    client.responses.create(input=referred)
    assert f"resp_{server.engine.turns[1].spec.node.parent_id}" == first.id
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.create(input=[{"type": "item_reference", "id": "msg_" + "0" * 32}])
    assert raised.value.param == "input[0].id"
