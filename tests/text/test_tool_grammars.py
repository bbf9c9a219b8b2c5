"""Grammars of calls take what each format writes, and nothing else; a parser reads what they take."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import llguidance
import llguidance.numpy as llguidance_numpy
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pensieve_jax.core.errors import InvalidRequestError, UnsupportedGrammarError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.text import ChatFormat, Tokenizer
from pensieve_jax.text.grammar import Grammars
from pensieve_jax.text.reply_events import parsed_reply
from pensieve_jax.text.reply_parser import ReplyParser
from pensieve_jax.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS, Parsers, ToolFormat
from pensieve_jax.text.tool_grammars import call_grammar
from pensieve_jax.text.tools import Tool, check_tools
from tests.seeds import new_seed
from tests.text.tokenizer_zoo import byte_level_backend

EOS = "<|eos|>"
THINK = REASONING_FORMATS["think"]
TOOLS = check_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "days": {"type": "integer"},
                        "unit": {"enum": ["C", "F"]},
                    },
                    "required": ["city"],
                    "additionalProperties": False,
                },
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
)
CALLS = [("get_weather", {"city": "Bern", "days": 2}), ("now", {})]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Bern", "days": 2}}; '
    '{"name": "now", "parameters": {}}',
    "pythonic": '[get_weather(city="Bern", days=2), now()]',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "mistral_v3": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bern", "days": 2}}, '
    '{"name": "now", "arguments": {}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Bern", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Bern", '
    '"days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Bern", "days": 2}<|tool_call_end|><|tool_call_begin|>'
    "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern", "days": 2}',
}


def tokenizer_of(row: ToolFormat, *, has_control: bool) -> tuple[Tokenizer, llguidance.LLTokenizer]:
    """Return a tokenizer that has the marks of a row as control tokens or as text, for both libraries."""
    specials = ["<s>", "</s>", EOS]
    if has_control:
        specials += [mark for mark in row.marks if mark not in ("{", ">", "```", "```json")]
    backend: Backend = byte_level_backend(tuple(specials))
    tokenizer = Tokenizer(backend, eos_token=EOS)
    return tokenizer, llguidance.LLTokenizer(backend.to_str(), eos_token=backend.token_to_id(EOS))


def takes(tokenizer: Tokenizer, library: llguidance.LLTokenizer, grammar: str, text: str) -> bool:
    """Return whether a reply with this text may end."""
    matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_bos=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def controls(name: str) -> list[bool]:
    """Return the kinds of tokenizers for a format; harmony's marks are control tokens in all models."""
    return [True] if name == "harmony" else [True, False]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_grammar_takes_calls_and_nothing_else(name: str) -> None:
    row, text = TOOL_FORMATS[name], WRITTEN[name]
    for has_control in controls(name):
        tokenizer, library = tokenizer_of(row, has_control=has_control)
        written = text
        if name == "mistral" and not has_control:
            written = text.replace("[ARGS]", "")
        grammar = call_grammar(row, TOOLS, tokenizer)
        assert takes(tokenizer, library, grammar, written)
        for wrong in ("", "Hello.", written.replace("city", "town"), written.replace("get_weather", "other")):
            assert not takes(tokenizer, library, grammar, wrong)
        one = call_grammar(row, TOOLS, tokenizer, has_one_call=True)
        assert takes(tokenizer, library, one, written) == (name == "harmony")


NESTED = check_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "place": {"$ref": "#/$defs/Place"}},
                    "required": ["place"],
                    "$defs": {
                        "Place": {"type": "object", "properties": {"x": {"$ref": "#/$defs/Number"}}},
                        "Number": {"type": "integer"},
                    },
                },
            },
        }
    ]
)


