"""Structured output over HTTP: which field asks for which form, what is refused, and what has no effect."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from pensieve_jax.core.errors import GrammarFailedError, GrammarQueueFullError, GrammarTooComplexError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.server.app import ROUTES
from pensieve_jax.server.turns import structured
from pensieve_jax.text import grammar
from tests.server.fakes import MODEL, FakeEngine, Harness, ask

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION = {"model": MODEL, "prompt": "Hello"}
_CHAT, _PLAIN = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
UNSUPPORTED = {"type": "object", "not": {}}
BROKEN = {"type": "objec"}


def json_schema(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def asked_on(path, body, **fields):
    """Send a request, and return the form that the engine got, and the response's headers."""
    harness = Harness(ROUTES)

    async def answer():
        return await harness.open("POST", path, body | fields).whole()

    status, headers, raw = asyncio.run(answer())
    assert status == 200, raw
    return harness.engine.turns[0].spec.params.structured, headers


FORMS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput.json_object()),
    ({"response_format": json_schema(SCHEMA, strict=True)}, StructuredOutput.json_schema(SCHEMA)),
    ({"response_format": json_schema(SCHEMA)}, StructuredOutput.json_schema(SCHEMA)),
    ({"response_format": json_schema(SCHEMA, strict=False)}, StructuredOutput.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput.json_schema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructuredOutput.json_schema(json.dumps(SCHEMA))),
    ({"structured_outputs": {"json_object": True}}, StructuredOutput.json_object()),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutput.regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutput.grammar('start: "a"')),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"regex": None, "choice": None, "json_object": False}}, None),
    ({"guided_json": SCHEMA}, StructuredOutput.json_schema(SCHEMA)),
    ({"guided_json": {}}, StructuredOutput.json_schema({})),
    ({"guided_json_object": True}, StructuredOutput.json_object()),
    ({"guided_regex": "a+"}, StructuredOutput.regex("a+")),
    ({"guided_choice": ["a"]}, StructuredOutput.choice(["a"])),
    ({"guided_grammar": 'root ::= "a"'}, StructuredOutput.grammar('root ::= "a"')),
    ({"guided_regex": None, "guided_json_object": False}, None),
]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
@pytest.mark.parametrize(("fields", "form"), FORMS)
def test_the_form_that_a_field_asks_for(path, body, fields, form):
    found, headers = asked_on(path, body, **fields)
    assert found == form and "x-ignored-fields" not in headers


def test_every_choice_has_the_form():
    harness = Harness(ROUTES)
    status, _ = ask(harness, "POST", "/v1/chat/completions", CHAT | {"n": 3, "guided_regex": "a+", "seed": 4})
    params = [turn.spec.params for turn in harness.engine.turns]
    assert status == 200 and [one.seed for one in params] == [4, 5, 6]
    assert {one.structured for one in params} == {StructuredOutput.regex("a+")}


def test_a_schema_that_need_not_be_strict_becomes_any_object():
    found, headers = asked_on(
        "/v1/chat/completions", CHAT, response_format=json_schema(UNSUPPORTED, strict=False)
    )
    assert found == StructuredOutput.json_object()
    assert headers["x-ignored-fields"] == "response_format.json_schema.schema"


