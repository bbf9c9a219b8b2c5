"""A reply that may call tools or have a form is one or the other, in every format and behind reasoning."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from pensieve_jax.core.errors import GrammarTooComplexError, InvalidRequestError, UnsupportedGrammarError
from pensieve_jax.core.structured import MAX_GRAMMAR_BYTES, WHOLE, StructuredOutput
from pensieve_jax.core.template_input import ReplyFormat, TemplateInput
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.replies import reply_parser
from pensieve_jax.text.reply_events import parsed_reply
from pensieve_jax.text.reply_forms import form_of_calls, form_with_calls, placed_form
from pensieve_jax.text.tool_formats import TOOL_FORMATS
from tests.seeds import new_seed
from tests.text.test_reply_forms import EOS, FREE, OPENED, THINK, grammars_of, num_taken, takes
from tests.text.test_tool_grammars import TOOLS, WRITTEN, controls
from tests.text.tokenizer_zoo import byte_level_backend

STRICT = ("get_weather", "now")
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "note": {"type": "string", "maxLength": 20}},
    "required": ["mood"],
    "additionalProperties": False,
}
ANSWER = StructuredOutput.json_schema(SCHEMA)
FORMS = {
    "json_schema": (ANSWER, '{"mood": "bad", "note": "{"}', '{"mood": "fair"}'),
    "json_object": (StructuredOutput.json_object(), '{"a": [1]}', "[1]"),
    "regex": (StructuredOutput.regex("(yes|no)[.!]"), "yes!", "yes?"),
    "choice": (StructuredOutput.choice(["<yes>", "no"]), "<yes>", "yes"),
    "grammar": (StructuredOutput.grammar('start: "a" | start "b"'), "abb", "ba"),
}
HEADER = "<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
MARKED = [name for name, row in TOOL_FORMATS.items() if row.start]
UNMARKED = ("llama3_json", "pythonic")


@functools.cache
def tokenizer_of(name: str, *, has_control: bool, others: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer that has the marks of a format as control tokens or as text."""
    marks = [mark for mark in TOOL_FORMATS[name].marks if mark not in ("{", ">", "```", "```json")]
    backend = byte_level_backend(("<s>", "</s>", EOS, *(marks if has_control else ()), *others))
    return Tokenizer(backend, eos_token=EOS)


def template_of(name: str, **fields: Any) -> TemplateInput:
    reasoning = "harmony" if name == "harmony" else fields.pop("reasoning", "")
    return TemplateInput(tools=TOOLS, reply=ReplyFormat(calls=name, reasoning=reasoning, **fields))


def written_in(name: str, tokenizer: Tokenizer) -> str:
    """Return two calls as the format writes them, without a mark that the tokenizer lacks."""
    has_arguments_mark = bool(tokenizer.control_ids(["[ARGS]"]))
    return WRITTEN[name] if has_arguments_mark else WRITTEN[name].replace("[ARGS]", "")


def placed(form: StructuredOutput | None, name: str, tokenizer: Tokenizer, **fields: Any) -> Any:
    """Return the form of a reply that may call the tools, or has `form`, in its place in the reply."""
    template = template_of(name)
    found = form_with_calls(form, TOOLS, template, tokenizer, **fields)
    assert found is not None
    return placed_form(found, template, tokenizer.encode(FREE, add_bos=False), tokenizer)


def text_of(name: str, text: str) -> str:
    return HEADER + text if name == "harmony" else text


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_reply_is_calls_or_a_text_of_the_form(name: str, kind: str) -> None:
    form, good, bad = FORMS[kind]
    for has_control in controls(name):
        tokenizer = tokenizer_of(name, has_control=has_control)
        both, calls = placed(form, name, tokenizer, strict=STRICT), written_in(name, tokenizer)
        assert takes(tokenizer, both, calls)
        assert takes(tokenizer, both, text_of(name, good))
        wrong = (
            text_of(name, bad),
            "Hello.",
            "",
            calls.replace("city", "town"),
            calls.replace("weather", "w"),
        )
        for text in wrong:
            assert not takes(tokenizer, both, text), text
        assert not takes(tokenizer, both, calls + text_of(name, good)), "not both"
        assert not takes(tokenizer, both, text_of(name, good) + calls), "not both"


def test_a_reply_of_gpt_oss_may_think_before_both() -> None:
    tokenizer = tokenizer_of("harmony", has_control=True)
    form = placed(ANSWER, "harmony", tokenizer)
    for text in (HEADER, "<|channel|>final <|constrain|>json<|message|>"):
        assert takes(tokenizer, form, f'{THOUGHT}{text}{{"mood": "bad"}}')
    assert takes(tokenizer, form, THOUGHT + WRITTEN["harmony"])
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert not takes(tokenizer, form, preamble + WRITTEN["harmony"]), "that is content"
    assert not takes(tokenizer, form, '{"mood": "bad"}')


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_follow_their_schemas_only_if_the_tool_is_strict(name: str) -> None:
    for has_control in controls(name):
        tokenizer = tokenizer_of(name, has_control=has_control)
        free, mixed = placed(ANSWER, name, tokenizer), placed(ANSWER, name, tokenizer, strict=["get_weather"])
        calls = written_in(name, tokenizer)
        other = calls.replace("city", "town")
        assert takes(tokenizer, free, other) and takes(tokenizer, free, calls)
        assert takes(tokenizer, mixed, calls) and not takes(tokenizer, mixed, other)
        assert not takes(tokenizer, free, calls.replace("get_weather", "other"))


