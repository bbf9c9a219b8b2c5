"""Structured output of the Responses API: `text.format`, its echo, and what is refused."""

from __future__ import annotations

import pydantic
import pytest

from pensieve_jax.core.structured import StructuredOutput
from tests.server.fakes import MODEL, say
from tests.server.live import LiveServer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ASKED = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
RESPONSE = {"model": MODEL, "input": "Hello"}


@pytest.fixture
def server(tmp_path):
    with LiveServer(tmp_path / "history.sqlite", say("{}")) as running:
        yield running


@pytest.mark.parametrize(
    ("text_format", "form"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput.json_object()),
        (ASKED, StructuredOutput.json_schema(SCHEMA)),
    ],
)
def test_the_form_that_a_response_asks_for(server, post, text_format, form):
    status, body, _ = post("/responses", RESPONSE | {"text": {"format": text_format}})
    assert status == 200
    assert server.engine.turns[-1].spec.params.structured == form
    assert body["text"] == {"format": text_format or {"type": "text"}}
    _, stored, _ = post(f"/responses/{body['id']}", None, "GET")
    assert stored["text"] == body["text"]


def test_a_schema_that_need_not_be_strict_becomes_any_object(server, post):
    loose = ASKED | {"schema": {"type": "object", "not": {}}, "strict": False}
    status, _, headers = post("/responses", RESPONSE | {"text": {"format": loose}})
    assert status == 200 and headers["x-ignored-fields"] == "text.format.schema"
    assert server.engine.turns[-1].spec.params.structured == StructuredOutput.json_object()


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"text": {"format": ASKED | {"schema": {"type": "o"}}}}, "invalid_value", "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "invalid_value", "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "missing_required_parameter",
            "text.format.schema",
        ),
        (
            {"text": {"format": {"type": "json_object", "schema": SCHEMA}}},
            "invalid_value",
            "text.format.type",
        ),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"guided_regex": "a"}, "unsupported_parameter", "guided_regex"),
    ],
)
def test_a_refused_form_names_its_field(server, post, fields, code, param):
    status, answer, _ = post("/responses", RESPONSE | fields)
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param)
    assert not server.engine.turns


class Review(pydantic.BaseModel):
    mood: str
    stars: int


@pytest.fixture
def reviewer(tmp_path):
    with LiveServer(tmp_path / "reviews.sqlite", say('{"mood": "good", "stars": 5}')) as running:
        yield running


def test_the_openai_client_parses_replies(reviewer):
    """The client sends its model's schema, and reads the reply with it."""
    with reviewer.client() as client:
        chat = client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], response_format=Review
        )
        assert chat.choices[0].message.parsed == Review(mood="good", stars=5)
        response = client.responses.parse(model=MODEL, input="Hello", text_format=Review)
        assert response.output_parsed == Review(mood="good", stars=5)
    forms = [turn.spec.params.structured for turn in reviewer.engine.turns]
    assert forms[0] == forms[1] and '"additionalProperties":false' in forms[0].text
