"""No reply and no schema makes the parser raise, and what it passes on is valid text."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from pensieve_jax.text.call_arguments import canonical_arguments, parse_arguments
from pensieve_jax.text.reply_events import ParsedReply, parsed_reply
from pensieve_jax.text.reply_parser import ReplyParser
from pensieve_jax.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from tests.seeds import new_seed
from tests.text.tool_replies import EXAMPLES

PIECES = (
    *(" ", "\n", "x", '"', "{", "}", "[", "]", ",", ";", ":", "\\", "(", ")", "=", "1", "'", "null", "NaN"),
    *("arguments", '"name": "f"', '{"name": "f", "arguments": {"a": "b"}}', "f(a=1)", "true", "1e999"),
    *(
        "\\ud83d",
        "\\/",
        "\\d",
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "functions.f:0",
    ),
    *("analysis", "commentary to=functions.f ", "final", "function", "f", "f(", "[" * 300, "9" * 5000),
)


def read(name: str, pieces: list[str], schemas: Any, reasoning: str | None = None) -> ParsedReply:
    marks = None if reasoning is None else REASONING_FORMATS[reasoning]
    parser = ReplyParser(TOOL_FORMATS[name], marks, schemas=schemas)
    return parsed_reply([*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.end()])


def xml(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


def argument(value: str, schema: Any, **parameters: Any) -> Any:
    schemas = {"f": {"type": "object", "properties": {"a": schema}, **parameters}}
    return json.loads(read("qwen3_xml", [xml(value)], schemas).calls[0].arguments)["a"]


def any_schema(draw: random.Random, depth: int = 0) -> Any:
    """Return a schema that may be malformed anywhere."""
    kind = draw.randrange(9 if depth < 4 else 5)
    if kind < 5:
        return draw.choice(
            ("string", "integer", "array", "boolean", None, 5, 1.5, "#/$defs/P", "#", "f", "a")
        )
    if kind == 5:
        return [any_schema(draw, depth + 1) for _ in range(draw.randrange(3))]
    words = ("type", "properties", "anyOf", "allOf", "oneOf", "enum", "const", "$ref", "$defs", "P", "a")
    return {draw.choice(words): any_schema(draw, depth + 1) for _ in range(draw.randrange(4))}


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_no_text_and_no_schema_breaks_the_parser(name: str) -> None:
    draw = random.Random(new_seed())
    pieces = (*PIECES, *TOOL_FORMATS[name].marks * 3)
    examples = [one.text for one in EXAMPLES if one.format == name]
    for _ in range(300):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 14)))
        text = draw.choice(("", xml(draw.choice(PIECES)), *examples)) + text
        properties = draw.choice((any_schema(draw), {"a": any_schema(draw)}))
        parameters = draw.choice((any_schema(draw), {"properties": properties, "$defs": any_schema(draw)}))
        schemas = draw.choice((None, {"f": parameters}))
        reasoning = draw.choice((None, *REASONING_FORMATS))
        whole = read(name, [text], schemas, reasoning)
        places = sorted(draw.sample(range(len(text) + 1), min(3, len(text))))
        parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        assert read(name, parts, schemas, reasoning) == whole, (text, schemas, reasoning, places)
        for call in whole.calls:
            (call.name + call.arguments + call.header).encode()


@pytest.mark.parametrize(
    "schema",
    [{"type": [{"x": 1}]}, {"anyOf": [{"type": {"a": 1}}]}, {"type": [["a"]]}, {"enum": [[1], {}]}, 5, [5]],
)
def test_a_malformed_schema_is_like_none(schema: Any) -> None:
    assert argument("x", schema) == "x"


def test_a_schema_that_refers_to_itself_ends() -> None:
    assert argument("3", {"$ref": "#/properties/a"}) == "3"
    assert argument("x", {"$ref": "#"}) == "x"


def test_a_deep_argument_is_text() -> None:
    deep = "[" * 50_000 + "]" * 50_000
    assert argument(deep, {"type": "array"}) == deep
    assert read("hermes", [f'<tool_call>{{"name": {deep}, "arguments": {{}}}}</tool_call>'], None)
    assert argument("[[1]]", {"type": "array"}) == [[1]]


@pytest.mark.parametrize(
    ("schema", "more"),
    [
        ({"$ref": "#/$defs/P"}, {"$defs": {"P": {"type": "object"}}}),
        ({"allOf": [{"$ref": "#/definitions/P~1Q"}]}, {"definitions": {"P/Q": {"type": "object"}}}),
        (
            {"anyOf": [{"$ref": "#/$defs/L/0"}]},
            {"$defs": {"L": [{"$ref": "#/$defs/M"}], "M": {"type": "object"}}},
        ),
        ({"const": {"x": 1}}, {}),
    ],
)
def test_types_behind_references_count(schema: Any, more: dict[str, Any]) -> None:
    assert argument('{"x": 1}', schema, **more) == {"x": 1}


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "[NaN]"])
def test_a_number_that_json_lacks_is_text(value: str) -> None:
    assert argument(value, {"type": ["number", "array"]}) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "a\\ud83d", "arguments": "{\\"x\\": \\"\\ud83d\\"}"}</tool_call>'),
        ("mistral_v3", '[TOOL_CALLS][{"name": "a\\ud83d", "arguments": "\\ud83d"}]'),
        ("qwen3_xml", xml('"\\ud83d"')),
        ("pythonic", '[f(a="\\ud83d")]'),
    ],
)
def test_a_lone_surrogate_is_replaced(name: str, text: str) -> None:
    schemas = {"f": {"properties": {"a": {"enum": ["x", 1]}}}} if name in ("qwen3_xml", "pythonic") else None
    (call,) = read(name, [text], schemas).calls
    (call.name + call.arguments).encode()
    assert "\ufffd" in call.name + call.arguments or '"\\ud83d' in call.arguments


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r"\ud83d\ude00", "\U0001f600"),
        (r"a\/b", "a/b"),
        (r"\d+", r"\d+"),
        (r"\\d\n", "\\d\n"),
        (r"\777", r"\777"),
        (r"\101\"", 'A"'),
    ],
)
def test_escapes_of_json_and_of_regular_expressions_are_read_in_python_calls(
    written: str, value: str
) -> None:
    (call,) = read("pythonic", [f'[f(a="{written}")]'], None).calls
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize("arguments", ['a=1, **{"x": 1}', '**{"x": 1}', 'a={"y": 2, **{"x": 1}}'])
def test_unpacked_arguments_are_no_call_in_python(arguments: str) -> None:
    """Their names are not known, and a call must not lose arguments."""
    text = f"[f({arguments})]"
    found = read("pythonic", [text], None)
    assert not found.calls and found.content == text


def test_a_call_of_harmony_without_arguments_is_an_empty_object() -> None:
    header = "<|channel|>commentary to=functions.f<|message|>"
    for text in (header, header + " ", header + "<|call|>"):
        assert [call.arguments for call in read("harmony", [text], None).calls] == ["{}"]


def test_arguments_with_half_a_character_can_be_rendered_again() -> None:
    assert parse_arguments('{"a": "\\ud83d", "b": "\\ud83d\\ude00"}') == {"a": "\ufffd", "b": "\U0001f600"}


def test_deep_arguments_have_a_canonical_form() -> None:
    for depth in (10, 120, 900, 1200, 5000):
        text = '{"a":' + "[" * depth + "]" * depth + "}"
        assert canonical_arguments(text) == text
    code = {"a": '["' + "[" * 5000 + "\\"}
    assert parse_arguments(json.dumps(code)) == code  # brackets in strings are text