_NESTED_JSON = '{"city": "Bern", "place": {"x": 2}}'
WRITTEN_NESTED = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": ' + _NESTED_JSON + "}\n</tool_call>",
    "qwen3_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
    '<parameter=place>\n{"x": 2}\n</parameter>\n</function>\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "parameters": ' + _NESTED_JSON + "}",
    "pythonic": '[get_weather(city="Bern", place={"x": 2})]',
    "mistral": "[TOOL_CALLS]get_weather" + _NESTED_JSON,
    "mistral_v3": '[TOOL_CALLS] [{"name": "get_weather", "arguments": ' + _NESTED_JSON + "}]",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    + _NESTED_JSON
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    + _NESTED_JSON
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    "<|tool_call_argument_begin|>" + _NESTED_JSON + "<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + _NESTED_JSON,
}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_may_be_nested_models(name: str) -> None:
    """Such as pydantic writes them, with references to definitions at the root of the schema."""
    row = TOOL_FORMATS[name]
    tokenizer, library = tokenizer_of(row, has_control=name == "harmony")
    grammar = call_grammar(row, NESTED, tokenizer, has_one_call=True)
    wanted = {"city": "Bern", "place": {"x": 2}}
    text = WRITTEN_NESTED[name]
    assert takes(tokenizer, library, grammar, text)
    for wrong in ('"x": "2"', '"x": 2.5'):
        assert not takes(tokenizer, library, grammar, text.replace('"x": 2', wrong))
    parser = ReplyParser(row, schemas={"get_weather": NESTED[0]["function"]["parameters"]})
    (call,) = parsed_reply([*parser.feed(text), *parser.end()]).calls
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == wanted


@pytest.mark.parametrize("name", [name for name, row in TOOL_FORMATS.items() if row.start])
def test_text_may_come_first_where_calls_have_a_mark(name: str) -> None:
    row = TOOL_FORMATS[name]
    for has_control in (True, False):
        tokenizer, library = tokenizer_of(row, has_control=has_control)
        written = WRITTEN[name] if has_control else WRITTEN[name].replace("[ARGS]", "")
        grammar = call_grammar(row, TOOLS, tokenizer, has_text=True)
        for text in ("Hello.\n", written, "I look it up.\n" + written):
            assert takes(tokenizer, library, grammar, text)
        assert not takes(tokenizer, library, grammar, "I look.\n" + written.replace("city", "town"))
        if has_control:
            assert takes(tokenizer, library, grammar, "if a < b [x]\n" + written)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_walk_through_a_grammar_ends_in_calls_that_the_parser_reads(name: str) -> None:
    """Ids are drawn among those that the mask allows; endings are preferred, so that walks end."""
    draw, row = random.Random(new_seed()), TOOL_FORMATS[name]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    num_ended = 0
    for has_control in controls(name):
        tokenizer, library = tokenizer_of(row, has_control=has_control)
        grammar = llguidance.LLMatcher.grammar_from_lark(call_grammar(row, TOOLS, tokenizer))
        for _ in range(24 // len(controls(name))):  # in one format, two in five do not end
            matcher, ids = llguidance.LLMatcher(library, grammar, log_level=0), []
            while len(ids) < 400 and not matcher.is_stopped():
                mask = llguidance_numpy.allocate_token_bitmask(1, library.vocab_size)
                llguidance_numpy.fill_next_token_bitmask(matcher, mask, 0)
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                if tokenizer.eos_id in allowed:
                    break
                closing = [one for one in allowed if tokenizer.token_text(int(one)) in ('"', "}", ")", "]")]
                token_id = int(draw.choice(closing if closing and draw.random() < 0.5 else list(allowed)))
                assert matcher.consume_token(token_id)
                ids.append(token_id)
            if not matcher.is_accepting():
                continue
            num_ended += 1
            parser = ReplyParser(row, schemas=schemas)
            found = parsed_reply([*parser.feed(tokenizer.decode_raw(ids)), *parser.end()])
            assert found.calls
            for call in found.calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    assert num_ended


def test_harmony_is_read_with_its_reasoning() -> None:
    parser = ReplyParser(TOOL_FORMATS["harmony"])
    found = parsed_reply([*parser.feed(WRITTEN["harmony"]), *parser.end()])
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == CALLS[:1]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_engine_compiles_a_grammar_and_allows_what_it_takes(name: str) -> None:
    row = TOOL_FORMATS[name]
    tokenizer, _ = tokenizer_of(row, has_control=True)
    eos_id = tokenizer.eos_id
    assert eos_id is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (eos_id,))
    form = StructuredOutput.grammar(call_grammar(row, TOOLS, tokenizer))
    late_row = grammars.compile(form).row((eos_id,), 0)
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    for token_id in (*tokenizer.encode(WRITTEN[name], add_bos=False), eos_id):
        words[:] = -1
        late_row.fill(words)
        assert words.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1
        late_row.accept(token_id)


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml"])
def test_a_mark_may_be_an_added_token_that_is_not_a_control_token(name: str) -> None:
    """The tokenizers of the Qwen families have such marks; the library takes them for control tokens."""
    row = TOOL_FORMATS[name]
    backend = byte_level_backend(("<s>", "</s>", EOS))
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in (*row.marks, *THINK.marks)])
    tokenizer = Tokenizer(backend, eos_token=EOS)
    library = llguidance.LLTokenizer(backend.to_str(), eos_token=backend.token_to_id(EOS))
    assert not tokenizer.control_ids(row.marks)
    grammar = call_grammar(row, TOOLS, tokenizer)
    assert takes(tokenizer, library, grammar, WRITTEN[name])
    assert not takes(tokenizer, library, grammar, WRITTEN[name].replace("city", "town"))


