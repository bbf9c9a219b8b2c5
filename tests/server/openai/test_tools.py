"""Tool calls in Chat Completions and Responses: whole, streamed, stored, chosen, and cut."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.text import reply_forms
from pensieve_jax.text.tool_grammars import call_grammar
from tests.server.fakes import ask
from tests.server.openai.test_reasoning import events_of
from tests.server.scripted import ScriptedServer
from tests.text.tool_templates import HERMES, QWEN3

NAMES = ("look_up", "add", "now")
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in NAMES]
USER = {"role": "user", "content": "what is it?"}


def written(name: str, arguments: str | None) -> str:
    rest = "" if arguments is None else f', "arguments": {arguments}'
    return f'<tool_call>\n{{"name": "{name}"{rest}}}\n</tool_call>'


ONE = written("look_up", '{"name": "a </tool_call> b"}')
# Public reports of other servers: streams that did not equal the whole.
REPLIES = {
    "one call": (ONE, None, [("look_up", '{"name": "a </tool_call> b"}')]),
    "text before": ("I look.\n" + ONE, "I look.", [("look_up", '{"name": "a </tool_call> b"}')]),
    "text after": (ONE + "\nThat is it.", "That is it.", [("look_up", '{"name": "a </tool_call> b"}')]),
    "without arguments first": (
        written("now", None) + "\n" + written("add", '{"x": 1}'),
        None,
        [("now", "{}"), ("add", '{"x": 1}')],
    ),
    "an argument called name": (
        '<tool_call>{"arguments": {"name": "John"}, "name": "add"}</tool_call>',
        None,
        [("add", '{"name": "John"}')],
    ),
    "broken arguments": (written("add", '{"x": 1,, y}'), None, [("add", '{"x": 1,, y}')]),
    "half a character": (
        written("a\\ud83d", '{"x": "\\ud83d"}'),
        None,
        [("a\ufffd", '{"x": "\\ud83d"}')],
    ),
    "no call": ("a <b> & [c]", "a <b> & [c]", []),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite"


@pytest.fixture(params=REPLIES)
def case(request: pytest.FixtureRequest, path: Path) -> Iterator[tuple[ScriptedServer, Any, Any]]:
    """A server that gives one reply each time, and what its content and calls are."""
    text, content, calls = REPLIES[request.param]
    server = ScriptedServer(path, [text] * 9, HERMES)
    yield server, content, calls
    server.close()


@pytest.mark.parametrize(
    ("route", "tools", "choice"),
    [
        ("chat/completions", TOOLS, "required"),
        ("messages", [{"name": name, "input_schema": PARAMETERS} for name in NAMES], {"type": "any"}),
    ],
)
def test_the_grammar_of_a_long_request_is_written_once_and_in_a_thread(
    path, monkeypatch, route, tools, choice
):
    threads = []

    def noted(*args, **kwargs):
        threads.append(threading.current_thread())
        return call_grammar(*args, **kwargs)

    monkeypatch.setattr(reply_forms, "call_grammar", noted)
    server = ScriptedServer(path, [ONE] * 3, HERMES)
    several = {"n": 3, "seed": 5} if route == "chat/completions" else {}
    body = {"messages": [USER], "tools": tools, "tool_choice": choice, "max_tokens": 9, "x": "x" * 30_000}
    status, answer = ask(server.harness, "POST", f"/v1/{route}", body | several)
    server.close()
    assert status == 200, answer
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def send(server: ScriptedServer, route: str, **body: Any) -> Any:
    status, answer = ask(server.harness, "POST", f"/v1/{route}", body)
    assert status == 200, answer
    return answer


def chat(server: ScriptedServer, messages: Any = (USER,), **fields: Any) -> Any:
    return send(server, "chat/completions", messages=list(messages), tools=TOOLS, **fields)


def added(chunks: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]], str]:
    """Return content, calls and the end of the deltas of a stream, as clients add them up."""
    content, calls, reason = "", [], ""
    for chunk in chunks:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                calls.append([call["id"], call["function"]["name"], ""])
            else:
                assert set(call) == {"index", "function"}
                calls[call["index"]][2] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, [tuple(call) for call in calls], reason


def test_a_completion_has_calls_and_its_stream_equals_it(case: Any) -> None:
    server, content, calls = case
    answer = chat(server)
    message = answer["choices"][0]["message"]
    assert message["content"] == content
    found = message.get("tool_calls", [])
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in found] == calls
    assert all(one["type"] == "function" and one["id"].startswith("call_") for one in found)
    assert answer["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    streamed, stream_calls, reason = added(events_of(chat(server, stream=True)))
    assert (streamed or None) == content
    assert [one[1:] for one in stream_calls] == calls
    assert reason == answer["choices"][0]["finish_reason"]
    assert len({one[0] for one in stream_calls} | {one["id"] for one in found}) == 2 * len(calls)


def test_a_response_has_calls_and_its_stream_equals_it(case: Any, path: Path) -> None:
    server, content, calls = case
    response = send(server, "responses", input="what?", tools=FLAT)
    kinds = [item["type"] for item in response["output"]]
    assert sorted(kinds) == ["function_call"] * len(calls) + ["message"] * (content is not None)
    found = [item for item in response["output"] if item["type"] == "function_call"]
    assert [(item["name"], item["arguments"]) for item in found] == calls
    events = events_of(send(server, "responses", input="what?", tools=FLAT, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    for index, item in enumerate(final["output"]):
        if item["type"] == "function_call":
            own = [event for event in events if event.get("output_index") == index]
            deltas = "".join(event["delta"] for event in own if event["type"].endswith("arguments.delta"))
            assert deltas == item["arguments"]
            assert own[0]["item"]["arguments"] == "" and own[0]["item"]["status"] == "in_progress"
            assert own[-2]["type"] == "response.function_call_arguments.done"
            assert (own[-2]["arguments"], own[-2]["name"]) == (item["arguments"], item["name"])
    name = f"/v1/responses/{final['id']}"
    assert ask(server.harness, "GET", name) == (200, final)
    for starting_after in (0, len(events) // 2, len(events) - 2):
        _, raw = ask(server.harness, "GET", f"{name}?stream=true&starting_after={starting_after}")
        assert events_of(raw) == events[starting_after + 1 :]
    server.close()
    again = ScriptedServer(path, [], HERMES)
    assert ask(again.harness, "GET", name) == (200, final)
    again.close()


def test_a_loop_of_calls_goes_on_from_its_tokens(path: Path) -> None:
    server = ScriptedServer(path, [ONE, written("now", "{}"), "It is done."], HERMES)
    messages: list[Any] = [USER]
    for number in range(2):
        message = chat(server, messages)["choices"][0]["message"]
        (call,) = message["tool_calls"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": f"found {number}"}]
    assert chat(server, messages)["choices"][0]["message"]["content"] == "It is done."
    nodes = [turn.spec.node for turn in server.engine.turns]
    assert [node.parent_id for node in nodes] == [None, nodes[0].turn_id, nodes[1].turn_id]
    server.close()


def test_a_call_its_result_and_a_third_question_by_id(path: Path) -> None:
    server = ScriptedServer(path, [ONE, "An animal.", "Yes."], HERMES)
    first = send(server, "responses", input="what is it?", tools=FLAT)
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "found it"}
    second = send(server, "responses", input=[output], tools=FLAT, previous_response_id=first["id"])
    server.close()
    server = ScriptedServer(path, ["Yes."], HERMES)
    send(server, "responses", input="sure?", tools=FLAT, previous_response_id=second["id"])
    spec = server.engine.turns[-1].spec
    record = server.engine.store.load_turn(spec.node.owner, spec.node.parent_id)
    ids = [*record.token_ids.tolist()[: spec.keep], *spec.prompt_token_ids]
    context = server.harness.services.tokenizer.decode_raw(ids)
    assert ONE in context and "found it" in context and "An animal." in context
    server.close()


def test_a_call_that_length_cuts_is_not_finished(path: Path) -> None:
    server = ScriptedServer(path, [ONE] * 2, HERMES)
    answer = chat(server, max_tokens=50)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert '{"name": "a </tool_call> b"}'.startswith(call["function"]["arguments"])
    response = send(server, "responses", input="what?", tools=FLAT, max_output_tokens=50)
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    server.close()


def test_marks_are_shown_to_turns_with_tools_only(path: Path) -> None:
    server = ScriptedServer(path, [ONE] * 2, HERMES)
    answer = send(server, "chat/completions", messages=[USER])
    assert (
        answer["choices"][0]["message"]["content"] == '\n{"name": "look_up", "arguments": {"name": "a  b"}}\n'
    )
    assert "tool_calls" not in answer["choices"][0]["message"]
    server.close()


def params_of(path: Path, **fields: Any) -> Any:
    server = ScriptedServer(path, [ONE], HERMES)
    chat(server, **fields)
    server.close()
    return server.engine.turns[0].spec


def test_the_choice_of_tools_decides_the_form_of_a_reply(path: Path) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    allowed = {"mode": "required", "tools": [named, {"type": "function", "function": {"name": "now"}}]}
    plain = params_of(path, tool_choice="auto").params
    assert (plain.structured, plain.bad_words, plain.stop) == (None, (), ())
    for choice, names in (
        ("required", NAMES),
        (named, ("add",)),
        ({"type": "allowed_tools", "allowed_tools": allowed}, ("add", "now")),
    ):
        spec = params_of(path, tool_choice=choice)
        grammar = spec.params.structured.text
        assert [name for name in NAMES if json.dumps(name) in grammar] == [n for n in NAMES if n in names]
        assert [tool["function"]["name"] for tool in spec.template_input.tools] == list(NAMES)


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_without_a_choice_of_tools_calls_are_text(path: Path, route: str) -> None:
    """All options of the client stay its own, and have their own limits."""
    is_chat = route == "chat/completions"
    fields: dict[str, Any] = (
        {"messages": [USER], "tools": TOOLS} if is_chat else {"input": "what?", "tools": FLAT}
    )
    if is_chat:
        fields["bad_words"] = [f"word {number}" for number in range(64)]
    server = ScriptedServer(path, [ONE, "It is an animal."], HERMES)
    answer = send(server, route, **fields, tool_choice="none")
    if is_chat:
        message = answer["choices"][0]["message"]
        assert message["content"].strip().startswith('{"name": "look_up"')
        assert (message.get("tool_calls"), answer["choices"][0]["finish_reason"]) == (None, "stop")
        fields["messages"] = [USER, message, {"role": "user", "content": "sure?"}]
    else:
        assert [item["type"] for item in answer["output"]] == ["message"]
        fields |= {"previous_response_id": answer["id"]}
    send(server, route, **fields)
    first, second = (turn.spec for turn in server.engine.turns)
    assert second.node.parent_id == first.node.turn_id
    assert len(first.params.bad_words) == 64 * is_chat
    assert (first.template_input.reply.max_calls, second.template_input.reply.max_calls) == (0, None)
    server.close()


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("chat/completions", {"messages": [USER], "tools": TOOLS, "tool_choice": "required"}),
        ("chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}),
        ("responses", {"input": "what?", "tools": FLAT, "tool_choice": "required"}),
        ("responses", {"input": "what?", "text": {"format": {"type": "json_object"}}}),
    ],
)
def test_a_form_begins_behind_the_reasoning(path: Path, route: str, fields: Any) -> None:
    server = ScriptedServer(path, [ONE] * 2, QWEN3)
    send(server, route, **fields)
    form = server.engine.turns[0].spec.params.structured
    assert (form.opening, form.after) == ("<think>", "</think>")
    send(server, route, **fields, chat_template_kwargs={"enable_thinking": False})
    form = server.engine.turns[1].spec.params.structured
    assert (form.opening, form.after) == ("", ""), "the prompt ends it"
    server.close()


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
def test_the_form_of_text_leaves_demanded_calls_alone(path: Path, route: str) -> None:
    """As instructor sends it: the reply has no text, so only the calls have a form."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    if route == "responses":
        form = {"text": {"format": {"type": "json_schema", "name": "City", "schema": schema, "strict": True}}}
        fields: dict[str, Any] = {"input": "what?", "tools": FLAT}
        named: dict[str, Any] = {"type": "function", "name": "add"}
    else:
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "City", "schema": schema}}}
        fields = {"messages": [USER], "tools": TOOLS}
        named = {"type": "function", "function": {"name": "add"}}
    server = ScriptedServer(path, [ONE] * 4, HERMES)
    for choice in ("required", named):
        send(server, route, **fields, tool_choice=choice)
        send(server, route, **fields, **form, tool_choice=choice)
    plain, formed, one, one_formed = (turn.spec.params.structured for turn in server.engine.turns)
    assert plain == formed and one == one_formed
    assert "city" not in formed.text and json.dumps("add") in one_formed.text
    server.close()


