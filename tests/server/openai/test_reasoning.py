"""Reasoning is a part of its own in Chat Completions and Responses, whole, streamed, stored and retrieved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.fakes import ask
from tests.server.scripted import ScriptedServer

THOUGHT = "<think>\nIs it so?\n</think>\n\nYes, it is."


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite"


def events_of(raw: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(server: ScriptedServer, *messages: Any, **fields: Any) -> dict[str, Any]:
    given = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    status, answer = ask(server.harness, "POST", "/v1/chat/completions", {"messages": given, **fields})
    assert status == 200, answer
    return answer


@pytest.fixture
def server(path: Path) -> Iterator[ScriptedServer]:
    made = ScriptedServer(path, [THOUGHT] * 9)
    yield made
    made.close()


def test_a_completion_has_reasoning_under_both_names(server: ScriptedServer) -> None:
    answer = chat(server, "so?")
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes, it is.",
        "refusal": None,
        "reasoning": "Is it so?",
        "reasoning_content": "Is it so?",
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    num_reasoning = len("<think>\nIs it so?\n") + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}


def test_the_deltas_of_a_stream_add_up_to_the_whole(server: ScriptedServer) -> None:
    whole = chat(server, "so?")["choices"][0]["message"]
    chunks = events_of(chat(server, "so?", stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for key in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == whole[key]
    first_content = next(index for index, delta in enumerate(deltas) if delta.get("content"))
    assert not any(delta.get("reasoning") for delta in deltas[first_content:])


def test_reasoning_that_is_cut_by_length_has_no_content(server: ScriptedServer) -> None:
    answer = chat(server, "so?", max_tokens=12)
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Is i", "")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


def test_a_switched_off_parser_leaves_reasoning_in_the_text(path: Path) -> None:
    server = ScriptedServer(path, [THOUGHT], reasoning_parser="none")
    message = chat(server, "so?")["choices"][0]["message"]
    assert message["content"] == "<think>\nIs it so?\n\n\nYes, it is."  # </think> is a control token
    assert "reasoning" not in message
    server.close()


def respond(server: ScriptedServer, **fields: Any) -> Any:
    status, answer = ask(server.harness, "POST", "/v1/responses", {"input": "so?", **fields})
    assert status == 200, answer
    return answer


def check_output(response: dict[str, Any]) -> None:
    turn_id = response["id"].removeprefix("resp_")
    reasoning, message = response["output"]
    assert reasoning == {
        "id": f"rs_{turn_id}",
        "type": "reasoning",
        "summary": [],
        "status": "completed",
        "content": [{"type": "reasoning_text", "text": "Is it so?"}],
    }
    assert message["id"] == f"msg_{turn_id}"
    assert message["content"][0]["text"] == "Yes, it is."
    num_reasoning = len("<think>\nIs it so?\n") + 1
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": num_reasoning}


def test_a_response_has_an_item_of_reasoning(server: ScriptedServer, path: Path) -> None:
    response = respond(server)
    check_output(response)
    assert ask(server.harness, "GET", f"/v1/responses/{response['id']}") == (200, response)
    server.close()
    again = ScriptedServer(path, [])
    assert ask(again.harness, "GET", f"/v1/responses/{response['id']}") == (200, response)
    again.close()


def test_the_events_of_a_response_come_item_by_item(server: ScriptedServer) -> None:
    events = events_of(respond(server, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    without_repeats = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert without_repeats == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    response = events[-1]["response"]
    check_output(response)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    texts = {"reasoning_text": "Is it so?", "output_text": "Yes, it is."}
    for kind, text in texts.items():
        deltas = [event for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(event["delta"] for event in deltas) == text
        assert len({event["output_index"] for event in deltas}) == 1


def test_a_stored_response_streams_the_same_events(server: ScriptedServer) -> None:
    live = events_of(respond(server, stream=True))
    response_id = live[-1]["response"]["id"]
    for starting_after in (-1, 0, 5, 17, len(live) - 3):
        query = f"?stream=true&starting_after={starting_after}" if starting_after >= 0 else "?stream=true"
        status, raw = ask(server.harness, "GET", f"/v1/responses/{response_id}{query}")
        assert status == 200
        assert events_of(raw) == live[starting_after + 1 :]


def test_logprobs_are_those_of_the_content(server: ScriptedServer) -> None:
    asked = {"include": ["message.output_text.logprobs"]}
    response = respond(server, **asked)
    _, message = response["output"]
    tokens = [one["token"] for one in message["content"][0]["logprobs"]]
    assert "".join(tokens) == "Yes, it is."
    assert ask(server.harness, "GET", f"/v1/responses/{response['id']}") == (200, response)
    events = events_of(respond(server, stream=True, **asked))
    assert events[-1]["response"]["output"][1]["content"] == message["content"]
    streamed = [
        one["token"]
        for event in events
        if event["type"] == "response.output_text.delta"
        for one in event["logprobs"]
    ]
    assert streamed == tokens


def test_the_next_turn_continues_without_the_reasoning(server: ScriptedServer) -> None:
    first = chat(server, "so?")["choices"][0]["message"]
    for reply in (first, {"role": "assistant", "content": "Yes, it is."}):
        chat(server, "so?", reply, "and now?")
        assert server.engine.turns[-1].spec.node.parent_id is not None
    context = server.harness.services.tokenizer.decode_raw(server.engine.turns[-1].spec.prompt_token_ids)
    assert "Is it so?" not in context


def test_a_conversation_stores_the_items_of_a_reply(server: ScriptedServer) -> None:
    _, conversation = ask(server.harness, "POST", "/v1/conversations", {})
    response = respond(server, conversation=conversation["id"])
    _, page = ask(server.harness, "GET", f"/v1/conversations/{conversation['id']}/items?order=asc")
    assert page["data"][1:] == response["output"]
    respond(server, conversation=conversation["id"])