def test_a_text_between_tags_has_no_closing_tag() -> None:
    """The reader ends an argument at the first one."""
    row = TOOL_FORMATS["qwen3_xml"]
    tokenizer, library = tokenizer_of(row, has_control=False)
    grammar = call_grammar(row, TOOLS, tokenizer)
    written = WRITTEN["qwen3_xml"]
    for city, is_taken in (
        ("a < b </parameter", True),
        ("a </parameter> b", False),
        ("a\n</parameter> b", False),
    ):
        text = written.replace("Bern", city)
        assert takes(tokenizer, library, grammar, text) == is_taken
        parser = ReplyParser(
            row, schemas={tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        )
        first, _ = parsed_reply([*parser.feed(text), *parser.end()]).calls
        assert (json.loads(first.arguments)["city"] == city) == is_taken


def test_an_added_token_without_brackets_is_text_to_the_library_and_to_grammars() -> None:
    """Both go by `Tokenizer.mark_id`."""
    row = TOOL_FORMATS["mistral"]
    backend = byte_level_backend(("<s>", "</s>", EOS))
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in ("[TOOL_CALLS]", "[ARGS]")])
    tokenizer = Tokenizer(backend, eos_token=EOS)
    library = llguidance.LLTokenizer(backend.to_str(), eos_token=backend.token_to_id(EOS))
    grammar = call_grammar(row, TOOLS, tokenizer, has_text=True)
    assert json.dumps(row.start) in grammar
    written = "I look." + WRITTEN["mistral"].replace("[ARGS]", "")
    assert takes(tokenizer, library, grammar, written)
    assert not takes(tokenizer, library, grammar, written.replace("city", "town"))


COLOUR = {"type": "string", "enum": ["red", "green"], "title": "Colour"}
CHOICES = [
    ({"enum": ["C", "F"]}, "F", "F"),
    ({"$ref": "#/$defs/Colour"}, "green", "green"),
    ({"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"}, "red", "red"),
    ({"anyOf": [{"const": "a"}, {"const": "ab"}]}, "ab", "ab"),
    ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None}, "null", None),
    ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]}, "red", "red"),
    ({"enum": ["1", 1, None, True, "null", {"a": [2.5]}]}, "1", 1),
    ({"enum": ["1", 1, None, True, "null", {"a": [2.5]}]}, '"1"', "1"),
    ({"enum": ["1", 1, None, True, "null", {"a": [2.5]}]}, '"null"', "null"),
    ({"enum": ["1", 1, None, True, "null", {"a": [2.5]}]}, '{"a": [2.5]}', {"a": [2.5]}),
    ({"const": 'say "x"\n'}, 'say "x"\n', 'say "x"\n'),
    ({"enum": ["a", '"a"']}, '"a"', '"a"'),
    ({"type": "string", "enum": ["a", 1]}, "a", "a"),
    ({"type": "string", "format": "date"}, '"2024-01-01"', "2024-01-01"),
    ({"type": "string", "pattern": "^[0-9]+$"}, '"12"', "12"),
    ({"type": "string", "minLength": 2}, '"ab"', "ab"),
    ({"type": "string", "maxLength": 2}, '""', '""'),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "it is", "it is"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"5"', "5"),
    ({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, '"2024-01-01"', "2024-01-01"),
    ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 1}', {"a": 1}),
]
REFUSED_TEXTS = [
    ({"enum": ["C", "F"]}, '"F"'),
    ({"anyOf": [{"const": "a"}, {"const": "ab"}]}, "abc"),
    ({"type": "string", "enum": ["a", 1]}, "1"),
    ({"type": "string", "format": "date"}, "2024-01-01"),
    ({"type": "string", "minLength": 2}, '"a"'),
    ({"type": "string", "maxLength": 2}, "abc"),
    ({"type": "string", "maxLength": 2}, "a</parameter>"),
]


