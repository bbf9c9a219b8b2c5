"""Marks that are tokens, spelled in ordinary tokens: text is read, and a form may not be left by them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.template_input import ReplyFormat, TemplateInput
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.replies import new_parser, num_reasoning_tokens
from pensieve_jax.text.reply_events import ParsedReply, parsed_reply
from pensieve_jax.text.reply_forms import placed_form, with_form
from pensieve_jax.text.tool_formats import ENDS_OF_MESSAGE, TOOL_FORMATS
from tests.text.test_forms_beside_calls import (
    HEADER,
    STRICT,
    placed,
    template_of,
    tokenizer_of,
    written_in,
)
from tests.text.test_reply_forms import FREE, THINK, grammars_of
from tests.text.test_tool_grammars import WRITTEN

ANSWER = StructuredOutput.json_schema({"const": {"a": 1}})


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return ids of a text in which no token is a mark."""
    return [token_id for one in text for token_id in tokenizer.encode(one, add_bos=False)]


def takes(tokenizer: Tokenizer, form: StructuredOutput, token_ids: list[int]) -> bool:
    """Return whether a reply may be these ids."""
    eos_id = tokenizer.eos_id
    assert eos_id is not None
    row = grammars_of(tokenizer).compile(form).row((eos_id,), 0)
    words = np.empty(-(-tokenizer.vocab_size // 32), np.int32)
    for token_id in (*token_ids, eos_id):
        words[:] = -1
        row.fill(words)
        if not words.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1:
            return False
        row.accept(token_id)
    return True


@pytest.mark.parametrize("name", [name for name, row in TOOL_FORMATS.items() if row.start])
def test_text_before_calls_does_not_spell_their_mark(name: str) -> None:
    """Otherwise what is read as a call would have arguments of any form."""
    tokenizer = tokenizer_of(name, has_control=True)
    form, mark, calls = placed(None, name, tokenizer, strict=STRICT), TOOL_FORMATS[name].start, WRITTEN[name]
    own = tokenizer.encode(written_in(name, tokenizer), add_bos=False)
    assert takes(tokenizer, form, own)
    for text in ("Hello. ", f"{mark[:-1]} <[ ", mark[:-1], mark[1:]):
        assert takes(tokenizer, form, spelled(tokenizer, text)), text
        assert takes(tokenizer, form, spelled(tokenizer, text) + own), text
    for text in (mark, f"Hello. {mark}", f"{mark} <[ ", calls, f"{mark[:-1]}{calls.replace('city', 'town')}"):
        assert not takes(tokenizer, form, spelled(tokenizer, text)), text
        assert not takes(tokenizer, form, spelled(tokenizer, text) + own), text


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_text_does_not_begin_with_the_mark_before_calls(name: str) -> None:
    tokenizer, mark = tokenizer_of(name, has_control=True), TOOL_FORMATS[name].optional_start
    form = placed(None, name, tokenizer, strict=STRICT)
    for text in (mark[:-1], f"Hello. {mark}", f"<{mark}", f" {mark[:-1]} {{"):
        assert takes(tokenizer, form, spelled(tokenizer, text)), text
    for text in (mark, f" \n{mark}", mark + WRITTEN[name].replace("city", "town"), f"\n{mark} {{"):
        assert not takes(tokenizer, form, spelled(tokenizer, text)), text


@pytest.mark.parametrize("channel", ["analysis", "commentary", "final"])
@pytest.mark.parametrize("mark", ENDS_OF_MESSAGE)
def test_messages_do_not_spell_the_marks_that_end_them(mark: str, channel: str) -> None:
    tokenizer = tokenizer_of("harmony", has_control=True, others=("<|return|>",))
    form = placed(None, "harmony", tokenizer, strict=STRICT)
    begin = tokenizer.encode(f"<|channel|>{channel}<|message|>", add_bos=False)
    rest = []
    if channel != "final":
        rest = tokenizer.encode("<|end|><|start|>assistant" + WRITTEN["harmony"], add_bos=False)
    for text in ("", "Hm.", mark[:-1], f"{mark[:-1]} {mark[1:]}", "<|message|>"):
        assert takes(tokenizer, form, begin + spelled(tokenizer, text) + rest), text
    for text in (mark, f"a{mark}b", f"<|{mark}"):
        assert not takes(tokenizer, form, begin + spelled(tokenizer, text) + rest), text


def test_the_reasoning_of_gpt_oss_does_not_spell_them_before_a_form() -> None:
    tokenizer = tokenizer_of("harmony", has_control=True)
    form = placed_form(ANSWER, TemplateInput(reply=ReplyFormat(reasoning="harmony")), [], tokenizer)
    begin = tokenizer.encode("<|channel|>analysis<|message|>", add_bos=False)
    rest = tokenizer.encode(f'<|end|><|start|>assistant{HEADER}{{"a":1}}', add_bos=False)
    assert takes(tokenizer, form, begin + spelled(tokenizer, "Hm.") + rest)
    wrong = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>No."
    assert not takes(tokenizer, form, begin + spelled(tokenizer, wrong) + rest)


@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_does_not_spell_the_mark_that_ends_it(is_open: bool) -> None:
    """Otherwise what is read as the content would be free text."""
    tokenizer = tokenizer_of("hermes", has_control=True, others=THINK.marks)
    template = TemplateInput(reply=ReplyFormat(reasoning="think", is_open=is_open))
    form = placed_form(ANSWER, template, tokenizer.encode(FREE, add_bos=False), tokenizer)
    begin = [] if is_open else tokenizer.encode("<think>", add_bos=False)
    rest = tokenizer.encode('</think>\n{"a":1}', add_bos=False)
    for text in ("", "Hm.\n", "</think", "</think >", "<think>"):
        assert takes(tokenizer, form, begin + spelled(tokenizer, text) + rest), text
    for text in ("</think>", "Hm.</think>No.", "<</think> "):
        assert not takes(tokenizer, form, begin + spelled(tokenizer, text) + rest), text


@pytest.mark.parametrize("name", [name for name, row in TOOL_FORMATS.items() if row.start])
def test_a_form_beside_calls_may_spell_a_call(name: str) -> None:
    """Its text is content, and only what begins as a call is one."""
    calls = written_in(name, tokenizer_of(name, has_control=True))
    escaped = json.dumps(calls, ensure_ascii=False)[1:-1]
    texts = [
        f'{{"note": "{escaped}"}}',
        json.dumps({"note": f"{TOOL_FORMATS[name].start}<function=now>\n</function>[TOOL_CALLS]now{{}}"}),
        f"It writes {calls}",
        TOOL_FORMATS[name].start[:-1],
        f"{TOOL_FORMATS[name].start}no call {calls}",
        "",
    ]
    for thought in ("", "<think>Hm.</think>"):
        # White space behind reasoning does not belong to the form.
        for text in texts + [f" {calls}"] * (not thought):
            template = template_of(name, reasoning="think", has_form=True)
            assert read(template, thought + text) == ParsedReply("Hm." * bool(thought), text, ()), text
        found = read(template_of(name, reasoning="think", has_form=True), thought + calls)
        assert [call.name for call in found.calls] == ["get_weather", "now"] and not found.content


@pytest.mark.parametrize("mark", ENDS_OF_MESSAGE)
def test_a_form_of_gpt_oss_may_spell_any_mark(mark: str) -> None:
    tokenizer = tokenizer_of("harmony", has_control=True)
    text = f' No{mark}<|start|>assistant<|channel|>analysis<|message|>"x '
    template = template_of("harmony", has_form=True)
    for before in (HEADER, "<|channel|>final <|constrain|>json<|message|>"):
        found = read(template, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{before}{text}")
        assert found == ParsedReply("Hm.", text, ())
    found = read(template, WRITTEN["harmony"])
    assert [call.name for call in found.calls] == ["get_weather"]
    form = placed_form(StructuredOutput.choice([text]), template, [], tokenizer)
    begin = tokenizer.encode(HEADER, add_bos=False)
    assert takes(tokenizer, form, begin + spelled(tokenizer, text))


@pytest.mark.parametrize("has_form", [True, False])
def test_a_prefill_of_gpt_oss_begins_its_last_message(has_form: bool) -> None:
    text = '{"a": "<|message|>b<|end|>"}'
    for cut in (1, 8, 20):
        template = template_of("harmony", has_form=has_form)
        parser = new_parser(TemplateInput(prefill=text[:cut], tools=template.tools, reply=template.reply))
        events = [event for one in text[cut:] for event in parser.feed(one)]
        assert len(events) > 3
        assert parsed_reply([*events, *parser.end()]).content == text[cut:]


def test_a_form_that_says_what_stands_before_it_changes_no_reading() -> None:
    template = TemplateInput()
    assert with_form(template, None) is template
    assert with_form(template, ANSWER).reply.has_form
    for form in (replace(ANSWER, after="---"), replace(ANSWER, frame="start: @form")):
        assert with_form(template, form) is template


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "<|channel|>analysis<|message|>b<|end|>"}',
        '<|channel|>final<|message|>{"a": "<|channel|>analysis<|message|>b"}',
        '<|channel|>commentary to=functions.now<|message|>{"a": "<|channel|>analysis<|message|>b<|end|>"}',
    ],
)
def test_spelled_marks_of_gpt_oss_are_not_counted_as_reasoning(text: str) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    template = template_of("harmony", has_form="commentary" not in text)
    text = text if text.startswith("<") else HEADER + text
    assert num_reasoning_tokens(list(text), template) == 0
    assert num_reasoning_tokens(list(f"{thought}<|start|>assistant{text}"), template) == len(thought)


def read(template: TemplateInput, text: str) -> ParsedReply:
    """Return the parts of a reply, which are the same however it is cut."""
    found = []
    for pieces in ([text], list(text), [text[:7], text[7:]]):
        parser = new_parser(template)
        events = [event for piece in pieces for event in parser.feed(piece)]
        found.append(parsed_reply([*events, *parser.end()]))
    assert found[0] == found[1] == found[2]
    return found[0]


def test_an_opening_may_be_the_mark_that_ends_reasoning() -> None:
    tokenizer = tokenizer_of("hermes", has_control=True)
    form = StructuredOutput("choice", '["yes"]', after="---", opening="---")
    for text in ("yes", "---Hm.---yes", "---Hm.-- ---\nyes"):
        assert takes(tokenizer, form, spelled(tokenizer, text)), text
    assert not takes(tokenizer, form, spelled(tokenizer, "---Hm.---No. ---yes"))
