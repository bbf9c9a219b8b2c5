"""A reply is divided into reasoning, content and calls, in the same way however its text is cut."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from pensieve_jax.text.reply_events import (
    ArgumentText,
    CallBegun,
    CallEnded,
    ParsedReply,
    ReplyEvent,
    parsed_reply,
)
from pensieve_jax.text.reply_parser import ReplyParser
from pensieve_jax.text.tool_formats import ENDS_OF_MESSAGE, REASONING_FORMATS, TOOL_FORMATS
from tests.seeds import new_seed
from tests.text.tool_replies import EXAMPLES, SCHEMAS, Example

THINK = REASONING_FORMATS["think"]
HERMES = TOOL_FORMATS["hermes"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3.5}}\n</tool_call>'


def parser_of(name: str, reasoning: str | None = None, **options) -> ReplyParser:
    marks = None if reasoning is None else REASONING_FORMATS[reasoning]
    return ReplyParser(TOOL_FORMATS.get(name), marks, **({"schemas": SCHEMAS} | options))


def events_of(parser: ReplyParser, pieces: list[str]) -> list[ReplyEvent]:
    return [*itertools.chain.from_iterable(map(parser.feed, pieces)), *parser.end()]


def read(name: str, text: str, reasoning: str | None = None, **options) -> ParsedReply:
    return parsed_reply(events_of(parser_of(name, reasoning, **options), [text]))


def check_order(events: list[ReplyEvent]) -> None:
    """Assert that calls begin and end in order, with their arguments between."""
    open_call, num_calls = None, 0
    for event in events:
        if isinstance(event, CallBegun):
            assert event.call == num_calls
            open_call, num_calls = event.call, num_calls + 1
        elif isinstance(event, ArgumentText):
            assert event.call == open_call
            assert event.text
        elif isinstance(event, CallEnded):
            assert event.call == open_call
            open_call = None


def cut(text: str, draw: random.Random) -> list[str]:
    most = len(text) - 1
    places = sorted(draw.sample(range(1, len(text)), min(most, draw.choice((1, 2, 5, 20, most)))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.format}: {one.text[:20]!r}")
def test_an_example_is_read(example: Example) -> None:
    reasoning = "harmony" if example.format == "harmony" else None
    found = read(example.format, example.text, reasoning)
    assert found.content == example.content
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == example.calls


@pytest.mark.parametrize("name", sorted({example.format for example in EXAMPLES}))
def test_pieces_do_not_matter(name: str) -> None:
    draw = random.Random(new_seed())
    thoughts = ("", "<think>\nHm, <tool_call>?\n\n</think>\n\n", "<think>1 < 2</thi</think>")
    for example in (one for one in EXAMPLES if one.format == name):
        for thought, options in itertools.product(thoughts, ({}, {"max_calls": 1}, {"is_open": True})):
            reasoning = "harmony" if name == "harmony" else "think" if thought or options else None
            text = example.text if name == "harmony" else thought + example.text
            whole = read(name, text, reasoning, **options)
            for _ in range(60):
                events = events_of(parser_of(name, reasoning, **options), cut(text, draw))
                check_order(events)
                assert parsed_reply(events) == whole


def test_the_planted_bug_of_an_optional_line_break_behind_a_mark_is_found(monkeypatch) -> None:
    """One that comes in the next piece is taken for content."""

    def drop_what_is_there(self: ReplyParser) -> str:
        self._buffer, self._is_after_mark = self._buffer.lstrip(), False
        return self._buffer

    monkeypatch.setattr(ReplyParser, "_drop_space", drop_what_is_there)
    with pytest.raises(AssertionError):
        test_pieces_do_not_matter("hermes")


@pytest.mark.parametrize("name", sorted({example.format for example in EXAMPLES}))
def test_a_cut_reply_is_read_alike_by_characters(name: str) -> None:
    for example in (one for one in EXAMPLES if one.format == name):
        for end in range(len(example.text)):
            text = example.text[:end]
            assert parsed_reply(events_of(parser_of(name), list(text))) == read(name, text)


@pytest.mark.parametrize("mark", ENDS_OF_MESSAGE)
def test_marks_within_json_of_gpt_oss_are_text(mark: str) -> None:
    """Arguments ended at a mark in a string, and so did an answer that has a form."""
    draw = random.Random(new_seed())
    written = json.dumps({"a": f"x{mark}y  ", f"{mark} ": [f'\\"{mark}', {"b": mark}]}, indent=1)
    final, call = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.add <|message|>"
    wanted = (
        (f"{final}{written}", written, []),
        (f"{final} {written}<|end|>", written, []),
        (f"{final}[{written}]<|end|><|start|>assistant{final}Hm.", f"[{written}]Hm.", []),
        (f"{final}{json.dumps(mark)} is a mark.", f"{json.dumps(mark)} is a mark.", []),
        (f"{final}No{mark}", "No", []),
        (f'{final}(")<|end|><|start|>assistant{call}{{}}', '(")', ["{}"]),
        (f"{call}{written}<|call|>", "", [written]),
        (f"{call}{written}", "", [written]),
        (f"{call}{written}<|end|><|start|>assistant{call} {{}}<|call|>", "", [written, "{}"]),
        (f"{call}{{1 {mark}", "", ["{1"]),
    )
    for text, content, arguments in wanted:
        found = read("harmony", text, "harmony")
        assert found.content == content
        assert [one.arguments for one in found.calls] == arguments
        for end in range(len(text)):
            whole = read("harmony", text[:end], "harmony")
            assert parsed_reply(events_of(parser_of("harmony", "harmony"), list(text[:end]))) == whole
        for _ in range(20):
            assert parsed_reply(events_of(parser_of("harmony", "harmony"), cut(text, draw))) == found


def test_all_formats_have_examples() -> None:
    assert {example.format for example in EXAMPLES} == set(TOOL_FORMATS)


# Reasoning


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nAh.\n</think>\n\nHi.", "Ah.", "Hi."),
        ("\n<think>Ah. </think>Hi. ", "Ah.", "Hi. "),
        (" Hi <think>no</think>", "", " Hi <think>no</think>"),
        ("<think>Ah", "Ah", ""),
        ("<think>", "", ""),
        ("<thin", "", "<thin"),
        ("<think>\n\n</think>\n\nHi.", "", "Hi."),
    ],
)
def test_reasoning_is_divided_from_content(text: str, reasoning: str, content: str) -> None:
    assert read("hermes", text, "think") == ParsedReply(reasoning, content, ())
    assert read("", text, "think") == ParsedReply(reasoning, content, ())


def test_the_prompt_may_open_the_reasoning() -> None:
    assert read("hermes", f"Ah.\n</think>\n{CALL}", "think", is_open=True).reasoning == "Ah."
    assert read("hermes", "Ah.", "think", is_open=True) == ParsedReply("Ah.", "", ())


def test_a_mark_within_reasoning_is_no_call() -> None:
    found = read("hermes", f"<think>{CALL}</think>{CALL}", "think")
    assert found.reasoning == CALL
    assert len(found.calls) == 1
    assert found.content == ""


def test_the_parser_tells_where_reasoning_ends() -> None:
    parser = parser_of("hermes", "think")
    assert parser.is_reasoning
    parser.feed("<think>a")
    assert parser.is_reasoning
    parser.feed("</think>")
    assert not parser.is_reasoning


def test_harmony_divides_channels() -> None:
    text = "<|channel|>analysis<|message|>Ah.<|end|><|start|>assistant<|channel|>final<|message|>Hi. "
    assert read("harmony", text, "harmony") == ParsedReply("Ah.", "Hi. ", ())
    assert read("", text, "harmony") == ParsedReply("Ah.", "Hi. ", ())
    assert read("harmony", text) == ParsedReply("", "Ah.Hi. ", ())
    assert read("harmony", "Hi.", "harmony") == ParsedReply("", "Hi.", ())


# Replies that do not keep to their format


def test_arguments_without_json_are_passed_on() -> None:
    found = read("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1,, b}}\n</tool_call> done')
    assert found.calls[0].arguments == '{"a": 1,, b}'
    assert found.content == "done"


def test_a_missing_bracket_ends_with_the_call() -> None:
    found = read("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [1}\n</tool_call> done')
    assert found.calls[0].arguments == '{"a": [1}'
    assert found.content == "done"


def test_a_call_that_length_cuts_keeps_what_it_has() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "two  '
    events = events_of(parser_of("hermes"), [text])
    assert parsed_reply(events).calls[0].arguments == '{"a": "two  '
    assert not any(isinstance(event, CallEnded) for event in events)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntw"
    assert read("qwen3_xml", text).calls[0].arguments == '{"a": "1", "b": "tw'
    assert read("pythonic", "[f(a=1), add(b='x").calls[1].arguments == "b='x"


def test_a_long_text_without_a_header_is_released() -> None:
    parser = parser_of("kimi_k2")
    text = "<|tool_calls_section_begin|><|tool_call_begin|>" + "x" * 600
    assert parsed_reply(parser.feed(text)).content == text


def test_headers_that_repeat_get_other_numbers() -> None:
    """They can be ids of calls, and a model may number all calls alike."""
    begin, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>{}<|tool_call_end|>"
    headers = ["functions.f:0", "functions.f:0", "functions.f:1", "functions.g:0", "f", "f", "functions.f:0"]
    calls = "".join(f"{begin}{header}{end}" for header in headers)
    text = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    wanted = [
        *("functions.f:0", "functions.f:1", "functions.f:2", "functions.g:0"),
        *("f", "f:5", "functions.f:6"),
    ]
    for pieces in ([text], list(text)):
        found = parsed_reply(events_of(parser_of("kimi_k2", schemas=None), pieces))
        assert [call.header for call in found.calls] == wanted


def test_only_names_of_tools_make_a_call_without_a_mark() -> None:
    text = '{"name": "x", "parameters": {}}'
    assert read("llama3_json", text).content == text
    assert len(read("llama3_json", text, schemas=None).calls) == 1


def test_calls_beyond_the_limit_are_dropped() -> None:
    assert [call.name for call in read("hermes", CALL + CALL, max_calls=1).calls] == ["add"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "2", "2"),
        ({"type": "integer"}, "2", 2),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "2", "2"),
        ({"type": "boolean"}, "True", True),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "None", None),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "object"}, "{x", "{x"),
        ({}, "2", "2"),
        ("odd", "2", "2"),
    ],
)
def test_an_argument_between_tags_has_the_type_of_its_schema(schema, text: str, value) -> None:
    schemas = {"f": {"properties": {"p": schema}}}
    reply = f"<tool_call><function=f><parameter=p>{text}</parameter></function></tool_call>"
    assert json.loads(read("qwen3_xml", reply, schemas=schemas).calls[0].arguments) == {"p": value}


PIPE = '[5" pipe]'
"""It begins like JSON, and opens a string that nothing ends."""


@pytest.mark.parametrize(
    ("behind", "arguments", "has_ended", "content"),
    [
        ("", {"p": PIPE}, False, ""),
        (" ", {"p": PIPE}, False, ""),
        ("</func", {"p": PIPE}, False, ""),
        ("</function></tool_call>", {"p": PIPE}, True, ""),
        ("</function></tool_call> done", {"p": PIPE}, True, "done"),
        ("<parameter=q>1</parameter></function></tool_call>", {"p": PIPE, "q": 1}, True, ""),
        (f"<parameter=q>{PIPE}</parameter></function></tool_call>", {"p": PIPE, "q": PIPE}, True, ""),
    ],
)
def test_an_argument_that_only_begins_like_json_ends_at_its_tag(behind, arguments, has_ended, content):
    """On one line no line break shows that it is text. The end of the reply does."""
    reply = f"<tool_call><function=f><parameter=p>{PIPE}</parameter>{behind}"
    schemas = {"f": {"properties": {"p": {"type": "array"}, "q": {"type": "integer"}}}}
    for pieces in ([reply], list(reply)):
        events = events_of(parser_of("qwen3_xml", schemas=schemas), pieces)
        check_order(events)
        found = parsed_reply(events)
        assert json.loads(found.calls[0].arguments + "}" * (not has_ended)) == arguments
        assert any(isinstance(event, CallEnded) for event in events) == has_ended
        assert (found.content or "") == content


@pytest.mark.parametrize("value", ['["a</parameter>b', '["</parameter> <b', '{"a": "</parameter>x'])
def test_json_that_length_cuts_keeps_a_tag_in_its_string(value):
    schemas = {"f": {"properties": {"p": {"type": "array"}}}}
    found = read("qwen3_xml", f"<tool_call><function=f><parameter=p>{value}", schemas=schemas)
    assert json.loads(found.calls[0].arguments + '"}') == {"p": value}


def test_a_name_or_an_argument_of_any_depth_is_text():
    deep = "[" * 100_000 + "]" * 100_000
    parser = ReplyParser(TOOL_FORMATS["hermes"])
    events = [*parser.feed('<tool_call>{"name": ' + deep + ', "arguments": {}}</tool_call>'), *parser.end()]
    assert [event.name for event in events if isinstance(event, CallBegun)] == [deep]
    schemas = {"f": {"properties": {"a": {"type": "array"}}}}
    parser = ReplyParser(TOOL_FORMATS["qwen3_xml"], schemas=schemas)
    call = f"<tool_call><function=f><parameter=a>{deep}</parameter></function></tool_call>"
    events = [*parser.feed(call), *parser.end()]
    written = "".join(event.text for event in events if isinstance(event, ArgumentText))
    assert written == '{"a": "' + deep + '"}'


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("get-weather(city='a, b=1 (c=2)')", "get-weather", {"city": "a, b=1 (c=2)"}),
        ('a:b.c(from="x", my-arg = [1, {"k": "v, w=1"}],\n class=None)', "a:b.c", {
            "from": "x", "my-arg": [1, {"k": "v, w=1"}], "class": None
        }),
        ("f(a='it\\'s, b=2', b=3)", "f", {"a": "it's, b=2", "b": 3}),
        ("f(_1=1, _0=2)", "f", {"_1": 1, "_0": 2}),
        ("f (x=true)", "f", {"x": True}),
    ],
)  # fmt: skip
def test_names_in_a_call_need_not_be_identifiers_of_python(text, name, arguments) -> None:
    (call,) = read("pythonic", f"[{text}]", schemas={name: {}}).calls
    assert (call.name, json.loads(call.arguments)) == (name, arguments)
    cut = read("pythonic", f"[{text[:-2]}", schemas={name: {}})
    assert [call.name for call in cut.calls] == [name]


@pytest.mark.parametrize("text", ["f(1)", "f(a==1)", "f(a=g())", "f(a=b)", "f-(a=1)"])
def test_other_text_is_no_call(text) -> None:
    assert read("pythonic", f"[{text}]", schemas={"f": {}}) == ParsedReply("", f"[{text}]", ())


def test_texts_around_calls_are_a_line_apart():
    """However the reply is cut into pieces, and one line however much white space the model writes."""
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    text = f"one \n\n{call}\n\n two{call}{call}three"
    for size in (1, 2, 7, len(text)):
        parser = ReplyParser(TOOL_FORMATS["hermes"])
        events = [e for at in range(0, len(text), size) for e in parser.feed(text[at : at + size])]
        found = parsed_reply([*events, *parser.end()])
        assert found.content == "one\ntwo\nthree" and len(found.calls) == 3
    parser = ReplyParser(TOOL_FORMATS["hermes"])
    assert parsed_reply([*parser.feed(f"{call} after"), *parser.end()]).content == "after"