@pytest.mark.parametrize("thought", ["", "<think>\nNot </tool_call> yet.\n</think>\n\n"])
def test_a_reply_ends_behind_one_call_without_parallel_calls(path: Path, thought: str) -> None:
    """The mark behind a call may stand in the arguments, which `ONE` has, and in the reasoning."""
    reply = thought + ONE + "\n" + written("now", "{}")
    server = ScriptedServer(path, [reply] * 4, QWEN3 if thought else HERMES)
    expected = [("look_up", '{"name": "a </tool_call> b"}')]
    for stream in (False, True):
        answer = chat(server, parallel_tool_calls=False, stream=stream)
        if stream:
            content, calls, reason = added(events_of(answer))
            assert ([one[1:] for one in calls], content, reason) == (expected, "", "tool_calls")
        else:
            (choice,) = answer["choices"]
            found = [one["function"] for one in choice["message"]["tool_calls"]]
            assert [(one["name"], one["arguments"]) for one in found] == expected
            assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        response = send(server, "responses", input="what?", tools=FLAT, parallel_tool_calls=False)
        *_, item = response["output"]
        assert [item["type"] for item in response["output"]] == ["reasoning"] * bool(thought) + [
            "function_call"
        ]
        assert (item["name"], item["arguments"], response["status"]) == (*expected[0], "completed")
    assert all(turn.output.token_ids[-1] == ord("}") for turn in server.engine.turns), "no more is computed"
    server.close()