def tool_with(schema: object) -> Tool:
    """Return a tool `f` with one argument that it requires."""
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"Colour": COLOUR},
    }
    return check_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])[0]


def between_tags(text: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("schema", "text", "value"), CHOICES)
def test_what_a_grammar_writes_between_tags_is_read_as_the_schema_says(
    schema: object, text: str, value: object
) -> None:
    """Strings stand as they are where their schema lists them or leaves them free, and are JSON otherwise."""
    row, tool = TOOL_FORMATS["qwen3_xml"], tool_with(schema)
    tokenizer, library = tokenizer_of(row, has_control=False)
    written = between_tags(text)
    assert takes(tokenizer, library, call_grammar(row, [tool], tokenizer), written)
    parser = ReplyParser(row, schemas={"f": tool["function"]["parameters"]})
    (call,) = parsed_reply([*parser.feed(written), *parser.end()]).calls
    found = json.loads(call.arguments)
    assert (found, type(found["a"])) == ({"a": value}, type(value))
    jsonschema.validate(found, tool["function"]["parameters"])


@pytest.mark.parametrize(("schema", "text"), REFUSED_TEXTS)
def test_a_grammar_writes_no_other_text_between_tags(schema: object, text: str) -> None:
    row = TOOL_FORMATS["qwen3_xml"]
    tokenizer, library = tokenizer_of(row, has_control=False)
    grammar = call_grammar(row, [tool_with(schema)], tokenizer)
    assert not takes(tokenizer, library, grammar, between_tags(text))


def check_that_a_is_an_integer(parameters: dict[str, Any]) -> None:
    """Check that formats which write each argument by itself write and read `a` as an integer."""
    tools = check_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    for name, written in (("qwen3_xml", between_tags("7")), ("pythonic", "[f(a=7)]")):
        tokenizer, library = tokenizer_of(TOOL_FORMATS[name], has_control=False)
        grammar = call_grammar(TOOL_FORMATS[name], tools, tokenizer)
        assert takes(tokenizer, library, grammar, written)
        assert not takes(tokenizer, library, grammar, written.replace("7", "x"))
        parser = ReplyParser(TOOL_FORMATS[name], schemas={"f": parameters})
        (call,) = parsed_reply([*parser.feed(written), *parser.end()]).calls
        assert json.loads(call.arguments) == {"a": 7}


def test_a_reference_at_the_root_says_which_arguments_there_are() -> None:
    own = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for root in (
        {"$ref": "#/$defs/A"},
        {"type": "object", "$ref": "#/$defs/A"},
        {"allOf": [{"$ref": "#/$defs/A"}]},
    ):
        check_that_a_is_an_integer({**root, "$defs": {"A": own}})


def test_required_arguments_without_a_schema_are_written() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "c": False},
        "required": ["b", "a"],
    }
    tools = check_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    row = TOOL_FORMATS["pythonic"]
    tokenizer, library = tokenizer_of(row, has_control=False)
    grammar = call_grammar(row, tools, tokenizer)
    assert takes(tokenizer, library, grammar, '[f(a=1, b={"x": [2]})]')
    for text in ("[f(a=1)]", "[f(a=1, b=2, c=3)]"):
        assert not takes(tokenizer, library, grammar, text)
    row = TOOL_FORMATS["qwen3_xml"]
    grammar = call_grammar(row, tools, tokenizer)
    written = between_tags("1").replace("</function>", "<parameter=b>\nany\n</parameter>\n</function>")
    assert takes(tokenizer, library, grammar, written)
    assert not takes(tokenizer, library, grammar, between_tags("1"))
    assert not takes(
        tokenizer,
        library,
        grammar,
        written.replace("</function>", "<parameter=c>\n1\n</parameter>\n</function>"),
    )


def test_arguments_beyond_the_properties_follow_their_own_schema() -> None:
    check_that_a_is_an_integer(
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}}
    )


