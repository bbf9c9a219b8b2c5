"""Messages of Anthropic's API as a chat template reads them: roles, blocks, tools, and paths of errors."""

from __future__ import annotations

import json

import pytest

from pensieve_jax.server.anthropic.context import Context, context_of
from pensieve_jax.server.anthropic.schemas import CountTokensBody
from pensieve_jax.server.http.bodies import decode_body
from pensieve_jax.server.http.errors import ApiError

HI = {"role": "user", "content": "Hi"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
TEXT = {"type": "text", "text": "one"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.com"}}
FUNCTION = {"name": "add", "arguments": '{"a": 1, "b": "é"}'}
READ_CALL = {"id": "toolu_1", "type": "function", "function": FUNCTION}


def read(*messages, **fields) -> Context:
    body, _ = decode_body(json.dumps({"messages": messages, **fields}).encode(), CountTokensBody)
    return context_of(body)


def test_a_loop_of_a_call_and_its_result():
    thinking = {"type": "thinking", "thinking": "Let me add.", "signature": "s"}
    context = read(
        HI,
        {"role": "assistant", "content": [thinking, TEXT, CALL]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "Go on"}]},
        system="Be brief.",
    )
    assert context.messages == [
        {"role": "system", "content": "Be brief."},
        HI,
        {
            "role": "assistant",
            "content": "one",
            "reasoning": "Let me add.",
            "tool_calls": [READ_CALL],
        },
        {"role": "tool", "content": "2", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "Go on"},
    ]
    assert context.paths == [
        *("system", "messages[0]", "messages[1]", "messages[2].content[0]", "messages[2]"),
    ]
    assert context.prefill is None and context.ignored == ()


def test_a_call_without_text_has_no_content():
    other = {**CALL, "id": "toolu_2", "input": {}}
    context = read(HI, {"role": "assistant", "content": [CALL, other]}, {"role": "user", "content": [RESULT]})
    message = context.messages[1]
    assert message["content"] is None
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": 1, "b": "é"}', "{}"]


def test_messages_of_one_role_that_follow_one_another_are_one():
    context = read(
        HI,
        {"role": "user", "content": [TEXT, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Yes"},
        {"role": "assistant", "content": [{"type": "text", "text": ", I can"}, CALL]},
        {"role": "user", "content": [RESULT]},
        {"role": "user", "content": "And?"},
        HI,
    )
    assert [message["content"] for message in context.messages] == [
        "Hi\none\ntwo",
        "Yes, I can",
        "2",
        "And?\nHi",
    ]
    assert context.paths == ["messages[0]", "messages[2]", "messages[4].content[0]", "messages[5]"]


@pytest.mark.parametrize(
    ("content", "text"), [("x", "x"), ([], ""), (None, ""), ([TEXT, TEXT], "one\none"), ("", "")]
)
def test_results_of_tools_are_texts(content, text):
    result = {**RESULT, "content": content, "is_error": True, "cache_control": {"type": "ephemeral"}}
    context = read(HI, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]})
    assert context.messages[-1]["content"] == text
    assert context.ignored == ("messages[].content[].is_error",)


def test_an_assistants_message_at_the_end_is_a_prefill():
    context = read(HI, {"role": "assistant", "content": [TEXT]}, {"role": "assistant", "content": " two"})
    assert context.messages == [HI] and context.paths == ["messages[0]"] and context.prefill == "one two"


@pytest.mark.parametrize("empty", ["", []])
def test_an_assistants_message_may_be_empty(empty):
    """A reply can be, and a client that sends all messages again would never get another one."""
    assert read(HI, {"role": "assistant", "content": empty}).prefill == ""
    assert read(HI, {"role": "assistant", "content": empty}, HI).messages[1]["content"] == ""


def test_encrypted_reasoning_is_left_out():
    block = {"type": "redacted_thinking", "data": "abc"}
    context = read(HI, {"role": "assistant", "content": [block, TEXT]}, HI)
    assert context.messages[1] == {"role": "assistant", "content": "one"}
    assert context.ignored == ("messages[].content[].data",)


def test_tools_are_read_as_functions():
    schema = {"type": "object", "properties": {"a": {"type": "number"}}}
    tools = [
        {"name": "add", "description": "Adds.", "input_schema": schema, "cache_control": None},
        {"type": "custom", "name": "now", "input_schema": {"type": "object"}, "eager_input_streaming": True},
    ]
    assert read(HI, tools=tools).tools == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    ]


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [
        ([{"role": "user", "content": [CALL]}], "unsupported_parameter", "messages[0].content[0].type"),
        (
            [HI, {"role": "assistant", "content": [RESULT]}, HI],
            "unsupported_parameter",
            "messages[1].content[0].type",
        ),
        (
            [{"role": "user", "content": [{**RESULT, "content": [IMAGE]}]}],
            "unsupported_parameter",
            "messages[0].content[0].content[0].type",
        ),
        (
            [HI, {"role": "assistant", "content": [{**CALL, "input": "x"}]}, HI],
            "invalid_value",
            "messages[1].content[0].input",
        ),
        (
            [HI, {"role": "assistant", "content": [{"type": "tool_use"}]}, HI],
            "missing_required_parameter",
            "messages[1].content[0].id",
        ),
        ([HI, {"role": "assistant", "content": [CALL]}], "invalid_value", "messages[1]"),
        *(
            ([HI, {"role": role, "content": empty}, HI], "invalid_value", "messages[1].content")
            for role in ("user", "system")
            for empty in ("", [])
        ),
        ([{"role": "user", "content": ""}], "invalid_value", "messages[0].content"),
        (
            [HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}],
            "unsupported_parameter",
            "messages[1]",
        ),
        (
            [HI, {"role": "assistant", "content": [IMAGE]}, HI],
            "unsupported_parameter",
            "messages[1].content[0].type",
        ),
    ],
)
def test_refusals_name_the_block(messages, code, param):
    with pytest.raises(ApiError) as caught:
        read(*messages)
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("tool", "code", "param"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "unsupported_parameter", "tools[0].type"),
        ({"type": "bash_20250124", "name": "bash"}, "unsupported_parameter", "tools[0].type"),
        ({"name": "f"}, "missing_required_parameter", "tools[0].input_schema"),
        ({"name": "f", "input_schema": []}, "invalid_value", "tools[0].input_schema"),
        (
            {"name": "f", "input_schema": {}, "defer_loading": True},
            "unsupported_parameter",
            "tools[0].defer_loading",
        ),
        (5, "invalid_value", "tools[0]"),
    ],
)
def test_refusals_name_the_tool(tool, code, param):
    with pytest.raises(ApiError) as caught:
        read(HI, tools=[tool])
    assert (caught.value.code, caught.value.param) == (code, param)