def test_the_end_of_one_call_is_no_stop_string_of_the_client(path: Path) -> None:
    server = ScriptedServer(path, [ONE], HERMES)
    chat(server, parallel_tool_calls=False, stop=[f"stop {number}" for number in range(16)])
    assert len(server.engine.turns[0].spec.params.stop) == 16
    server.close()


@pytest.mark.parametrize("more", ["\n</tool_call>\nAnd", "\n</tool_call>\n<tool_call>", " and so on."])
def test_what_stands_behind_one_call_in_its_last_token_is_dropped(path: Path, more: str) -> None:
    """The client sees one call, and the next turn goes on from its tokens; also after a restart."""
    call = written("add", '{"x": 1}').removesuffix("\n</tool_call>")
    tokens = ["}" + more]
    server = ScriptedServer(path, [call + more] * 2, HERMES, tokens=tokens)
    fields: dict[str, Any] = {"parallel_tool_calls": False, "store": True}
    _, calls, _ = added(events_of(chat(server, **fields, stream=True)))
    message = chat(server, **fields)["choices"][0]["message"]
    (found,) = message["tool_calls"]
    assert message["content"] is None
    assert [one[1:] for one in calls] == [("add", '{"x": 1}')]
    first = server.engine.turns[1]
    assert first.output.token_ids[-1] == server.harness.services.tokenizer.id_of(tokens[0])
    server.close()
    server = ScriptedServer(path, ["It is done."], HERMES, tokens=tokens)
    result = {"role": "tool", "tool_call_id": found["id"], "content": "found"}
    chat(server, [USER, message, result], **fields)
    spec = server.engine.turns[0].spec
    assert spec.node.parent_id == first.spec.node.turn_id
    kept = len(first.spec.prompt_token_ids) + len(first.output.token_ids) - 1
    assert spec.keep >= kept, "all but the token with more than the call"
    whole = [*first.spec.prompt_token_ids, *first.output.token_ids][: spec.keep] + spec.prompt_token_ids
    context = server.harness.services.tokenizer.decode_raw(whole)
    assert call + "\n</tool_call><|im_end|>" in context and "And" not in context
    server.close()


