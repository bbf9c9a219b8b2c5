"""Errors of requests for responses: each has its field, code and status."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from pensieve_jax.core.errors import EngineClosedError, HistoryError, StepFailedError
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.openai.responses.schemas import parse_input
from tests.deadlines import wait_until
from tests.server.fakes import say
from tests.server.live import LiveServer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LiveServer(tmp_path_factory.mktemp("server") / "history.sqlite", say("hello")) as running:
        yield running


UNSUPPORTED = {
    "tools": [{"type": "function", "name": "f"}],
    "truncation": "auto",
    "prompt": {"id": "p"},
    "context_management": [{"type": "compaction"}],
    "min_p": 0.5,
    "bad_words": ["x"],
    "allowed_token_ids": [5],
    "service_tier": "flex",
    "moderation": {"model": "m"},
    "background_options": {},
    "enable_thinking": False,
    "skip_special_tokens": False,
    "n": 2,
    "stop": ["x"],
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(post, field):
    status, body, _ = post("/responses", {"input": "hi", field: UNSUPPORTED[field]})
    assert status == 400
    assert (body["error"]["param"], body["error"]["code"]) == (field, "unsupported_parameter")


BAD = [
    ({}, "input", "missing_required_parameter"),
    ({"input": ""}, "input", "invalid_value"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"input": "hi", "temperature": 3}, "temperature", "invalid_value"),
    ({"input": "hi", "top_p": -0.5}, "top_p", "invalid_value"),
    ({"input": "hi", "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (
        {"input": "hi", "top_logprobs": 20, "include": ["message.output_text.logprobs"]},
        "top_logprobs",
        "invalid_value",
    ),
    ({"input": "hi", "include": ["everything"]}, "include[0]", "invalid_value"),
    ({"input": "hi", "metadata": {"j": "", "k": 1}}, "metadata.k", "invalid_value"),
    ({"input": "hi", "metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
    ({"input": "hi", "metadata": {"k" * 65: ""}}, "metadata", "invalid_value"),
    ({"input": "hi", "metadata": {"k": "v" * 513}}, "metadata.k", "invalid_value"),
    ({"input": "hi", "background": True, "store": False}, "background", "invalid_value"),
    ({"input": "hi", "conversation": "conv_x", "store": False}, "conversation", "invalid_value"),
    (
        {"input": "hi", "previous_response_id": "resp_x", "conversation": "conv_x"},
        "previous_response_id",
        "invalid_value",
    ),
    ({"input": "hi", "text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
    ({"input": [5]}, "input[0]", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "invalid_value"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[0].call_id",
        "invalid_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", "invalid_value"),
    ({"input": "x" * 5000}, "input", "context_length_exceeded"),
]


@pytest.mark.parametrize(("sent", "param", "code"), BAD, ids=lambda value: str(value)[:40])
def test_an_invalid_field_is_named(post, sent, param, code):
    status, body, _ = post("/responses", sent)
    assert status == 400 and set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"].endswith(".")


def test_unknown_fields_are_ignored_and_listed(post):
    sent = {"input": [{"role": "user", "content": "hi", "mood": "good"}], "colour": "red", "top_k": 3}
    status, _, headers = post("/responses", sent)
    assert status == 200
    assert set(headers["x-ignored-fields"].split(",")) == {"colour", "input[].mood"}


def test_tools_may_be_ignored_unless_a_call_is_required(tmp_path):
    settings = ServerSettings(tools="ignore")
    tools = UNSUPPORTED["tools"]
    with (
        LiveServer(tmp_path / "history.sqlite", say("hello"), settings=settings) as server,
        server.client() as client,
    ):
        raw = client.responses.with_raw_response.create(input="hi", tools=tools, tool_choice="auto")
        assert raw.headers["x-ignored-fields"] == "tools"
        assert raw.parse().tools == [] and raw.parse().output_text == "hello"
        assert client.responses.input_tokens.count(input="hi", tools=tools).input_tokens > 0
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(input="hi", tools=tools, tool_choice="required")
        assert raised.value.param == "tool_choice"


def test_fields_that_ask_for_nothing_are_accepted(post):
    harmless = {
        "tools": [],
        "tool_choice": "auto",
        "truncation": "disabled",
        "reasoning": None,
        "presence_penalty": 0,
        "text": {"format": {"type": "text"}},
        "service_tier": "auto",
        "user": "me",
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "stream_options": {"include_obfuscation": False},
    }
    status, body, headers = post("/responses", {"input": "hi", **harmless})
    assert status == 200 and "x-ignored-fields" not in headers
    assert body["user"] == "me" and body["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    "reasoning",
    [
        {"summary": "auto"},
        {"summary": "detailed", "effort": None},
        {"effort": "none", "summary": "concise", "generate_summary": None},
        {"generate_summary": "auto"},
    ],
)
def test_a_summary_of_no_reasoning_is_accepted(post, reasoning):
    status, _, headers = post("/responses", {"input": "hi", "reasoning": reasoning})
    assert status == 200 and "x-ignored-fields" not in headers
    for bad in ({"summary": "some"}, {"mode": "x"}):
        status, body, _ = post("/responses", {"input": "hi", "reasoning": reasoning | bad})
        assert (status, body["error"]["param"]) == (400, f"reasoning.{next(iter(bad))}")


def test_compaction_does_not_exist(post):
    status, body, _ = post("/responses/compact", {"input": "hi", "model": "m"})
    assert (status, body["error"]["code"]) == (404, "unknown_url")
    status, body, _ = post("/responses/compact", None, "GET")
    assert (status, body["error"]["code"]) == (404, "not_found")


def test_a_name_in_an_item_is_listed(post):
    sent = {"input": [{"role": "user", "content": "hi", "name": "ada"}]}
    status, _, headers = post("/responses", sent)
    assert status == 200 and headers["x-ignored-fields"] == "input[].name"


MISSING = [
    ("GET", "/responses/resp_x", "not_found"),
    ("DELETE", "/responses/resp_x", "not_found"),
    ("GET", "/responses/resp_x/input_items", "not_found"),
    ("POST", "/responses/resp_x/cancel", "not_found"),
    ("GET", "/conversations/conv_x", "not_found"),
    ("POST", "/conversations/conv_x", "not_found"),
    ("DELETE", "/conversations/conv_x", "not_found"),
    ("GET", "/conversations/conv_x/items", "not_found"),
    ("POST", "/conversations/conv_x/items", "not_found"),
    ("GET", "/conversations/conv_x/items/msg_x", "not_found"),
    ("DELETE", "/conversations/conv_x/items/msg_x", "not_found"),
]


@pytest.mark.parametrize(("method", "path", "code"), MISSING)
def test_unknown_objects_are_not_found(post, method, path, code):
    sent = {"metadata": {}, "items": [{"role": "user", "content": "x"}]} if method == "POST" else None
    status, body, _ = post(path, sent, method)
    assert (status, body["error"]["code"]) == (404, code)


def test_an_unknown_previous_response_is_not_found(post):
    for field, value, code in (
        ("previous_response_id", "resp_x", "previous_response_not_found"),
        ("conversation", "conv_x", "not_found"),
    ):
        status, body, _ = post("/responses", {"input": "hi", field: value})
        assert (status, body["error"]["code"]) == (404, code)


def test_an_unknown_model_is_not_found(post):
    status, body, _ = post("/responses", {"input": "hi", "model": "gpt-6"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("limit=-1", "limit"),
        ("order=up", "order"),
    ],
)
def test_invalid_pages_are_refused(post, query, param):
    _, conversation, _ = post("/conversations", {})
    status, body, _ = post(f"/conversations/{conversation['id']}/items?{query}", None, "GET")
    assert (status, body["error"]["param"]) == (400, param)


def test_input_items_are_paged(post):
    items = [{"role": "user", "content": str(index)} for index in range(5)]
    _, response, _ = post("/responses", {"input": items})
    path = f"/responses/{response['id']}/input_items"
    _, page, _ = post(f"{path}?limit=2", None, "GET")
    assert [item["content"][0]["text"] for item in page["data"]] == ["4", "3"]
    assert page["has_more"] and page["last_id"] == page["data"][1]["id"]
    _, page, _ = post(f"{path}?limit=3&after={page['last_id']}", None, "GET")
    assert [item["content"][0]["text"] for item in page["data"]] == ["2", "1", "0"]
    assert not page["has_more"]
    _, page, _ = post(f"{path}?after={page['last_id']}", None, "GET")
    assert page == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}


@pytest.mark.parametrize(
    ("query", "param"),
    [("starting_after=2", "starting_after"), ("stream=true&starting_after=x", "starting_after")],
)
def test_invalid_replays_are_refused(post, query, param):
    _, response, _ = post("/responses", {"input": "hi"})
    status, body, _ = post(f"/responses/{response['id']}?{query}", None, "GET")
    assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("number", ["-1", "x", "1000000000"])
def test_the_limits_of_the_number_to_start_after_are_named(post, number):
    _, response, _ = post("/responses", {"input": "hi"})
    _, body, _ = post(f"/responses/{response['id']}?stream=true&starting_after={number}", None, "GET")
    words = f"starting_after is {number!r}, but must be an integer from 0 to 999999999."
    assert body["error"]["message"] == words


def test_too_many_items_in_a_request_are_refused(post):
    items = [{"role": "user", "content": "x"}] * 21
    _, conversation, _ = post("/conversations", {})
    for path in ("/conversations", f"/conversations/{conversation['id']}/items"):
        status, body, _ = post(path, {"items": items})
        assert (status, body["error"]["param"]) == (400, "items")
    status, body, _ = post(f"/conversations/{conversation['id']}/items", {"items": []})
    assert (status, body["error"]["param"]) == (400, "items")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StepFailedError("A step failed."), 500, "step_failed"),
        (HistoryError("The disk is full."), 500, "history_failed"),
        (EngineClosedError("The engine has ended."), 503, "overloaded"),
    ],
)
def test_a_failed_turn_is_an_error(server, post, error, status, code):
    server.on_loop(lambda: server.engine.refuse.append(error))
    seen, body, _ = post("/responses", {"input": "hi"})
    assert (seen, body["error"]["code"]) == (status, code)
    wait_until(lambda: server.on_loop(lambda: server.harness.services.limits.num_in_engine) == 0)


def test_a_failed_turn_is_an_error_event_in_a_stream(server):
    with server.client() as client:
        server.on_loop(lambda: setattr(server.engine, "script", None))
        try:
            stream = iter(client.responses.create(input="hi", stream=True))
            first = [next(stream) for _ in range(4)]
            turn = server.engine.turns[-1]
            server.on_loop(lambda: turn.fail(StepFailedError("A step failed.")))
            rest = list(stream)
        finally:
            server.on_loop(lambda: setattr(server.engine, "script", say("hello")))
    assert [event.type for event in rest] == ["error", "response.failed"]
    assert rest[0].message == rest[1].response.error.message
    assert rest[0].message.startswith("A step failed on the device")
    assert [event.sequence_number for event in (*first, *rest)] == list(range(6))


def test_the_second_of_two_turns_of_a_conversation_is_refused(server, post):
    _, conversation, _ = post("/conversations", {})

    async def both() -> list[int]:
        async with server.async_client() as client:
            raw = [
                client._client.post(
                    f"{server.url}/responses", json={"input": "hi", "conversation": conversation["id"]}
                )
                for _ in range(2)
            ]
            server.on_loop(lambda: setattr(server.engine, "script", None))
            server.on_loop(server.engine.submitted.clear)
            tasks = [asyncio.ensure_future(one) for one in raw]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            server.wait_for(server.engine.submitted.wait())  # the other one may already be refused
            turn = server.engine.turns[-1]
            server.on_loop(lambda: (turn.feed("x"), turn.finish()))
            return sorted([(await task).status_code for task in tasks])

    try:
        assert asyncio.run(both()) == [200, 409]
    finally:
        server.on_loop(lambda: setattr(server.engine, "script", say("hello")))


def test_items_in_several_forms_are_stored_in_one():
    forms = [
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "input_text", "text": "hi"}], "type": "message"}],
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}],
            }
        ],
    ]
    kept = [parse_input(form, "input")[0] for form in forms]
    assert kept[0] == kept[1] == kept[2]
    assert [part["text"] for part in kept[3][0]["content"]] == ["h", "i"]
    refused, _ = parse_input(
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "id": "msg_1"}], "input"
    )
    assert json.dumps(refused[0]).count("output_text") == 1
    with pytest.raises(ApiError):
        parse_input([{"role": "user", "content": [{"type": "refusal"}]}], "input")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/responses", {"input": "a", "store": False}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/completions", {"prompt": "a"}),
    ],
)
def test_a_seed_is_the_same_on_every_route(post, server, route, body):
    """One route took 2**64 modulo 2**63, and another refused -1."""
    for seed, drawn in ((-(2**63), 0), (-1, 2**63 - 1), (0, 0), (7, 7), (2**63 - 1, 2**63 - 1)):
        assert post(route, {**body, "seed": seed})[0] == 200
        assert server.engine.turns[-1].spec.params.seed == drawn
    for seed in (2**63, 2**64, -(2**63) - 1, 1.5, True, "1"):
        status, answer, _ = post(route, {**body, "seed": seed})
        assert status == 400 and answer["error"]["param"] == "seed"


WORDS = [
    ({"input": "hi", "temperature": 9}, "temperature is 9, but must be at most 2."),
    ({"input": "hi", "temperature": "hot"}, "temperature is 'hot', but must be a number."),
    ({"input": "hi", "top_p": -0.5}, "top_p is -0.5, but must be at least 0."),
    ({"input": "hi", "seed": 2**63}, f"seed is {2**63}, but must be at most {2**63 - 1}."),
    ({"input": "hi", "seed": -(2**63) - 1}, f"seed is {-(2**63) - 1}, but must be at least {-(2**63)}."),
    ({"input": "hi", "max_output_tokens": True}, "max_output_tokens is true, but must be an integer."),
    ({"input": "hi", "metadata": {"a": None}}, "metadata.a is null, but must be text."),
    ({"input": "hi", "store": [False, None]}, "store is [false, null], but must be true or false."),
    ({"input": 5}, "input is 5, but must be text or a list."),
    ({"input": ""}, "input is empty, but must be text or at least one item."),
    ({"input": "hi", "metadata": {"a": 5}}, "metadata.a is 5, but must be text."),
    (
        {"input": [{"role": "tool", "content": "x"}]},
        "input[0].role is 'tool', but must be one of user, assistant, system, developer.",
    ),
    (
        {"input": "hi", "top_logprobs": 20, "include": ["message.output_text.logprobs"]},
        "top_logprobs is 20, but must be at most 8.",
    ),
    (
        {"input": "hi", "tool_choice": "required"},
        "tool_choice demands a call, but tools is empty.",
    ),
    ({"input": "hi", "stop": ["x"]}, "stop is not a field of this route. Use /v1/chat/completions."),
    ({"input": "hi", "n": 2}, "n is not a field of this route. Use /v1/chat/completions."),
    (
        {"input": "x" * 5000, "max_output_tokens": 1},
        "Send less, start a new conversation, or continue from an earlier turn.",
    ),
]


@pytest.mark.parametrize(("sent", "words"), WORDS, ids=lambda value: str(value)[:40])
def test_error_texts_address_the_sender_of_the_request(post, sent, words):
    status, body, _ = post("/responses", sent)
    assert status == 400
    message = body["error"]["message"]
    assert message.endswith(words) and "max_context_tokens" not in message and "runner" not in message


def test_the_error_of_a_too_long_context_counts_its_tokens(post):
    _, body, _ = post("/responses", {"input": "x" * 5000})
    _, queued, _ = post("/responses", {"input": "x" * 5000, "background": True})
    assert body["error"] == queued["error"]
    assert body["error"]["message"].startswith("The context has 50")


def test_an_unknown_conversation_is_reported_with_its_field(post):
    status, body, _ = post("/responses", {"input": "hi", "conversation": "conv_x"})
    assert (status, body["error"]["param"], body["error"]["code"]) == (404, "conversation", "not_found")


MISPLACED = [
    ("/responses", {"input": "hi"}, "max_tokens", 5, "max_output_tokens"),
    ("/responses", {"input": "hi"}, "max_completion_tokens", 5, "max_output_tokens"),
    ("/responses", {}, "messages", [{"role": "user", "content": "hi"}], "input"),
    ("/responses/input_tokens", {}, "messages", [{"role": "user", "content": "hi"}], "input"),
    ("/responses", {"input": "hi"}, "ignore_eos", True, "chat/completions"),
    ("/responses", {"input": "hi"}, "response_format", {"type": "json_object"}, "Use text.format"),
]


@pytest.mark.parametrize(("path", "sent", "field", "value", "hint"), MISPLACED)
def test_a_field_of_another_route_is_refused_with_a_hint(post, path, sent, field, value, hint):
    status, body, _ = post(path, {**sent, field: value})
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, field, "unsupported_parameter")
    assert hint in body["error"]["message"]


def test_a_misplaced_field_that_asks_for_nothing_is_ignored(post):
    status, _, headers = post("/responses", {"input": "hi", "max_tokens": None, "logprobs": False})
    assert status == 200 and set(headers["x-ignored-fields"].split(",")) == {"max_tokens", "logprobs"}
