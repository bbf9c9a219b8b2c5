"""Cases of Responses and Conversations that cover every call of this server.

Owns: the cases.
Does not know: how they are run.
Called by `programs.check_clients`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from openai.types.responses import Response

from pensieve_lab.clients.cases import GREEDY, case, refused

RESPONSES, CONVERSATIONS = "responses", "conversations"
LONG = "Tell me a story, please. " * 12
_EVENTS = (
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
)


def state_of(usage: Any) -> dict[str, int]:
    """Return the `usage.pensieve` object."""
    sources: dict[str, int] = usage.to_dict()["pensieve"]
    return sources


@case(RESPONSES, "create, with instructions, metadata and a seed")
async def create(client: Any) -> None:
    made = await client.responses.create(
        **GREEDY, input="Hi, I am Ada.", instructions="Be kind.", metadata={"a": "b"}, extra_body={"seed": 3}
    )
    assert made.output_text and made.instructions == "Be kind." and made.metadata == {"a": "b"}
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens


@case(RESPONSES, "previous_response_id finds the state")
async def goes_on(client: Any) -> None:
    first = await client.responses.create(**GREEDY, input=LONG)
    second = await client.responses.create(**GREEDY, input="And then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    # The last token of a reply is sampled but not computed yet.
    past = first.usage.total_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens == past
    assert state_of(second.usage)["recomputed_tokens"] == 0


@case(RESPONSES, "resent messages reuse the KV cache")
async def sent_again(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Again. {LONG}"}]
    first = await client.responses.create(**GREEDY, input=messages)
    messages += [*first.output, {"role": "user", "content": "And then?"}]
    second = await client.responses.create(**GREEDY, input=messages)
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1


@case(RESPONSES, "create(stream=True): every event in its order")
async def streamed(client: Any) -> None:
    kinds: list[str] = []
    text, last = "", None
    async for event in await client.responses.create(**GREEDY, input="Hi!", stream=True):
        assert event.sequence_number == (0 if last is None else last.sequence_number + 1)
        kinds += [event.type] if event.type not in kinds else []
        text += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    assert last is not None and kinds == [*_EVENTS, last.type]
    assert last.response.output_text == text


@case(RESPONSES, "stream(): the client's own helper")
async def helper(client: Any) -> None:
    async with client.responses.stream(**GREEDY, input="Hi!") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text


@case(RESPONSES, "parse(), without a format")
async def parse(client: Any) -> None:
    assert (await client.responses.parse(**GREEDY, input="Hi!")).output_text


@case(RESPONSES, "logprobs, by include and top_logprobs")
async def logprobs(client: Any) -> None:
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    made = await client.responses.create(**GREEDY, input="Hi!", **options)
    found = made.output[0].content[0].logprobs
    assert len(found) >= made.usage.output_tokens - 1 and len(found[0].top_logprobs) == 2


@case(RESPONSES, "a reply that is cut off is incomplete")
async def incomplete(client: Any) -> None:
    made = await client.responses.create(**GREEDY | {"max_output_tokens": 1}, input="Hi!")
    assert made.status == "incomplete" and made.incomplete_details.reason == "max_output_tokens"


@case(RESPONSES, "retrieve, input_items.list and delete")
async def kept(client: Any) -> None:
    made = await client.responses.create(**GREEDY, input="Hi!")
    assert await client.responses.retrieve(made.id) == made
    items = await client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items.data] == ["Hi!"]
    await client.responses.delete(made.id)
    await refused("not_found", None, client.responses.retrieve, response_id=made.id)


@case(RESPONSES, "store=False is not kept")
async def not_kept(client: Any) -> None:
    made = await client.responses.create(**GREEDY, input="Hi!", store=False)
    await refused("not_found", None, client.responses.retrieve, response_id=made.id)


@case(RESPONSES, "input_tokens.count")
async def count(client: Any) -> None:
    counted = await client.responses.input_tokens.count(model="chat", input="Hi, I am Ada.")
    made = await client.responses.create(**GREEDY, input="Hi, I am Ada.")
    assert counted.input_tokens == made.usage.input_tokens


async def _ended(client: Any, response_id: str) -> Response:
    for _ in range(3000):
        found: Response = await client.responses.retrieve(response_id)
        if found.status not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("the background response did not end")


@case(RESPONSES, "background=True, then retrieve until it has ended")
async def background(client: Any) -> None:
    made = await client.responses.create(**GREEDY, input="Hi!", background=True)
    assert made.status in ("queued", "in_progress", "completed", "incomplete") and made.background
    assert (await _ended(client, made.id)).output_text


@case(RESPONSES, "background stream, and retrieve(stream=True, starting_after)")
async def replay(client: Any) -> None:
    made = await client.responses.create(**GREEDY, input="Hi!", background=True, stream=True)
    events = [event async for event in made]
    found = events[0].response.id
    whole = await client.responses.retrieve(found, stream=True)
    assert [event async for event in whole] == events
    rest = await client.responses.retrieve(found, stream=True, starting_after=events[2].sequence_number)
    assert [event async for event in rest] == events[3:]


@case(RESPONSES, "cancel a response in the background")
async def cancel(client: Any) -> None:
    made = await client.responses.create(
        model="chat", input=LONG, background=True, extra_body={"seed": 1}, max_output_tokens=600
    )
    cancelled = await client.responses.cancel(made.id)
    assert cancelled.status in ("cancelled", "completed", "incomplete")
    assert (await client.responses.retrieve(made.id)).status == cancelled.status


@case(RESPONSES, "item_reference")
async def reference(client: Any) -> None:
    first = await client.responses.create(**GREEDY, input="Hi!")
    items = await client.responses.input_items.list(first.id)
    given = [{"type": "item_reference", "id": one} for one in (items.data[0].id, first.output[0].id)]
    second = await client.responses.create(**GREEDY, input=[*given, {"role": "user", "content": "And?"}])
    assert state_of(second.usage)["gpu_tokens"] > 0


@case(CONVERSATIONS, "create, retrieve, update and delete")
async def conversation(client: Any) -> None:
    made = await client.conversations.create(metadata={"a": "b"})
    assert (await client.conversations.retrieve(made.id)).metadata == {"a": "b"}
    assert (await client.conversations.update(made.id, metadata={"a": "c"})).metadata == {"a": "c"}
    assert (await client.conversations.delete(made.id)).deleted


@case(CONVERSATIONS, "items: create, list by pages, retrieve and delete")
async def items(client: Any) -> None:
    made = await client.conversations.create(items=[{"type": "message", "role": "user", "content": "Hi!"}])
    said = [{"type": "message", "role": "assistant", "content": "Hello."}]
    await client.conversations.items.create(made.id, items=said)
    listed = [one async for one in client.conversations.items.list(made.id, limit=1, order="asc")]
    assert [one.role for one in listed] == ["user", "assistant"]
    found = await client.conversations.items.retrieve(listed[1].id, conversation_id=made.id)
    assert found == listed[1]
    left = await client.conversations.items.delete(listed[1].id, conversation_id=made.id)
    assert left.id == made.id


@case(CONVERSATIONS, "responses in a conversation find the state")
async def in_conversation(client: Any) -> None:
    made = await client.conversations.create()
    first = await client.responses.create(**GREEDY, input=LONG, conversation=made.id)
    second = await client.responses.create(**GREEDY, input="And?", conversation=made.id)
    assert second.conversation.id == made.id
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    listed = [one async for one in client.conversations.items.list(made.id, order="asc")]
    assert [one.role for one in listed] == ["user", "assistant"] * 2


_FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
_FILE = {"type": "input_file", "file_data": "x"}


@case(RESPONSES, "tools", is_refusal=True)
async def tools(client: Any) -> None:
    await refused(
        "unsupported_parameter", "tools", client.responses.create, **GREEDY, input="Hi!", tools=[_FUNCTION]
    )


@case(RESPONSES, "images and files", is_refusal=True)
async def images(client: Any) -> None:
    for part in (_IMAGE, _FILE):
        sent = [{"role": "user", "content": [part]}]
        await refused(
            "unsupported_parameter", "input[0].content[0].type", client.responses.create, **GREEDY, input=sent
        )


@case(RESPONSES, "reasoning effort")
async def reasoning_effort(client: Any) -> None:
    """The model's template has none, so that the answer is the one without it."""
    answers = [
        await client.responses.create(**GREEDY, input="Hi!", **fields)
        for fields in ({}, {"reasoning": {"effort": "high"}})
    ]
    assert answers[0].output_text == answers[1].output_text


@case(RESPONSES, "truncation and stored prompts", is_refusal=True)
async def others(client: Any) -> None:
    for name, value, param in (
        ("truncation", "auto", "truncation"),
        ("prompt", {"id": "p"}, "prompt"),
    ):
        await refused(
            "unsupported_parameter", param, client.responses.create, **GREEDY, input="Hi!", **{name: value}
        )
