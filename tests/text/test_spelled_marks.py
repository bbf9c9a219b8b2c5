"""Marks that are tokens, spelled in ordinary tokens: text is read, and a form may not be left by them."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.template_input import ReplyFormat, TemplateInput
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.reply_forms import placed_form
from pensieve_jax.text.tool_formats import ENDS_OF_MESSAGE, TOOL_FORMATS
from tests.text.test_forms_beside_calls import HEADER, STRICT, placed, tokenizer_of, written_in
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


def test_an_opening_may_be_the_mark_that_ends_reasoning() -> None:
    tokenizer = tokenizer_of("hermes", has_control=True)
    form = StructuredOutput("choice", '["yes"]', after="---", opening="---")
    for text in ("yes", "---Hm.---yes", "---Hm.-- ---\nyes"):
        assert takes(tokenizer, form, spelled(tokenizer, text)), text
    assert not takes(tokenizer, form, spelled(tokenizer, "---Hm.---No. ---yes"))