def test_a_tool_that_is_not_strict_may_have_a_schema_that_no_grammar_holds() -> None:
    tokenizer = tokenizer_of("hermes", has_control=True)
    function = {"name": "f", "parameters": {"type": "object", "not": {"required": ["x"]}}}
    tools = [{"type": "function", "function": function}]
    template = template_of("hermes")
    form = form_with_calls(ANSWER, tools, template, tokenizer)
    call = '<tool_call>\n{"name": "f", "arguments": {"y": 1}}\n</tool_call>'
    assert form is not None and takes(tokenizer, form, call)
    form = form_with_calls(ANSWER, tools, template, tokenizer, strict=["f"])
    with pytest.raises(UnsupportedGrammarError) as raised:
        takes(tokenizer, form, call)  # type: ignore[arg-type]
    assert raised.value.field == "structured.frame"


def test_a_reply_may_be_held_to_one_call() -> None:
    for name in ("hermes", "mistral_v3", "pythonic"):
        tokenizer = tokenizer_of(name, has_control=True)
        form = placed(ANSWER, name, tokenizer, has_one_call=True)
        assert not takes(tokenizer, form, WRITTEN[name])
        assert takes(tokenizer, form, '{"mood": "bad"}')


@pytest.mark.parametrize("name", MARKED)
def test_calls_or_a_form_may_follow_reasoning(name: str) -> None:
    for has_control in (True, False):
        tokenizer = tokenizer_of(name, has_control=has_control, others=THINK.marks)
        calls = written_in(name, tokenizer)
        for is_open in (True, False):
            template = template_of(name, reasoning="think", is_open=is_open)
            prompt = tokenizer.encode(OPENED if is_open else FREE, add_bos=False)
            both = form_with_calls(ANSWER, TOOLS, template, tokenizer, strict=STRICT)
            assert both is not None
            form = placed_form(both, template, prompt, tokenizer)
            thought = ("" if is_open else "<think>") + "hm {<b></think>\n\n"
            for text in (calls, '{"mood": "bad"}'):
                assert takes(tokenizer, form, thought + text)
                assert takes(tokenizer, form, text) == (not is_open)
            assert not takes(tokenizer, form, thought + "Hello.")


def test_a_prefill_decides_between_calls_and_the_form() -> None:
    tokenizer = tokenizer_of("hermes", has_control=True)
    template = template_of("hermes")
    both = form_with_calls(ANSWER, TOOLS, template, tokenizer, strict=STRICT)
    assert both is not None
    for prefill, rest in (('{"mo', 'od": "bad"}'), (WRITTEN["hermes"][:20], WRITTEN["hermes"][20:])):
        begun = TemplateInput(tools=TOOLS, prefill=prefill, reply=template.reply)
        form = placed_form(both, begun, [], tokenizer)
        assert takes(tokenizer, form, rest) and not takes(tokenizer, form, prefill + rest)


def test_a_prefill_of_gpt_oss_has_begun_its_last_message() -> None:
    tokenizer = tokenizer_of("harmony", has_control=True)
    template = TemplateInput(tools=TOOLS, prefill='{"mo', reply=template_of("harmony").reply)
    form = form_with_calls(ANSWER, TOOLS, template, tokenizer)
    assert form is ANSWER
    assert takes(tokenizer, placed_form(form, template, [], tokenizer), 'od": "bad"}')
    assert form_with_calls(None, TOOLS, template, tokenizer, strict=STRICT) is None


@pytest.mark.parametrize("name", UNMARKED)
def test_where_calls_have_no_mark_text_begins_otherwise(name: str) -> None:
    for has_control in (True, False):
        tokenizer = tokenizer_of(name, has_control=has_control)
        form, calls = placed(None, name, tokenizer, strict=STRICT), WRITTEN[name]
        for text in ("", "Hello {[", " \n\nHello.", calls):
            assert takes(tokenizer, form, text), text
        mark = TOOL_FORMATS[name].optional_start
        for text in (calls.replace("city", "town"), calls.replace("now", "how"), " " + calls, mark + "{}"):
            assert not takes(tokenizer, form, text), text


def test_text_of_gpt_oss_is_a_message_with_a_header() -> None:
    tokenizer = tokenizer_of("harmony", has_control=True)
    form = placed(None, "harmony", tokenizer, strict=STRICT)
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for text in (
        WRITTEN["harmony"],
        f"{HEADER}Hello {{[",
        f"{THOUGHT}{HEADER}Hi.",
        preamble + WRITTEN["harmony"],
    ):
        assert takes(tokenizer, form, text), text
    for text in ("Hello.", WRITTEN["harmony"].replace("city", "town"), THOUGHT):
        assert not takes(tokenizer, form, text), text