REFUSED = [
    (_CHAT, {"response_format": json_schema(BROKEN)}, "invalid_value", "{schema}"),
    (
        _CHAT,
        {"response_format": json_schema(BROKEN, strict=False)},
        "invalid_value",
        "{schema}",
    ),
    (
        _CHAT,
        {"response_format": json_schema(UNSUPPORTED)},
        "unsupported_parameter",
        "{schema}",
    ),
    (_CHAT, {"response_format": json_schema("x")}, "invalid_value", "{schema}"),
    (
        _CHAT,
        {"response_format": {"type": "json_schema"}},
        "missing_required_parameter",
        "response_format.json_schema",
    ),
    (_CHAT, {"response_format": json_schema(None)}, "missing_required_parameter", "{schema}"),
    (
        _PLAIN,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "missing_required_parameter",
        "{schema}",
    ),
    (
        _CHAT,
        {"response_format": json_schema(SCHEMA) | {"type": "json_object"}},
        "invalid_value",
        "response_format.type",
    ),
    (_CHAT, {"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    (
        _CHAT,
        {"structured_outputs": {"structural_tag": "x"}},
        "unsupported_parameter",
        "structured_outputs.structural_tag",
    ),
    (
        _CHAT,
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
        "unsupported_parameter",
        "structured_outputs.whitespace_pattern",
    ),
    (
        _CHAT,
        {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
        "invalid_value",
        "structured_outputs.regex",
    ),
    (
        _CHAT,
        {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
        "invalid_value",
        "guided_choice",
    ),
    (_PLAIN, {"guided_regex": "((("}, "invalid_value", "guided_regex"),
    (_PLAIN, {"guided_json": "{"}, "invalid_value", "guided_json"),
    (_PLAIN, {"guided_choice": ["a", ""]}, "invalid_value", "guided_choice"),
    (_PLAIN, {"guided_choice": []}, "invalid_value", "guided_choice"),
    (_PLAIN, {"guided_regex": ""}, "invalid_value", "guided_regex"),
    (_PLAIN, {"structured_outputs": {"grammar": ""}}, "invalid_value", "structured_outputs.grammar"),
    (_PLAIN, {"structured_outputs": {"json": ""}}, "invalid_value", "structured_outputs.json"),
    (_PLAIN, {"guided_choice": [5]}, "invalid_value", "guided_choice[0]"),
    (_PLAIN, {"guided_grammar": "start: foo"}, "invalid_value", "guided_grammar"),
    (_PLAIN, {"guided_regex": "a" * 70_000}, "invalid_value", "guided_regex"),
    (_PLAIN, {"guided_regex": "a", "ignore_eos": True}, "invalid_value", "ignore_eos"),
]


@pytest.mark.parametrize(("path", "fields", "code", "param"), REFUSED)
def test_a_refused_form_names_its_field_before_anything_runs(path, fields, code, param):
    body = CHAT if "chat" in path else COMPLETION
    harness = Harness(ROUTES)
    status, answer = ask(harness, "POST", path, body | fields)
    param = param.format(schema="response_format.json_schema.schema")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param)
    assert "structured." not in answer["error"]["message"] and len(answer["error"]["message"]) < 700
    assert not harness.engine.turns


def test_without_the_library_a_form_is_refused(monkeypatch):
    monkeypatch.setattr(grammar, "_HAS_LIBRARY", False)
    structured._check.cache_clear()
    for fields in ({"guided_regex": "b+"}, {"response_format": json_schema({"const": 7}, strict=False)}):
        status, answer = ask(Harness(ROUTES), "POST", "/v1/completions", COMPLETION | fields)
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (
            GrammarTooComplexError("structured.regex", "a+", "simpler (too many states)"),
            400,
            "grammar_too_complex",
            "guided_regex",
        ),
        (
            GrammarFailedError("the grammar failed after 3 tokens of the reply: x"),
            500,
            "grammar_failed",
            None,
        ),
        (GrammarQueueFullError(16), 503, "overloaded", None),
    ],
)
def test_errors_of_the_engine_name_the_clients_field(error, status, code, param):
    harness = Harness(ROUTES, FakeEngine())
    harness.engine.refuse.append(error)
    found, answer = ask(harness, "POST", "/v1/completions", COMPLETION | {"guided_regex": "a+"})
    assert (found, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)


def test_a_checked_form_is_not_checked_again(monkeypatch):
    structured._check.cache_clear()
    harness = Harness(ROUTES)
    for _ in range(3):
        ask(harness, "POST", "/v1/completions", COMPLETION | {"guided_regex": "c+"})
    assert structured._check.cache_info().misses == 1
    assert dataclasses.asdict(harness.engine.turns[2].spec.params.structured)["text"] == "c+"
