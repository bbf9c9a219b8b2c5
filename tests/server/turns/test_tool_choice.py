"""Which tools a reply may call, beside a form of its text or not, on every route."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.core.errors import InvalidRequestError, UnsupportedGrammarError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.text import reply_forms
from tests.server.fakes import ask
from tests.server.openai.test_reasoning import events_of
from tests.server.scripted import ScriptedServer, started_servers
from tests.text.test_reply_forms import takes
from tests.text.tool_templates import HERMES, QWEN3

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MOOD = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
USER = {"role": "user", "content": "so?"}
# Templates with the words of gpt-oss's and of Llama's; what they write does not matter here.
HARMONY = (
    "{%- for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{%- if tools %}{{ tools | length }} functions.{% endif %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{#- <|channel|>analysis #}"
)
LLAMA = (
    '{%- if tools %}{{ tools | length }} "parameters": dictionary of argument name{% endif %}'
    "{%- for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
QWEN_XML = (
    "{%- if tools %}{{ tools | length }} <tool_call> <function= <parameter={% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)
ANSWER, WRONG = '{"mood": "bad"}', '{"mood": "fair"}'
THOUGHT = "<think>\nIs it so?\n</think>\n\n"
CHANNEL = "<|channel|>analysis<|message|>Is it so?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def harmony_call(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def llama_call(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


class Route:
    """A route, with its own words for tools, forms and choices."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "claude": "/v1/messages"}[
            name
        ]

    def body(self, *, strict: bool = False, form: bool = True) -> dict[str, Any]:
        """Return a request with two tools, and the form of a mood."""
        functions = [{"name": name, "parameters": NUMBER, "strict": strict} for name in ("look_up", "add")]
        if self.name == "chat":
            tools = [{"type": "function", "function": function} for function in functions]
            schema = {"name": "x", "schema": MOOD}
            fields = {"response_format": {"type": "json_schema", "json_schema": schema}} if form else {}
            return {"messages": [USER], "tools": tools, **fields}
        if self.name == "responses":
            tools = [{"type": "function", **function} for function in functions]
            own = {"text": {"format": {"type": "json_schema", "name": "x", "schema": MOOD}}} if form else {}
            return {"input": "so?", "tools": tools, **own}
        tools = [{"name": one["name"], "input_schema": NUMBER, "strict": strict} for one in functions]
        own = {"output_config": {"format": {"type": "json_schema", "schema": MOOD}}} if form else {}
        return {"model": "fake", "max_tokens": 400, "messages": [USER], "tools": tools, **own}

    def choice(self, kind: str) -> dict[str, Any]:
        """Return the field that demands calls, one tool, or none."""
        if self.name == "claude":
            named = {"type": "tool", "name": "add"}
            return {
                "tool_choice": {"required": {"type": "any"}, "named": named, "none": {"type": "none"}}[kind]
            }
        if kind == "named":
            inner = {"name": "add"} if self.name == "responses" else {"function": {"name": "add"}}
            return {"tool_choice": {"type": "function", **inner}}
        return {"tool_choice": kind}

    def allowed(self, mode: str, *names: str) -> dict[str, Any]:
        """Return the field that allows tools by name; only OpenAI's routes have it."""
        if self.name == "responses":
            tools = [{"type": "function", "name": name} for name in names]
            return {"tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}}
        chosen = [{"type": "function", "function": {"name": name}} for name in names]
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}}


