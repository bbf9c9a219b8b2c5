"""A form begins behind the reasoning of a reply, if it has some, and goes on behind a prefill."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from tokenizers import AddedToken

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.template_input import ReplyFormat, TemplateInput
from pensieve_jax.text import Tokenizer
from pensieve_jax.text.grammar import Grammars
from pensieve_jax.text.reply_forms import placed_form
from pensieve_jax.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from pensieve_jax.text.tool_grammars import call_grammar
from tests.text.test_tool_grammars import EOS, TOOLS, WRITTEN
from tests.text.tokenizer_zoo import byte_level_backend

KINDS = ("control", "added", "text")
THINK = REASONING_FORMATS["think"]
ANSWER = StructuredOutput.json_schema({"enum": [True, {"a": 1}]})
OPENED, FREE = "<|user|>so?<think>\n", "<|user|>so?"
THINKS = ReplyFormat(reasoning="think")


@functools.cache
def tokenizer_of(kind: str, marks: tuple[str, ...] = THINK.marks) -> Tokenizer:
    """Return a tokenizer whose marks are control tokens, added tokens, or text."""
    backend = byte_level_backend(("<s>", "</s>", EOS, *(marks if kind == "control" else ())))
    if kind == "added":
        backend.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return Tokenizer(backend, eos_token=EOS)


def placed(kind: str, prompt: str, template: TemplateInput) -> StructuredOutput:
    tokenizer = tokenizer_of(kind)
    return placed_form(ANSWER, template, tokenizer.encode(prompt, add_bos=False), tokenizer)


@functools.cache
def grammars_of(tokenizer: Tokenizer) -> Grammars:
    """Return the grammars of a model whose replies end with the tokenizer's own end."""
    assert tokenizer.eos_id is not None
    return Grammars(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))