_A = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("name", ["qwen3_xml", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"anyOf": [_A, {"required": ["b"]}]}, ".anyOf"),
        ({**_A, "not": {"required": ["a"]}}, ".not"),
        ({**_A, "minProperties": 1}, ".minProperties"),
        ({**_A, "maxProperties": 0}, ".maxProperties"),
        ({**_A, "patternProperties": {"a": {"minimum": 3}}}, ".patternProperties"),
        ({**_A, "required": ["b"], "additionalProperties": False}, ".required"),
        ({"properties": {"a": False}, "required": ["a"]}, ".required"),
        ({**_A, "required": [""]}, ".required"),
        ({"$ref": "#/$defs/B", "$defs": {"B": {"type": "array"}}}, ""),
        ({"$ref": "#/$defs/C"}, ".$ref"),
    ],
)
def test_a_schema_that_arguments_one_by_one_cannot_keep_is_refused(
    name: str, schema: dict[str, object], path: str
) -> None:
    function = {"name": "f", "parameters": schema}
    tools = check_tools([TOOLS[1], {"type": "function", "function": function}])
    row = TOOL_FORMATS[name]
    tokenizer, _ = tokenizer_of(row, has_control=False)
    with pytest.raises(UnsupportedGrammarError) as raised:
        call_grammar(row, tools[1:], tokenizer, shown=tools)
    assert raised.value.field == f"tools[1].function.parameters{path}" and name in raised.value.limit
    call_grammar(row, tools, tokenizer, free=["f"])


TAG = "x</parameter>y"


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object"}, {"b": [TAG, {TAG: 1}]}),
        ({"type": "array", "items": {"type": "string"}}, [f'\\"{TAG}', "\\", TAG]),
        ({"type": "string", "minLength": 2}, TAG),
        ({"anyOf": [{"type": "object"}, {"type": "string"}]}, f'"{TAG}\n'),
    ],
)
def test_a_closing_tag_in_a_string_of_json_is_text(schema: object, value: object) -> None:
    row, tool = TOOL_FORMATS["qwen3_xml"], tool_with(schema)
    tokenizer, library = tokenizer_of(row, has_control=False)
    grammar = call_grammar(row, [tool], tokenizer)
    for indent in (None, 1):
        written = between_tags(json.dumps(value, indent=indent))
        assert takes(tokenizer, library, grammar, written)
        for pieces in ([written], list(written)):
            parser = ReplyParser(row, schemas={"f": tool["function"]["parameters"]})
            events = [event for piece in pieces for event in parser.feed(piece)]
            found = parsed_reply([*events, *parser.end()])
            assert not found.content
            assert [json.loads(call.arguments) for call in found.calls] == [{"a": value}]


@pytest.mark.parametrize(
    "text",
    ['{"b": "x}', '["x]', '"', "{'b': \"it's\"", '{"b": 1', 'x "', '{"b": "x\\"}', "[1, 2]]"],
)
def test_an_argument_that_is_not_json_ends_at_its_first_closing_tag(text: str) -> None:
    """A line break within a string tells, and the format has one before the tag."""
    written = between_tags(text).replace("</function>", '<parameter=b>\n"2"\n</parameter>\n</function>')
    for pieces in ([written], list(written)):
        schemas = {"f": {"properties": {"a": {"type": "object"}}}}
        parser = ReplyParser(TOOL_FORMATS["qwen3_xml"], schemas=schemas)
        events = [event for piece in pieces for event in parser.feed(piece)]
        (call,) = parsed_reply([*events, *parser.end()]).calls
        assert json.loads(call.arguments) == {"a": text, "b": '"2"'}


def test_a_line_break_behind_a_backslash_tells_as_well() -> None:
    """JSON has no such escape."""
    text = '["C:\\'
    written = between_tags(text).replace("</parameter>\n</function>\n", "</parameter></function>")
    for pieces in ([written], list(written)):
        schemas = {"f": {"properties": {"a": {"type": "array"}}}}
        parser = ReplyParser(TOOL_FORMATS["qwen3_xml"], schemas=schemas)
        events = [event for piece in pieces for event in parser.feed(piece)]
        (call,) = parsed_reply([*events, *parser.end()]).calls
        assert json.loads(call.arguments) == {"a": text}


