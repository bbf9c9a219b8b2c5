"""Tools, reasoning and prefill over Anthropic's Messages: contexts that are sent again find their turns."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.server.anthropic.reply import SIGNATURE
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.text import Tokenizer, byte_tokenizer
from tests.server.anthropic.test_messages import COUNT, ask, body_of, post, streamed
from tests.server.fakes import FakeEngine, Harness, sampled, say
from tests.text.tool_templates import HERMES, QWEN3, written

TOOLS = [
    {
        "name": "look_up",
        "description": "Find a word.",
        "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
    {"name": "now", "input_schema": {"type": "object"}},
]
ASK = {"role": "user", "content": "What is a chunk?"}
CALL = written("look_up", '{"word": "chunk"}')


def asking(messages: list[dict], **fields: Any) -> dict:
    """Return a request with the tools, and room for replies of bytes."""
    return body_of(messages, **{"max_tokens": 500, "tools": TOOLS, **fields})


def harness_of(*replies: str, template: str = HERMES, **settings: Any) -> Harness:
    """Return a server whose replies are these, and whose template has tools."""
    tokenizer = Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=template)
    texts = iter(replies)
    engine = FakeEngine(lambda turn: say(next(texts))(turn))
    return Harness(ROUTES, engine, ServerSettings(**settings), tokenizer=tokenizer)


def prompt_of(harness: Harness) -> str:
    """Return the whole context of the latest turn as text."""
    tokens: list[int] = []
    for turn in harness.engine.turns:
        tokens[turn.spec.keep :] = turn.spec.prompt_token_ids
        context = list(tokens)
        tokens += turn.output.token_ids
    return harness.services.tokenizer.decode_raw(context)


def answer(harness: Harness, body: dict, stream: bool) -> dict:
    return streamed(harness, body) if stream else ask(harness, body)[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_its_result_and_another_question(stream):
    harness = harness_of(f"Let me see.\n{CALL}", "A part of a page.", "You are welcome.")
    message = answer(harness, asking([ASK]), stream)
    text, use = message["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert use.pop("id").startswith("call_")
    assert use == {"type": "tool_use", "name": "look_up", "input": {"word": "chunk"}}
    assert message["stop_reason"] == "tool_use"

    message = answer(harness_of(CALL), asking([ASK]), stream)
    assert [block["type"] for block in message["content"]] == ["tool_use"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_calls_keeps_all_its_tokens(stream):
    harness = harness_of(f"Let me see.\n{CALL}", f"{CALL}\n{CALL}", "A part.", "You are welcome.")
    history = [ASK]
    for number in range(4):
        message = answer(harness, asking(history), stream)
        history.append({"role": "assistant", "content": message["content"]})
        uses = [block for block in message["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": use["id"], "content": f"result {number}"} for use in uses
        ]
        history.append({"role": "user", "content": results or "Thanks!"})
    turns = harness.engine.turns
    for before, turn in itertools.pairwise(turns):
        num_path = before.spec.keep + len(before.spec.prompt_token_ids) + len(before.output.token_ids)
        assert turn.spec.node.parent_id == before.turn_id
        assert turn.spec.keep >= num_path - 1, "all but the ending id"
    text = prompt_of(harness)
    assert text.count("<tool_call>") == 3 and text.count("<tool_response>") == 3 and "Thanks!" in text


def test_a_conversation_with_tools_has_the_tokens_of_the_chat_route():
    """The same messages in OpenAI's form continue the same turn."""
    harness = harness_of(f"Let me see.\n{CALL}", "A part.", "Bye.")
    _, message = ask(harness, asking([ASK], system="Be brief."))
    use = message["content"][1]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "a part of a page"}
    history = [
        ASK,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    _, message = ask(harness, asking(history, system="Be brief."))
    arguments = json.dumps(use["input"])
    call = {"id": use["id"], "type": "function", "function": {"name": use["name"], "arguments": arguments}}
    functions = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                **({"description": tool["description"]} if "description" in tool else {}),
                "parameters": tool["input_schema"],
            },
        }
        for tool in TOOLS
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        ASK,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "a part of a page", "tool_call_id": use["id"]},
        {"role": "assistant", "content": "A part."},
        {"role": "user", "content": "Bye"},
    ]
    sent = {"model": "fake", "messages": chat, "tools": functions}
    status, _ = ask(harness, sent, "/v1/chat/completions")
    turns = harness.engine.turns
    assert status == 200 and turns[2].spec.node.parent_id == turns[1].turn_id