def test_strict_tools_have_a_form_from_their_mark_on(path: Path) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    server = ScriptedServer(path, [ONE], HERMES)
    send(server, "chat/completions", messages=[USER], tools=strict)
    assert server.engine.turns[0].spec.params.structured.text.startswith("start: TEXT (call")
    server.close()


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "all"}, "invalid_value", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "unsupported_parameter", "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "invalid_value",
            "tool_choice.function.name",
        ),
    ],
)
def test_a_choice_that_cannot_be_is_named(path: Path, fields: Any, code: str, param: str) -> None:
    server = ScriptedServer(path, [ONE], HERMES)
    status, answer = ask(server.harness, "POST", "/v1/chat/completions", {"messages": [USER], **fields})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param)
    server.close()


def test_a_template_without_a_known_format_refuses_tools(path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    for settings, expected in (({}, 400), ({"tools": "ignore"}, 200), ({"tool_call_parser": "hermes"}, 200)):
        server = ScriptedServer(path, [ONE], template, **settings)
        status, answer = ask(
            server.harness, "POST", "/v1/chat/completions", {"messages": [USER], "tools": TOOLS}
        )
        assert status == expected
        if expected == 400:
            assert answer["error"]["param"] == "tools" and "--tools=ignore" in answer["error"]["message"]
        server.close()


def test_references_name_each_item_of_a_reply(path: Path) -> None:
    """Reasoning, texts and calls of a reply, also those behind the first of their kind."""
    reply = "<think>\nhm\n</think>\nI look.\n" + ONE + "\n" + written("now", "{}") + "\nThat is it."
    server = ScriptedServer(path, [reply, "done"], QWEN3)
    output = send(server, "responses", input="hi", tools=FLAT)["output"]
    kinds = [item["type"] for item in output]
    assert kinds == ["reasoning", "message", "function_call", "function_call", "message"]
    assert len({item["id"] for item in output}) == len(output)
    references = [{"type": "item_reference", "id": item["id"]} for item in output]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "42"}
        for item in output
        if item["type"] == "function_call"
    ]
    given = [{"role": "user", "content": "hi"}, *references, *results]
    answer = send(server, "responses", input=given, tools=FLAT)
    assert answer["status"] == "completed"
    stored, _ = ask(server.harness, "GET", f"/v1/responses/{answer['id']}/input_items", None)
    assert stored == 200
    unknown = [{"type": "item_reference", "id": output[2]["id"] + "r7"}]
    status, error = ask(server.harness, "POST", "/v1/responses", {"input": unknown})
    assert (status, error["error"]["param"]) == (404, "input[0].id")