@pytest.mark.parametrize("value", ["b</parameter>", "</parameter>", {"b": ["</parameter>"]}, '"</parameter>'])
def test_a_listed_value_with_a_closing_tag_is_written_as_json(value: object) -> None:
    row, tool = TOOL_FORMATS["qwen3_xml"], tool_with({"enum": ["a", value]})
    tokenizer, library = tokenizer_of(row, has_control=False)
    grammar = call_grammar(row, [tool], tokenizer)
    escaped = json.dumps(value).replace("</", "<\\/")
    assert takes(tokenizer, library, grammar, between_tags("a"))
    assert takes(tokenizer, library, grammar, between_tags(escaped))
    for text in (escaped, json.dumps(value)):
        parser = ReplyParser(row, schemas={"f": tool["function"]["parameters"]})
        (call,) = parsed_reply([*parser.feed(between_tags(text)), *parser.end()]).calls
        assert json.loads(call.arguments) == {"a": value}


NAMES = (
    *("a", "a-b", "-", "1", "7up", "class", "None", "a.b", ".", "a:b", "a:1", "a:1:0", ":", "functions.f"),
    *("function", "assistant", "to", "x" * 64, "-" * 128),
)
ARGUMENTS = (
    "a",
    "from",
    "my-arg",
    "1",
    "None",
    "xs:type",
    "a.b",
    "\u00e9\ufb01",
    "@id",
    "$ref",
    "my arg",
    "a>b",
    "=",
    "",
)


def shortest(grammar: str, tokenizer: Tokenizer, library: llguidance.LLTokenizer) -> str:
    """Return a text that a grammar takes, of ids that end its parts as soon as they can."""
    matcher = llguidance.LLMatcher(library, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    while not matcher.is_accepting() and len(ids) < 2000:
        mask = llguidance_numpy.allocate_token_bitmask(1, library.vocab_size)
        llguidance_numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        texts = {int(one): tokenizer.token_text(int(one)) for one in allowed}
        marks = [one for one in texts if one in tokenizer.mark_ids]
        closing = [one for one, text in texts.items() if text in ('"', "}", ")", "]", "<", "\u010a")]
        ids.append((marks or closing or list(texts))[0])
        assert matcher.consume_token(ids[-1])
    assert matcher.is_accepting()
    return tokenizer.decode_raw(ids)


def tool_of(name: str, arguments: Iterable[str] = ()) -> Tool:
    properties = {one: {"type": "integer", "enum": [7]} for one in arguments}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_tool_of_any_name_is_called_and_read_back(name: str) -> None:
    """Names that OpenAI's API allows, and those that this server allows beside them."""
    draw, row = random.Random(new_seed()), TOOL_FORMATS[name]
    letters = "abzAZ019_-.:"
    drawn = ["".join(draw.choices(letters, k=draw.randint(1, 12))) for _ in range(15)]
    for has_control in controls(name):
        tokenizer, library = tokenizer_of(row, has_control=has_control)
        for tool_name in (*NAMES, *drawn):
            (tool,) = check_tools([tool_of(tool_name, ["a"])])
            text = shortest(call_grammar(row, [tool], tokenizer, has_one_call=True), tokenizer, library)
            parser = ReplyParser(row, schemas={tool_name: tool["function"]["parameters"]})
            (call,) = parsed_reply([*parser.feed(text), *parser.end()]).calls
            assert (call.name, json.loads(call.arguments)) == (tool_name, {"a": 7}), text


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_argument_of_any_name_is_read_back_or_refused(name: str) -> None:
    row, refused = TOOL_FORMATS[name], set()
    for has_control in controls(name):
        tokenizer, library = tokenizer_of(row, has_control=has_control)
        template = "{{ tools }}"
        backend = Backend.from_str(tokenizer.as_json())
        chat = ChatFormat(
            Tokenizer(backend, eos_token=EOS, chat_template=template), parsers=Parsers(calls=name)
        )
        for argument in ARGUMENTS:
            tools = check_tools([tool_of("now"), tool_of("f", [argument])])
            try:
                chat.with_calls(TemplateInput(tools))
            except InvalidRequestError as error:
                assert error.field == "tools[1].function.parameters.properties" and name in error.limit
                chat.with_calls(TemplateInput(tools), max_calls=0)
                refused.add(argument)
                continue
            text = shortest(call_grammar(row, tools[1:], tokenizer, has_one_call=True), tokenizer, library)
            parser = ReplyParser(row, schemas={"f": tools[1]["function"]["parameters"]})
            (call,) = parsed_reply([*parser.feed(text), *parser.end()]).calls
            assert (call.name, json.loads(call.arguments)) == ("f", {argument: 7}), text
    assert refused == {"pythonic": {"my arg", "=", ""}, "qwen3_xml": {"a>b", ""}}.get(name, set())