def test_tools_are_counted():
    harness = harness_of("Hi.")
    ask(harness, asking([ASK]))
    _, counted = ask(harness, {"messages": [ASK], "tools": TOOLS}, COUNT)
    assert counted == {"input_tokens": len(harness.engine.turns[0].spec.prompt_token_ids)}
    assert counted["input_tokens"] > ask(harness, {"messages": [ASK]}, COUNT)[1]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_may_have_one_call_only(stream):
    """The engine ends it with the call; the client's stop sequences are its own."""
    harness = harness_of()
    harness.engine.script = sampled([*f"{CALL}\n{CALL}".encode(), 257])
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = answer(harness, asking([ASK], tool_choice=choice, stop_sequences=["x"]), stream)
    (use,) = message["content"]
    assert (use["name"], use["input"]) == ("look_up", {"word": "chunk"})
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    turn = harness.engine.turns[-1]
    assert (turn.spec.params.stop, turn.output.token_ids[-1]) == (("x",), ord("}"))


def test_without_a_choice_of_tools_calls_are_text():
    _, message = ask(harness_of(CALL), asking([ASK], tool_choice={"type": "none"}))
    assert message["content"] == [{"type": "text", "text": CALL}] and message["stop_reason"] == "end_turn"


THINKING = "<think>\nA chunk is 32 tokens.\n</think>\n\n"
THOUGHT = {"type": "thinking", "thinking": "A chunk is 32 tokens.", "signature": SIGNATURE}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_a_block_and_is_sent_back(stream):
    harness = harness_of(f"{THINKING}Let me see.\n{CALL}", f"{THINKING}A part.", "Bye.", template=QWEN3)
    message = answer(harness, asking([ASK]), stream)
    thought, text, use = message["content"]
    assert thought == THOUGHT and text["text"] == "Let me see."
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "a part"}
    history = [
        ASK,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    message = answer(harness, asking(history), stream)
    one, two = harness.engine.turns
    assert two.spec.node.parent_id == one.turn_id
    assert "A chunk is 32 tokens." in prompt_of(harness)
    history += [{"role": "assistant", "content": message["content"][1:]}, {"role": "user", "content": "Bye"}]
    answer(harness, asking(history), stream)
    assert harness.engine.turns[2].spec.node.parent_id == two.turn_id, "also without its reasoning"
    assert "A chunk is 32 tokens." not in prompt_of(harness), "as this template writes earlier turns"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_may_be_hidden(stream):
    harness = harness_of(f"{THINKING}A part.", template=QWEN3)
    thinking = {"type": "adaptive", "display": "omitted"}
    message = answer(harness, asking([ASK], thinking=thinking), stream)
    assert message["content"] == [{**THOUGHT, "thinking": ""}, {"type": "text", "text": "A part."}]


@pytest.mark.parametrize(("kind", "is_closed"), [("disabled", True), ("enabled", False), ("adaptive", False)])
def test_the_template_is_told_whether_to_think(kind, is_closed):
    harness = harness_of("A part.", template=QWEN3)
    ask(harness, asking([ASK], thinking={"type": kind}))
    assert prompt_of(harness).endswith("<think>\n\n</think>\n\n") == is_closed


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_begins_the_reply_and_is_found_again(stream):
    harness = harness_of("2 tokens.", "Bye.")
    begun = {"role": "assistant", "content": "A chunk is 3"}
    message = answer(harness, body_of([ASK, begun]), stream)
    assert message["content"] == [{"type": "text", "text": "2 tokens."}]
    assert prompt_of(harness).endswith("assistant\nA chunk is 3")
    whole = {"role": "assistant", "content": "A chunk is 32 tokens."}
    ask(harness, body_of([ASK, whole, {"role": "user", "content": "Bye"}]))
    one, two = harness.engine.turns
    assert two.spec.node.parent_id == one.turn_id


def test_a_call_that_the_limit_cuts():
    harness = harness_of(CALL)
    _, message = ask(harness, asking([ASK], max_tokens=50))
    (use,) = message["content"]
    assert message["stop_reason"] == "max_tokens" and "INVALID_JSON" in use["input"]


def form_of(harness: Harness) -> StructuredOutput | None:
    return harness.engine.turns[-1].spec.params.structured


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, {"look_up", "now"}),
        ({"type": "tool", "name": "now"}, {"now"}),
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
    ],
)
def test_a_choice_may_demand_a_call(choice, names):
    harness = harness_of(CALL)
    status, _ = ask(harness, asking([ASK], tool_choice=choice))
    form = form_of(harness)
    assert status == 200 and (form is None) == (names is None)
    if form is not None:
        assert form.kind == "grammar" and form.after == ""
        assert {name for name in ("look_up", "now") if f'"{name}"' in form.text} == names


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "none"}])
def test_a_strict_tool_has_the_form_of_its_schema_where_it_may_be_called(choice):
    harness = harness_of(CALL)
    tools = [TOOLS[0], {**TOOLS[1], "strict": True}]
    fields = {} if choice is None else {"tool_choice": choice}
    status, headers, _ = asyncio.run(post(harness, asking([ASK], tools=tools, **fields)))
    assert status == 200 and "x-ignored-fields" not in headers
    form = form_of(harness)
    assert (form is None) == (choice == {"type": "none"})
    assert form is None or form.text.startswith("start: TEXT (call")
    ask(harness, asking([ASK], tools=[TOOLS[0], {**TOOLS[1], "strict": False}], **fields))
    assert form_of(harness) is None