@pytest.mark.parametrize("kind", [[{"x": 1}], ["array"]])
def test_no_schema_and_no_argument_breaks_the_commit_of_a_reply(path: Path, kind: Any) -> None:
    deep = "[" * 1600 + "]" * 1600
    text = f"<tool_call>\n<function=f>\n<parameter=p>\n{deep}\n</parameter>\n</function>\n</tool_call>"
    schema = {"type": "object", "properties": {"p": {"allOf": [{"type": kind}]}}}
    server = ScriptedServer(path, [text] * 2, HERMES, tool_call_parser="qwen3_xml")
    conversation = send(server, "conversations")["id"]
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    answer = send(server, "responses", input="hi", tools=tools, conversation=conversation)
    assert json.loads(answer["output"][0]["arguments"]) == {"p": deep}
    status, items = ask(server.harness, "GET", f"/v1/conversations/{conversation}/items")
    assert status == 200 and [item["type"] for item in items["data"]] == ["function_call", "message"]
    server.close()


def test_an_argument_that_no_call_can_name_is_refused(path: Path) -> None:
    """On each route by its own path, and only where the tool may be called."""
    schema = {"type": "object", "properties": {"a b": {"type": "string"}}}
    tool = {"name": "f", "parameters": schema}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "chat/completions",
            {"messages": [USER], "tools": [*TOOLS, {"type": "function", "function": tool}]},
            "tools[3].function.parameters.properties",
        ),
        (
            "responses",
            {"input": "what?", "tools": [*FLAT, {"type": "function", **tool}]},
            "tools[3].parameters.properties",
        ),
        (
            "messages",
            {"messages": [USER], "max_tokens": 9, "tools": [{"name": "f", "input_schema": schema}]},
            "tools[0].input_schema.properties",
        ),
    ]
    server = ScriptedServer(path, ["Hello."] * 6, HERMES, tool_call_parser="pythonic")
    for route, body, param in cases:
        status, answer = ask(server.harness, "POST", f"/v1/{route}", body)
        error = answer["error"].get("details", answer["error"])
        assert (status, error["param"]) == (400, param)
        assert "'a b'" in answer["error"]["message"] and "pythonic" in answer["error"]["message"]
        none = {"type": "none"} if route == "messages" else "none"
        send(server, route, **body, tool_choice=none)
    server.close()