@pytest.mark.parametrize("has_control", [True, False])
@pytest.mark.parametrize("reply", [ReplyFormat(reasoning="harmony"), ReplyFormat(calls="harmony")])
def test_a_form_of_gpt_oss_begins_behind_the_header_of_its_last_message(
    reply: ReplyFormat, has_control: bool
) -> None:
    tokenizer = tokenizer_of("harmony", has_control=has_control)
    form = placed_form(ANSWER, TemplateInput(reply=reply), [], tokenizer)
    for before in (HEADER, THOUGHT + HEADER, THOUGHT * 2 + "<|channel|>final <|constrain|>json<|message|>"):
        assert takes(tokenizer, form, before + '{"mood": "bad"}')
        assert not takes(tokenizer, form, before + '{"mood": "fair"}')
    assert takes(tokenizer, form, THOUGHT * 8 + HEADER + '{"mood": "bad"}')
    for text in ('{"mood": "bad"}', WRITTEN["harmony"], THOUGHT, THOUGHT * 9 + HEADER + '{"mood": "bad"}'):
        assert not takes(tokenizer, form, text)
    assert num_taken(tokenizer, form, THOUGHT + "Yes") == (len(THOUGHT), False)


def test_a_form_that_is_the_whole_reply_gets_no_header() -> None:
    tokenizer, template = tokenizer_of("harmony", has_control=True), template_of("harmony")
    form = form_of_calls(TOOLS, template, tokenizer)
    assert placed_form(form, template, [], tokenizer) == form
    assert takes(tokenizer, form, WRITTEN["harmony"])
    own = StructuredOutput("choice", '["a"]', frame=WHOLE)
    assert form_with_calls(own, TOOLS, template, tokenizer) is own


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_walk_ends_in_calls_or_in_a_text_of_the_form(name: str) -> None:
    """Ids are drawn among those that the mask allows, and the parser divides the reply."""
    draw, kinds = random.Random(new_seed()), set()
    for has_control in controls(name):
        tokenizer = tokenizer_of(name, has_control=has_control)
        eos_id = tokenizer.eos_id
        assert eos_id is not None
        form = placed(ANSWER, name, tokenizer, strict=STRICT)
        grammar = grammars_of(tokenizer).compile(form)
        words = np.empty(-(-tokenizer.vocab_size // 32), np.int32)
        for number in range(12):
            row, ids, has_ended = grammar.row((eos_id,), 0), [], False
            ids += (
                _beginning(name, tokenizer)
                if number % 2
                else tokenizer.encode(text_of(name, "{" if number else '{"mood'), add_bos=False)
            )
            for token_id in ids:
                row.accept(token_id)
            while len(ids) < 400 and not has_ended:
                words[:] = -1
                row.fill(words)
                allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
                if eos_id in allowed:
                    has_ended = True
                    break
                closing = [one for one in allowed if tokenizer.token_text(int(one)) in ('"', "}", ")", "]")]
                ids.append(int(draw.choice(closing if closing and draw.random() < 0.5 else list(allowed))))
                row.accept(ids[-1])
            if not has_ended:
                continue
            parser = reply_parser(template_of(name))
            found = parsed_reply([*parser.feed(tokenizer.decode_raw(ids)), *parser.end()])
            kinds.add(bool(found.calls))
            assert bool(found.calls) != bool(found.content)
            if found.calls:
                for call in found.calls:
                    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            else:
                assert json.loads(found.content)["mood"] in ("good", "bad")
    assert kinds == {True, False}


def _beginning(name: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the beginning of a call, up to behind its name or its first argument."""
    behind = "Bern\n</parameter>\n" if name == "qwen3_xml" else "get_weather"
    text, _, _ = written_in(name, tokenizer).partition(behind)
    return tokenizer.encode(text + behind, add_bos=False)


def test_an_error_names_the_form_or_the_frame() -> None:
    tokenizer = tokenizer_of("hermes", has_control=True)
    grammars = grammars_of(tokenizer)
    for form, kind, field in (
        (StructuredOutput.json_schema({"not": {}}), UnsupportedGrammarError, "structured.json_schema"),
        (StructuredOutput("regex", "(", frame=WHOLE), InvalidRequestError, "structured.regex"),
        (StructuredOutput("regex", "a", frame="start: @other"), InvalidRequestError, "structured.frame"),
        (
            StructuredOutput("regex", "a", frame='start: @form | %json {"multipleOf": 99999}'),
            GrammarTooComplexError,
            "structured.frame",
        ),
    ):
        with pytest.raises(kind) as raised:
            grammars.compile(form)
        assert raised.value.field == field
    with pytest.raises(InvalidRequestError) as raised:
        StructuredOutput("regex", "a", frame="x" * (MAX_GRAMMAR_BYTES + 1))
    assert raised.value.field == "structured.frame"