def test_strict_tools_and_a_form_of_the_text_exclude_each_other():
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    tools = [{**TOOLS[0], "strict": True}]
    status, body = ask(harness_of(), asking([ASK], tools=tools, output_config=form))
    assert status == 400 and body["error"]["details"]["param"] == "tools"


SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}


@pytest.mark.parametrize("in_config", [True, False])
def test_a_reply_may_have_the_form_of_a_schema(in_config):
    harness = harness_of('{"word": "chunk"}')
    form = {"type": "json_schema", "schema": SCHEMA}
    fields = {"output_config": {"format": form}} if in_config else {"output_format": form}
    status, message = ask(harness, body_of([ASK], **fields))
    assert status == 200 and json.loads(message["content"][0]["text"]) == {"word": "chunk"}
    assert form_of(harness) == StructuredOutput.json_schema(SCHEMA)


@pytest.mark.parametrize(("kind", "marks"), [("adaptive", ("<think>", "</think>")), ("disabled", ("", ""))])
def test_a_form_begins_behind_the_reasoning(kind, marks):
    harness = harness_of('{"word": "chunk"}', template=QWEN3)
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    ask(harness, body_of([ASK], output_config=form, thinking={"type": kind}))
    found = form_of(harness)
    assert found is not None and (found.opening, found.after) == marks


@pytest.mark.parametrize(
    ("schema", "code"),
    [({"type": 5}, "invalid_value"), ({"not": {"type": "string"}}, "unsupported_parameter")],
)
def test_a_schema_that_is_refused_is_named(schema, code):
    form = {"format": {"type": "json_schema", "schema": schema}}
    status, body = ask(harness_of(), body_of([ASK], output_config=form))
    assert status == 400
    assert body["error"]["details"] == {"error_code": code, "param": "output_config.format.schema"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "invalid_value", "tools[0].name"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "invalid_value", "tools[1].name"),
        ({"tool_choice": {"type": "tool"}}, "missing_required_parameter", "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "invalid_value", "tool_choice.name"),
        ({"tool_choice": {"type": "all"}}, "invalid_value", "tool_choice.type"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "invalid_value", "tool_choice"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "unsupported_parameter",
            "tools[0].type",
        ),
    ],
)
def test_refusals_name_the_field(fields, code, param):
    status, body = ask(harness_of(), asking([ASK]) | fields)
    assert status == 400 and body["error"]["details"] == {"error_code": code, "param": param}


def test_a_result_without_its_call_is_refused():
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
    sent = [ASK, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": [result]}]
    status, body = ask(harness_of(), asking(sent, system="Be brief."))
    assert status == 400
    assert body["error"]["details"]["param"] == "messages[2].content[0].tool_use_id"


def test_a_template_without_tools_refuses_them():
    status, body = ask(Harness(ROUTES), asking([ASK]))
    assert status == 400
    assert body["error"]["details"] == {"error_code": "unsupported_parameter", "param": "tools"}


def test_effort_is_ignored_by_a_template_without_it():
    sent = asking([ASK], output_config={"effort": "max"})
    _, headers, _ = asyncio.run(post(harness_of("A part."), sent))
    assert headers["x-ignored-fields"] == "output_config.effort"
    template = QWEN3 + "{{ reasoning_effort }}"
    harness = harness_of("A part.", template=template)
    _, headers, _ = asyncio.run(post(harness, sent))
    assert "x-ignored-fields" not in headers and prompt_of(harness).endswith("high")