@pytest.mark.parametrize("kind", ["array", "null", ["array", "null"]])
def test_parameters_of_another_type_than_objects_are_refused(path: Path, kind: Any) -> None:
    """On each route by its own path; arguments of another type would be no call when they are sent again."""
    tool, names = {"name": "f", "parameters": {"type": kind}}, {"type": "function"}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "chat/completions",
            {"messages": [USER], "tools": [*TOOLS, {**names, "function": tool}]},
            "tools[3].function.parameters.type",
        ),
        ("responses", {"input": "what?", "tools": [*FLAT, {**names, **tool}]}, "tools[3].parameters.type"),
        (
            "messages",
            {"messages": [USER], "max_tokens": 9, "tools": [{"name": "f", "input_schema": {"type": kind}}]},
            "tools[0].input_schema.type",
        ),
    ]
    server = ScriptedServer(path, [], HERMES)
    for route, body, param in cases:
        status, answer = ask(server.harness, "POST", f"/v1/{route}", body)
        error = answer["error"].get("details", answer["error"])
        assert (status, error["param"]) == (400, param), answer
        assert "array" in answer["error"]["message"] or "null" in answer["error"]["message"]
    server.close()


def test_parameters_that_may_be_objects_are_objects(path: Path) -> None:
    tool = {"name": "add", "parameters": {**PARAMETERS, "type": ["object", "null"]}}
    server = ScriptedServer(path, [ONE], HERMES)
    tools = [{"type": "function", "function": tool}]
    send(server, "chat/completions", messages=[USER], tools=tools, tool_choice="required")
    spec = server.engine.turns[-1].spec
    assert spec.template_input.tools[0]["function"]["parameters"] == {**PARAMETERS, "type": "object"}
    server.close()


def test_calls_of_one_reply_have_different_ids(path: Path) -> None:
    """Streamed, whole and stored, also if the model gives all calls one number."""
    begin, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>{}<|tool_call_end|>"
    section = f"{begin}functions.now:0{end}" * 2
    text = f"<|tool_calls_section_begin|>{section}<|tool_calls_section_end|>"
    wanted = ["functions.now:0", "functions.now:1"]
    server = ScriptedServer(path, [text] * 4, HERMES, tool_call_parser="kimi_k2")
    answer = chat(server)
    assert [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]] == wanted
    _, calls, _ = added(events_of(chat(server, stream=True)))
    assert [call[0] for call in calls] == wanted
    body = {"model": "fake", "messages": [USER], "max_tokens": 200}
    tools = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    answer = send(server, "messages", **body, tools=tools)
    assert [block["id"] for block in answer["content"] if block["type"] == "tool_use"] == wanted
    answer = send(server, "responses", input="what?", tools=FLAT)
    assert [item["call_id"] for item in answer["output"]] == wanted
    path_of = f"/v1/responses/{answer['id']}"
    status, stored = ask(server.harness, "GET", path_of)
    assert status == 200 and [item["call_id"] for item in stored["output"]] == wanted
    server.close()