def num_taken(tokenizer: Tokenizer, form: StructuredOutput, text: str) -> tuple[int, bool]:
    """Return how many characters of a reply a form takes, and whether the reply may end there."""
    eos_id = tokenizer.eos_id
    assert eos_id is not None
    row = grammars_of(tokenizer).compile(form).row((eos_id,), 0)
    words = np.empty(-(-tokenizer.vocab_size // 32), np.int32)
    token_ids = tokenizer.encode(text, add_bos=False)
    for number, token_id in enumerate((*token_ids, eos_id)):
        words[:] = -1
        row.fill(words)
        is_allowed = bool(words.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1)
        if token_id == eos_id or not is_allowed:
            return len(tokenizer.decode_raw(token_ids[:number])), is_allowed
        row.accept(token_id)
    raise AssertionError


def takes(tokenizer: Tokenizer, form: StructuredOutput, text: str) -> bool:
    return num_taken(tokenizer, form, text) == (len(text), True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_that_may_think_is_held_to_its_form_either_way(kind):
    """A reply that answers at once was free text for as long as it did not write the mark."""
    tokenizer, form = tokenizer_of(kind), placed(kind, FREE, TemplateInput(reply=THINKS))
    for text in ('{"a":1}', "true", '<think>\nhm {"b": [</think>\n\n{"a":1}', "<think></think>true"):
        assert takes(tokenizer, form, text), text
    assert num_taken(tokenizer, form, "Yes.") == (0, False)
    assert num_taken(tokenizer, form, '{"b":1}')[0] < 3
    assert num_taken(tokenizer, form, "<think>hm</think>\nYes.") == (len("<think>hm</think>\n"), False)
    assert num_taken(tokenizer, form, "<think>hm") == (len("<think>hm"), False), "it may not end there"


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_within_reasoning_must_end_it(kind):
    tokenizer = tokenizer_of(kind)
    form = placed(kind, OPENED, TemplateInput(reply=ReplyFormat(reasoning="think", is_open=True)))
    assert takes(tokenizer, form, "hm\n</think>\n\ntrue")
    assert num_taken(tokenizer, form, "true") == (4, False), "it is reasoning, and may not end"
    assert num_taken(tokenizer, form, "hm</think>Yes") == (len("hm</think>"), False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_ends_reasoning_leaves_none(kind):
    template = TemplateInput(reply=THINKS)
    assert placed(kind, f"{OPENED}\n</think>\n\n", template) == ANSWER


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "harmony"])
def test_calls_are_forms_like_others(kind, name):
    marks = (
        *(mark for mark in TOOL_FORMATS[name].marks if mark.strip("{>`") not in ("", "json")),
        *THINK.marks,
    )
    tokenizer = tokenizer_of(kind, marks)
    written = WRITTEN[name] if kind != "text" else WRITTEN[name].replace("[ARGS]", "")
    if name == "mistral" and kind == "added":
        written = written.replace("[ARGS]", "")
    for is_open in (True, False):
        reply = ReplyFormat(name, "think", is_open=is_open)
        template = TemplateInput(tools=tuple(TOOLS), reply=reply)
        prompt = tokenizer.encode(OPENED if is_open else FREE, add_bos=False)
        calls = StructuredOutput.grammar(call_grammar(TOOL_FORMATS[name], TOOLS, tokenizer))
        form = placed_form(calls, template, prompt, tokenizer)
        thought = "" if is_open else "<think>"
        assert takes(tokenizer, form, f"{thought}\nhm, <b> [x]\n</think>\n\n{written}")
        assert takes(tokenizer, form, written) == (not is_open)
        assert not takes(tokenizer, form, f"{thought}hm</think>\nHello.")


@pytest.mark.parametrize("kind", KINDS)
def test_text_before_calls_may_follow_reasoning(kind):
    row = TOOL_FORMATS["hermes"]
    tokenizer = tokenizer_of(kind, (*row.marks, *THINK.marks))
    calls = StructuredOutput.grammar(call_grammar(row, TOOLS, tokenizer, has_text=True))
    form = placed_form(calls, TemplateInput(reply=THINKS), tokenizer.encode(FREE, add_bos=False), tokenizer)
    for text in ("I look.", "I look.\n" + WRITTEN["hermes"]):
        assert takes(tokenizer, form, text) and takes(tokenizer, form, f"<think>hm</think>\n\n{text}")
    assert not takes(tokenizer, form, "<think>hm</think>I look.<tool_call>\nNo.")


def test_reasoning_that_opens_with_text_may_precede_text() -> None:
    """Some models end it with a control token, but begin it with ordinary ones."""
    row = TOOL_FORMATS["hermes"]
    tokenizer = tokenizer_of("control", (*row.marks, THINK.end))
    calls = StructuredOutput.grammar(call_grammar(row, TOOLS, tokenizer, has_text=True))
    form = placed_form(calls, TemplateInput(reply=THINKS), tokenizer.encode(FREE, add_bos=False), tokenizer)
    for text in ("I look.", "a <think", "I look.\n" + WRITTEN["hermes"]):
        assert takes(tokenizer, form, text) and takes(tokenizer, form, f"<think>hm <b></think>\n\n{text}")
    wrong = WRITTEN["hermes"].replace("city", "town")
    for text in ("hm</think>", f"<think>hm</think>{wrong}", "<think>a</think>b</think>"):
        assert not takes(tokenizer, form, text)


@pytest.mark.parametrize("marks", [(), (THINK.end,), THINK.marks])
def test_reasoning_may_precede_a_form_that_could_begin_like_it(marks: tuple[str, ...]) -> None:
    tokenizer = tokenizer_of("control", marks)
    form = placed_form(StructuredOutput.regex("[^x]*"), TemplateInput(reply=THINKS), [], tokenizer)
    for text in ("yes", "<think>x</think>\na", "<think>a x</think>a"):
        assert takes(tokenizer, form, text), text
    assert not takes(tokenizer, form, "<think>a</think>x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prefill", "rest"),
    [
        ('{"a"', ": 1}"),
        ("true", ""),
        ("<think>hm", "</think>true"),
        ("<think>hm</think>\n", "true"),
        ("<think>hm</think>{", '"a":1}'),
    ],
)
def test_a_form_goes_on_behind_a_prefill(kind, prefill, rest):
    tokenizer = tokenizer_of(kind)
    form = placed(kind, FREE + prefill, TemplateInput(prefill=prefill, reply=THINKS))
    assert form.prefill == prefill
    assert takes(tokenizer, form, rest)
    assert not takes(tokenizer, form, prefill + rest) or not prefill.startswith("{")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefill", ["Sure: ", '{"b"', "<think>hm</think>Yes"])
def test_a_prefill_that_breaks_the_form_is_refused(kind, prefill):
    form = placed(kind, FREE + prefill, TemplateInput(prefill=prefill, reply=THINKS))
    with pytest.raises(InvalidRequestError, match="prefill") as raised:
        takes(tokenizer_of(kind), form, "")
    assert raised.value.field == "structured.prefill" and raised.value.value == prefill


def test_a_prefill_counts_without_reasoning_too():
    tokenizer = tokenizer_of("text")
    form = placed_form(
        ANSWER, TemplateInput(prefill="tr"), tokenizer.encode("so? tr", add_bos=False), tokenizer
    )
    assert takes(tokenizer, form, "ue") and num_taken(tokenizer, form, "true") == (0, False)


def test_a_form_that_has_its_place_keeps_it():
    own = StructuredOutput("regex", "a", after=".")
    assert placed_form(own, TemplateInput(reply=THINKS, prefill="x"), [], tokenizer_of("text")) is own