ROUTES = {name: Route(name) for name in ("chat", "responses", "claude")}
OPENAI = ("chat", "responses")
type Start = Callable[..., ScriptedServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from started_servers(tmp_path, HERMES)


def send(server: ScriptedServer, route: Route, body: dict[str, Any]) -> Any:
    status, answer = ask(server.harness, "POST", route.path, body)
    assert status == 200, answer
    return answer


def form_of(server: ScriptedServer, route: Route, body: dict[str, Any]) -> StructuredOutput | None:
    send(server, route, body)
    found: StructuredOutput | None = server.engine.turns[-1].spec.params.structured
    return found


def is_taken(server: ScriptedServer, form: StructuredOutput | None, text: str) -> bool:
    assert form is not None
    tokenizer = server.harness.services.tokenizer
    assert tokenizer is not None
    return takes(tokenizer, form, text)


def parts_of(route: Route, answer: Any) -> tuple[str, list[str]]:
    """Return the content of an answer, and the names of its calls."""
    if route.name == "chat":
        message = answer["choices"][0]["message"]
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        return message["content"] or "", names
    if route.name == "responses":
        texts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
        return "".join(texts), [item["name"] for item in answer["output"] if item["type"] == "function_call"]
    blocks = answer["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return "".join(texts), [block["name"] for block in blocks if block["type"] == "tool_use"]


@pytest.mark.parametrize("template", [HERMES, QWEN3])
@pytest.mark.parametrize("name", ROUTES)
def test_a_reply_with_tools_and_a_form_is_calls_or_has_the_form(
    start: Start, name: str, template: str
) -> None:
    """As openai-agents sends an output type beside function tools."""
    route, call = ROUTES[name], hermes_call("look_up", '{"b": 1}')
    server = start(call, ANSWER, template=template)
    form = form_of(server, route, route.body())
    for before in ("",) if template == HERMES else ("", THOUGHT):
        for text in (ANSWER, call, call + "\n" + hermes_call("add", "{}")):
            assert is_taken(server, form, before + text), text
        for text in (WRONG, "Hello.", "I look.\n" + call, hermes_call("other", "{}"), ANSWER + call):
            assert not is_taken(server, form, before + text), text
    assert parts_of(route, send(server, route, route.body())) == (ANSWER, [])


@pytest.mark.parametrize("name", ROUTES)
def test_calls_beside_a_form_are_answered_as_calls(start: Start, name: str) -> None:
    route = ROUTES[name]
    server = start(hermes_call("look_up", '{"a": 1}'))
    assert parts_of(route, send(server, route, route.body())) == ("", ["look_up"])


@pytest.mark.parametrize("name", ROUTES)
def test_arguments_of_strict_tools_follow_their_schemas_beside_a_form(start: Start, name: str) -> None:
    route = ROUTES[name]
    server = start(ANSWER)
    form = form_of(server, route, route.body(strict=True))
    assert is_taken(server, form, hermes_call("add", '{"a": 1}')) and is_taken(server, form, ANSWER)
    assert not is_taken(server, form, hermes_call("add", '{"b": 1}'))


@pytest.mark.parametrize("name", ROUTES)
def test_demanded_calls_leave_no_text_to_have_the_form(start: Start, name: str) -> None:
    route = ROUTES[name]
    server = start(*[hermes_call("add", '{"a": 1}')] * 4)
    for kind in ("required", "named"):
        form, plain = (
            form_of(server, route, route.body(form=has) | route.choice(kind)) for has in (True, False)
        )
        assert form == plain
        assert is_taken(server, form, hermes_call("add", '{"a": 1}')) and not is_taken(server, form, ANSWER)
        other = hermes_call("look_up", '{"a": 1}')
        assert is_taken(server, form, other) == (kind == "required")


@pytest.mark.parametrize("name", ROUTES)
def test_without_calls_the_reply_has_the_form(start: Start, name: str) -> None:
    route = ROUTES[name]
    server = start(ANSWER)
    form = form_of(server, route, route.body() | route.choice("none"))
    assert is_taken(server, form, ANSWER)
    assert not is_taken(server, form, hermes_call("add", '{"a": 1}'))


@pytest.mark.parametrize("name", ROUTES)
def test_an_error_of_the_tools_beside_a_form_names_the_tools(start: Start, name: str) -> None:
    route, server = ROUTES[name], start()
    for field, named in (("structured.frame", "tools"), ("structured.json_schema", "schema")):
        server.harness.engine.refuse.append(InvalidRequestError(field, "x", "simpler"))
        status, answer = ask(server.harness, "POST", route.path, route.body())
        assert status == 400 and f"{named} is " in answer["error"]["message"]
    server.harness.engine.refuse.append(InvalidRequestError("structured.grammar", "x", "simpler"))
    status, answer = ask(server.harness, "POST", route.path, route.body() | route.choice("required"))
    assert status == 400 and "tools is " in answer["error"]["message"]


def test_an_error_of_demanded_calls_does_not_name_a_grammar_of_the_text(start: Start) -> None:
    route, server = ROUTES["chat"], start()
    body = route.body(form=False) | {"guided_grammar": 'start: "a"'}
    for choice, named in ((route.choice("required"), "tools"), ({}, "guided_grammar")):
        server.harness.engine.refuse.append(InvalidRequestError("structured.grammar", "x", "simpler"))
        status, answer = ask(server.harness, "POST", route.path, body | choice)
        assert (status, answer["error"]["param"]) == (400, named)


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize(
    ("template", "written"), [(HERMES, hermes_call), (LLAMA, llama_call), (HARMONY, harmony_call)]
)
def test_only_allowed_tools_are_called(
    start: Start, name: str, template: str, written: Callable[[str, str], str]
) -> None:
    route, before = ROUTES[name], FINAL if template == HARMONY else ""
    server = start(*[before + "Hello."] * 4, template=template)
    form = form_of(server, route, route.body(form=False) | route.allowed("auto", "add"))
    for text in (before + "Hello.", written("add", '{"b": 1}')):
        assert is_taken(server, form, text), text
    for text in (written("look_up", '{"a": 1}'), written("add", "[]")):
        assert not is_taken(server, form, text), text
    tools = server.engine.turns[-1].spec.template_input.tools
    assert [tool["function"]["name"] for tool in tools] == ["look_up", "add"], "the prompt stays as it is"
    strict = form_of(server, route, route.body(form=False, strict=True) | route.allowed("auto", "add"))
    assert is_taken(server, strict, written("add", '{"a": 1}'))
    assert not is_taken(server, strict, written("add", '{"b": 1}'))
    beside = form_of(server, route, route.body() | route.allowed("auto", "add"))
    assert is_taken(server, beside, before + ANSWER) and is_taken(server, beside, written("add", "{}"))
    assert not is_taken(server, beside, before + "Hello.")
    assert not is_taken(server, beside, written("look_up", "{}"))
    all_allowed = route.body(form=False) | route.allowed("auto", "add", "look_up")
    assert form_of(server, route, all_allowed) is None


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize(
    ("template", "written"), [(HERMES, hermes_call), (LLAMA, llama_call), (HARMONY, harmony_call)]
)
def test_strict_tools_have_strict_calls_in_every_format(
    start: Start, name: str, template: str, written: Callable[[str, str], str]
) -> None:
    route, before = ROUTES[name], FINAL if template == HARMONY else ""
    server = start(before + "Hello.", template=template)
    form = form_of(server, route, route.body(form=False, strict=True))
    for text in (before + "Hello.", written("add", '{"a": 1}')):
        assert is_taken(server, form, text), text
    assert not is_taken(server, form, written("add", '{"b": 1}'))


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("name", ROUTES)
def test_a_form_of_gpt_oss_is_that_of_its_last_message(start: Start, name: str, has_tools: bool) -> None:
    route, call = ROUTES[name], harmony_call("add", '{"a": 1}')
    server = start(CHANNEL + FINAL + ANSWER, template=HARMONY)
    body = route.body()
    if not has_tools:
        del body["tools"]
    answer = send(server, route, body)
    form = server.engine.turns[-1].spec.params.structured
    for before in ("", CHANNEL):
        assert is_taken(server, form, before + FINAL + ANSWER)
        assert is_taken(server, form, before + call) == has_tools
        for text in (FINAL + WRONG, FINAL + "Hello.", ANSWER, "<|channel|>commentary<|message|>"):
            assert not is_taken(server, form, before + text), text
    texts, calls = parts_of(route, answer)
    assert texts.endswith(ANSWER) and not calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("template", "before"), [(QWEN_XML, ""), (HARMONY, CHANNEL + FINAL)])
@pytest.mark.parametrize("name", ROUTES)
def test_a_reply_that_has_a_form_may_spell_a_call(start, name, template, before, stream):
    route, call = ROUTES[name], "<tool_call><function=add></function></tool_call>"
    note = call if template == QWEN_XML else "<|end|><|channel|>analysis<|message|>No."
    text = f'{{"mood": "bad", "note": "{note}"}}'
    server = start(before + text, before + text, call, template=template)
    answer = send(server, route, route.body() | {"stream": stream})
    if stream:
        written = json.dumps(events_of(answer) if name == "chat" else answer)
        assert not re.search(r'"tool_calls": |function_call|tool_use', written)
    else:
        texts, calls = parts_of(route, answer)
        assert texts.endswith(text) and not calls
    assert server.engine.turns[-1].spec.template_input.reply.has_form
    body = route.body(form=False)
    send(server, route, body)
    assert not server.engine.turns[-1].spec.template_input.reply.has_form
    if template == QWEN_XML:
        _, calls = parts_of(route, send(server, route, route.body()))
        assert calls == ["add"]


@pytest.mark.parametrize("name", ["chat"])
def test_a_stream_of_calls_beside_a_form(start: Start, name: str) -> None:
    route = ROUTES[name]
    server = start(hermes_call("look_up", '{"a": 1}'), ANSWER)
    for has_call in (True, False):
        deltas = [
            chunk["choices"][0]["delta"]
            for chunk in events_of(send(server, route, route.body() | {"stream": True}))
        ]
        content = "".join(delta.get("content") or "" for delta in deltas)
        assert content == ("" if has_call else ANSWER)
        assert any("tool_calls" in delta for delta in deltas) == has_call


@pytest.mark.parametrize(
    ("route", "at"), [("chat", "tool_choice.allowed_tools"), ("responses", "tool_choice")]
)
def test_errors_of_allowed_tools_have_the_path_of_their_route(start, route, at):
    server, way = start(), ROUTES[route]
    body = way.body(form=False)
    status, answer = ask(server.harness, "POST", way.path, body | way.allowed("auto", "away"))
    assert status == 400 and answer["error"]["param"] == f"{at}.tools"
    assert answer["error"]["message"].startswith(f"{at}.tools is 'away'")
    status, answer = ask(server.harness, "POST", way.path, body | way.allowed("maybe", "add"))
    assert status == 400 and answer["error"]["param"] == at
    assert answer["error"]["message"].startswith(f"{at} must have")


def error_at(route: Route, answer: Any) -> tuple[str, str]:
    """Return the field of an error, and its message."""
    error = answer["error"]
    return (error["details"]["param"] if route.name == "claude" else error["param"]), error["message"]


def raising(server: ScriptedServer, error: InvalidRequestError) -> None:
    """Let the engine refuse the next turn as it does when it compiles its grammar."""
    server.harness.engine.refuse.append(error)


SCHEMAS = {
    "chat": lambda route, body, index: body["tools"][index]["function"].update(parameters=UNHELD),
    "responses": lambda route, body, index: body["tools"][index].update(parameters=UNHELD),
    "claude": lambda route, body, index: body["tools"][index].update(input_schema=UNHELD),
}
UNHELD = {"type": "object", "properties": {"a": {"not": {}}}}
REFUSED = UnsupportedGrammarError(
    "structured.frame", 'start: call ("\n" call)*\nobject_0: %json {}', "within (not at 2(11))"
)
PATHS = {
    "chat": "tools[1].function.parameters",
    "responses": "tools[1].parameters",
    "claude": "tools[1].input_schema",
}


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("kind", ["required", "strict"])
def test_an_error_of_a_schema_names_its_tool(start, name, kind):
    server, route = start(), ROUTES[name]
    raising(server, REFUSED)
    body = route.body(strict=kind == "strict", form=kind == "strict")
    body |= route.choice("required") if kind == "required" else {}
    SCHEMAS[name](route, body, 1)
    status, answer = ask(server.harness, "POST", route.path, body)
    at, message = error_at(route, answer)
    assert status == 400 and at == PATHS[name]
    assert message.startswith(f"{PATHS[name]} is") and '["not"]' in message
    assert "start:" not in message and "2(11)" not in message


@pytest.mark.parametrize("name", ROUTES)
def test_an_error_of_all_schemas_together_shows_no_grammar(start, name):
    server, route = start(), ROUTES[name]
    raising(server, REFUSED)
    status, answer = ask(server.harness, "POST", route.path, route.body() | route.choice("required"))
    at, message = error_at(route, answer)
    assert status == 400 and at == "tools" and message.startswith("tools is '2 tools'")


def test_schemas_that_do_not_count_are_not_named(start):
    """Under auto, only strict tools have their schemas in the grammar; with a choice, only its tools."""
    server, route = start(), ROUTES["chat"]
    raising(server, REFUSED)
    body = route.body(strict=True, form=False)
    body["tools"][0]["function"].update(parameters=UNHELD, strict=False)
    body["tools"][1]["function"].update(parameters=UNHELD)
    _, answer = ask(server.harness, "POST", route.path, body)
    assert error_at(route, answer)[0] == PATHS["chat"]
    raising(server, REFUSED)
    _, answer = ask(server.harness, "POST", route.path, body | route.choice("named"))
    assert error_at(route, answer)[0] == PATHS["chat"]


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("kind", ["required", "none"])
def test_an_error_names_a_field_that_was_sent(start, name, kind):
    """Where calls are demanded, the form of the text has no effect; without calls, the tools have none."""
    server, route = start(), ROUTES[name]
    error = UnsupportedGrammarError("structured", "grammar", "None for a model without an end")
    raising(server, error)
    body = route.body(form=True) | route.choice(kind)
    _, answer = ask(server.harness, "POST", route.path, body)
    at, message = error_at(route, answer)
    own = {
        "chat": "response_format.json_schema.schema",
        "responses": "text.format.schema",
        "claude": "output_config.format.schema",
    }[name]
    assert at == ("tools" if kind == "required" else own) and message.startswith(f"{at} is")
    if kind == "required":
        raising(server, error)
        _, answer = ask(server.harness, "POST", route.path, route.body(form=False) | route.choice(kind))
        assert error_at(route, answer)[0] == "tools"


@pytest.mark.parametrize("name", ROUTES)
def test_tools_whose_grammar_is_too_large_are_refused_with_its_size(start, monkeypatch, name):
    monkeypatch.setattr(reply_forms, "MAX_GRAMMAR_BYTES", 300)
    server, route = start(), ROUTES[name]
    status, answer = ask(server.harness, "POST", route.path, route.body() | route.choice("required"))
    at, message = error_at(route, answer)
    assert status == 400 and at == "tools"
    found = re.fullmatch(r"tools is 'a grammar of (\d+) bytes', but must be at most 300 bytes; .*", message)
    assert found is not None and int(found[1]) > 300 and "fewer tools" in message