def test_a_schema_that_a_format_cannot_keep_is_refused_where_it_counts(path: Path) -> None:
    """On each route by its own path, also if the tool is one of those allowed."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1}
    tool, kind = {"name": "f", "parameters": schema}, {"type": "function"}
    named = {"type": "function", "function": {"name": "f"}}
    cases: list[tuple[str, dict[str, Any], Any, str]] = [
        (
            "chat/completions",
            {"messages": [USER], "tools": [*TOOLS, {**kind, "function": tool}]},
            named,
            "tools[3].function.parameters.minProperties",
        ),
        (
            "responses",
            {"input": "what?", "tools": [*FLAT, {**kind, **tool}]},
            {"type": "function", "name": "f"},
            "tools[3].parameters.minProperties",
        ),
        (
            "messages",
            {"messages": [USER], "max_tokens": 9, "tools": [{"name": "f", "input_schema": schema}]},
            {"type": "any"},
            "tools[0].input_schema.minProperties",
        ),
    ]
    server = ScriptedServer(path, ["Hello."] * 3, HERMES, tool_call_parser="qwen3_xml")
    for route, body, choice, param in cases:
        status, answer = ask(server.harness, "POST", f"/v1/{route}", {**body, "tool_choice": choice})
        error = answer["error"].get("details", answer["error"])
        assert (status, error["param"]) == (400, param), answer
        assert param in answer["error"]["message"] and "qwen3_xml" in answer["error"]["message"]
        send(server, route, **body)
    server.close()


def test_two_tools_of_one_name_are_refused(path: Path) -> None:
    server = ScriptedServer(path, ["Hello."] * 2, HERMES)
    for route, fields, param in (
        ("chat/completions", {"messages": [USER], "tools": [*TOOLS, TOOLS[1]]}, "tools[3].function.name"),
        ("responses", {"input": "what?", "tools": [*FLAT, FLAT[1]]}, "tools[3].name"),
    ):
        status, answer = ask(server.harness, "POST", f"/v1/{route}", fields)
        assert (status, answer["error"]["param"]) == (400, param)
    server.close()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop": ["loo"]}, "stop"),
        ({"stop_token_ids": [ord("#")]}, "stop"),
        ({"stop": ["</tool_call>"]}, "tool_calls"),
        ({}, "tool_calls"),
    ],
)
def test_a_reply_that_is_stopped_within_a_call_does_not_end_with_calls(path, is_streamed, fields, reason):
    text = written("add", '{"x": "l#oom"}')
    if fields.get("stop") == ["loo"]:
        text = text.replace("#", "")
    server = ScriptedServer(path, [text], HERMES)
    if is_streamed:
        found = added(events_of(chat(server, stream=True, **fields)))[2]
    else:
        found = chat(server, **fields)["choices"][0]["finish_reason"]
    server.close()
    assert found == reason


def test_a_reply_with_texts_around_a_call_is_found_again(path):
    server = ScriptedServer(path, [f"one\n{ONE}\ntwo", "done", "bye"], HERMES)
    message = chat(server)["choices"][0]["message"]
    assert message["content"] == "one\ntwo"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a cat"}
    answer = chat(server, [USER, message, result])
    turns = server.harness.engine.turns
    assert turns[1].spec.node.parent_id == turns[0].turn_id
    last = answer["choices"][0]["message"]
    chat(server, [USER, message, result, last, USER])
    assert turns[2].spec.node.parent_id == turns[1].turn_id
    server.close()
