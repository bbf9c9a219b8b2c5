"""Which token ends a reply, and why: ids, stop strings, and lengths, one token at a time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pensieve_jax.core.outputs import TokenLogprob
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import NO_INPUT, ReplyFormat, TemplateInput
from pensieve_jax.text.replies import ReplyReader
from pensieve_jax.text.reply_tokens import ReplyTokens
from pensieve_jax.text.tool_formats import TOOL_FORMATS
from tests.text.test_tool_grammars import TOOLS, WRITTEN
from tests.text.tokenizer_zoo import ZOO

NO_IDS, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


def reply_of(max_num_tokens=100, *, ending_ids=(), with_text=True, template=NO_INPUT, **params):
    tokenizer = ZOO["bytes"] if with_text else None
    return ReplyTokens(SamplingParams(**params), ending_ids, max_num_tokens, tokenizer, template)


def accepted(reply, text):
    """Return how the reply ends with these bytes, or the state after the last."""
    reasons = []
    for token_id in text.encode():
        reasons.append(reply.accept(token_id, -1.0, NO_IDS, NO_LOGPROBS))
        if reasons[-1] is not None:
            break
    return reasons


@pytest.mark.parametrize(
    ("min_tokens", "num_tokens", "text"),
    [(0, 1, ""), (1, 2, "x"), (2, 3, "xx"), (3, 4, "xxx")],
)
def test_a_stop_string_ends_a_reply_only_after_min_tokens(min_tokens, num_tokens, text):
    reply = reply_of(stop=["x"], min_tokens=min_tokens)
    assert accepted(reply, "xxxxxx") == [None] * (num_tokens - 1) + ["stop"]
    assert len(reply.token_ids) == num_tokens and reply.text == text


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize("with_text", [True, False])
def test_an_ending_id_ends_a_reply_only_after_min_tokens(min_tokens, num_tokens, with_text):
    reply = reply_of(ending_ids=[ord("e")], min_tokens=min_tokens, with_text=with_text)
    assert accepted(reply, "eeeeee") == [None] * (num_tokens - 1) + ["stop"]
    assert reply.has_text == with_text
    assert reply.text == ("e" * (num_tokens - 1) if with_text else ""), "the last one is no text"


@pytest.mark.parametrize("with_text", [True, False])
def test_a_reply_ends_by_length_with_its_last_token(with_text):
    reply = reply_of(3, with_text=with_text)
    assert accepted(reply, "abcdef") == [None, None, "length"]
    assert reply.text == ("abc" if with_text else "")


@pytest.mark.parametrize("with_id", [False, True])
def test_a_control_token_ends_a_reply_by_its_spelling_as_by_its_id(with_id):
    reply = reply_of(ending_ids=[258]) if with_id else reply_of(stop=["<|user|>"])
    reasons = [reply.accept(token_id, -1.0, NO_IDS, NO_LOGPROBS) for token_id in (ord("a"), 261, 258)]
    assert (reasons, reply.text) == ([None, None, "stop"], "a")
    assert reply.stop_string == (None if with_id else "<|user|>")


def test_half_a_character_is_shown_only_at_the_end():
    reply = reply_of(3)
    assert accepted(reply, "a\u4e2d") == [None, None, "length"]
    assert reply.pieces[:2] == ["a", ""] and reply.text.startswith("a\ufffd")


def test_a_stop_string_that_ends_with_the_last_token_is_the_reason():
    reply = reply_of(2, stop=["c", "b"])
    assert accepted(reply, "ab") == [None, "stop"] and reply.stop_string == "b"
    assert accepted(reply_of(2, ending_ids=[ord("b")]), "ab") == [None, "stop"]


def test_a_possible_stop_string_is_held_back():
    reply = reply_of(4, stop=["bcx"])
    assert accepted(reply, "abcd") == [None, None, None, "length"]
    assert reply.pieces[:3] == ["a", "", ""] and reply.text == "abcd"


@pytest.mark.parametrize(("held", "expected"), [(b"bc", "abc"), (b"\xe4", "a\ufffd")])
def test_an_ending_id_releases_the_text_that_was_held_back(held, expected):
    reply = reply_of(stop=["bcx"], ending_ids=[ord("e")])
    for token_id in b"a" + held:
        assert reply.accept(token_id, -1.0, NO_IDS, NO_LOGPROBS) is None
    assert reply.text == "a"
    assert reply.accept(ord("e"), -1.0, NO_IDS, NO_LOGPROBS) == "stop"
    assert reply.text == expected


@pytest.mark.parametrize(("logprobs", "top"), [(0, {}), (1, {7: -0.5}), (2, {7: -0.5, 8: -1.5})])
def test_alternatives_are_the_requested_ones(logprobs, top):
    reply = reply_of(logprobs=logprobs, with_text=False)
    ids, values = np.array([7, 8, 9], np.int32), np.array([-0.5, -1.5, -2.5], np.float32)
    reply.accept(8, -1.5, ids, values)
    assert reply.logprobs == [TokenLogprob(8, -1.5, top)]
    assert reply_of().logprobs is None


def test_only_shown_control_tokens_are_in_the_text_and_an_ending_one_is_not():
    tokenizer = ZOO["bytes"]
    user, end = tokenizer.control_ids(["<|user|>"]), tokenizer.control_ids(["<|end|>"])
    ids = [*b"a", *user, *end, *b"b", *user]
    harmony = TemplateInput(reply=ReplyFormat(reasoning="harmony"))
    for template, text in ((NO_INPUT, "ab"), (harmony, "a<|end|>b")):
        reply = reply_of(ending_ids=(), template=template)
        for token_id in ids:
            reply.accept(token_id, -1.0, NO_IDS, NO_LOGPROBS)
        assert reply.text == text
    reply = reply_of(ending_ids=tuple(end), template=harmony)
    assert reply.accept(min(end), -1.0, NO_IDS, NO_LOGPROBS) == "stop"
    assert reply.text == ""


def one_call(name, **reply):
    """Return how a reply is read that may have one call, in the format `name`."""
    return TemplateInput(tools=TOOLS, reply=ReplyFormat(calls=name, max_calls=1, **reply))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_reply_that_may_have_one_call_ends_with_it(name):
    """Marks in an argument do not end it, and later calls do not count."""
    marks = "".join(mark for mark in TOOL_FORMATS[name].call_end if "\n" not in mark)
    city = f"Bern {marks} [x]" if name not in ("harmony", "qwen3_xml") else "Bern </tool_call> [x]"
    text = WRITTEN[name].replace("Bern", city) + ("<|call|>and more" if name == "harmony" else "")
    template = one_call(name)
    reply = reply_of(10_000, template=template)
    assert accepted(reply, text)[-1] == "stop"
    assert reply.text == text[: len(reply.text)] and len(reply.text) < len(text)
    (call,) = ReplyReader(None).parts(reply.text, template, turn="").calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": city, "days": 2})


def test_marks_in_the_reasoning_end_no_reply():
    text = f"<think>{WRITTEN['hermes']}</think>{WRITTEN['hermes']}"
    template = one_call("hermes", reasoning="think")
    reply = reply_of(10_000, template=template)
    assert accepted(reply, text)[-1] == "stop"
    parts = ReplyReader(None).parts(reply.text, template, turn="")
    assert (parts.reasoning, len(parts.calls)) == (WRITTEN["hermes"], 1)


def test_a_call_ends_a_reply_only_after_min_tokens():
    text, template = '{"name": "now", "parameters": {}}', one_call("llama3_json")
    reply = reply_of(template=template, max_tokens=99, min_tokens=len(text) + 2)
    assert accepted(reply, text + "; more") == [None] * (len(text) + 2) + ["stop"]
    assert accepted(reply_of(len(text), template=template), text)[-1] == "stop", "and not length"
