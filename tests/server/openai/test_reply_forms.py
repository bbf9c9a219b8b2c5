"""Over HTTP, forms begin behind reasoning and go on behind a prefill, for schemas and for calls of tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.structured import StructuredOutput
from tests.server.fakes import ask
from tests.server.scripted import ScriptedServer, started_servers
from tests.text.test_reply_forms import takes
from tests.text.tool_templates import HERMES, QWEN3

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
THOUGHT, ANSWER = "<think>\nIs it so?\n</think>\n\n", '{"a": 1}'
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"name": "look_up", "parameters": SCHEMA}
CHAT_TOOL, RESPONSES_TOOL = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
CLAUDE_TOOL = {"name": "look_up", "input_schema": SCHEMA}
NAMED = {"type": "function", "function": {"name": "look_up"}}
OPENS = QWEN3 + "{%- if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
JSON_SCHEMA = {"name": "x", "schema": SCHEMA}
USER = {"role": "user", "content": "so?"}
CHAT = ("/v1/chat/completions", {"messages": [USER]})
RESPONSES = ("/v1/responses", {"input": "so?"})
CLAUDE = ("/v1/messages", {"model": "fake", "max_tokens": 200, "messages": [USER]})
STRICT = {**CHAT_TOOL, "function": {**FUNCTION, "strict": True}}
ASKED = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}}, ANSWER),
    (CHAT, {"guided_regex": r"\{.*\}"}, ANSWER),
    (CHAT, {"tools": [CHAT_TOOL], "tool_choice": "required"}, CALL),
    (CHAT, {"tools": [CHAT_TOOL], "tool_choice": NAMED}, CALL),
    (CHAT, {"tools": [STRICT]}, "I look.\n" + CALL),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, ANSWER),
    (RESPONSES, {"tools": [RESPONSES_TOOL], "tool_choice": "required"}, CALL),
    (CLAUDE, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, ANSWER),
    (CLAUDE, {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}}, CALL),
]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Any]:
    yield from started_servers(tmp_path, QWEN3)


def form_of(server: ScriptedServer, asked: tuple[str, dict[str, Any]], fields: dict[str, Any]) -> Any:
    path, body = asked
    status, answer = ask(server.harness, "POST", path, body | fields)
    assert status == 200, answer
    return server.harness.engine.turns[-1].spec.params.structured


def is_taken(server: ScriptedServer, form: StructuredOutput, text: str) -> bool:
    return takes(server.harness.services.tokenizer, form, text)


@pytest.mark.parametrize(("asked", "fields", "reply"), ASKED)
def test_a_reply_may_think_first_or_answer_at_once(servers, asked, fields, reply):
    server = servers(reply)
    form = form_of(server, asked, fields)
    assert is_taken(server, form, reply) and is_taken(server, form, THOUGHT + reply)
    broken = reply.replace('"a"', '"b"') if "regex" not in str(fields) else "Yes."
    assert not is_taken(server, form, broken) and not is_taken(server, form, THOUGHT + broken)


@pytest.mark.parametrize(("asked", "fields", "reply"), ASKED)
def test_a_prompt_that_opens_reasoning_demands_its_end(servers, asked, fields, reply):
    server = servers("Hm.\n</think>\n" + reply, template=OPENS)
    form = form_of(server, asked, fields)
    assert is_taken(server, form, "Hm.\n</think>\n" + reply)
    assert not is_taken(server, form, reply) and not is_taken(server, form, "Hm.</think>\nYes <tool_call>")


@pytest.mark.parametrize(("asked", "fields", "reply"), ASKED[:5])
def test_a_model_that_is_told_not_to_think_answers_at_once(servers, asked, fields, reply):
    server = servers(reply)
    form = form_of(server, asked, fields | {"chat_template_kwargs": {"enable_thinking": False}})
    assert is_taken(server, form, reply) and form.after == ""


@pytest.mark.parametrize("template", [HERMES, QWEN3])
@pytest.mark.parametrize("route", ["openai", "anthropic"])
def test_a_form_goes_on_behind_a_prefill(servers, template, route):
    server = servers(": 1}", template=template)
    messages = {"messages": [USER, {"role": "assistant", "content": '{"a"'}]}
    asked, fields, _ = ASKED[0] if route == "openai" else ASKED[-2]
    own = {"continue_final_message": True} if route == "openai" else {}
    form = form_of(server, asked, fields | messages | own)
    assert form.prefill == '{"a"'
    assert is_taken(server, form, ": 1}") and not is_taken(server, form, ANSWER)


@pytest.mark.parametrize("route", ["openai", "anthropic"])
def test_a_prefill_that_breaks_the_form_is_named(servers, route):
    server = servers()
    server.harness.engine.refuse.append(
        InvalidRequestError(
            "structured.prefill", "Sure: ", "the beginning of a text that has the reply's form"
        )
    )
    (path, body), fields, _ = ASKED[0] if route == "openai" else ASKED[-2]
    own = {"continue_final_message": True} if route == "openai" else {}
    messages = [USER, {"role": "assistant", "content": "Sure: "}]
    status, answer = ask(server.harness, "POST", path, body | fields | own | {"messages": messages})
    assert status == 400 and "messages[1].content is 'Sure: '" in answer["error"]["message"]
