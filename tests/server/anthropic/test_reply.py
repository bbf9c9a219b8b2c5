"""Content blocks of replies with reasoning and calls: the stream adds up to the whole, however it is cut."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from pensieve_jax.server.anthropic.reply import SIGNATURE, BlockEvents, content_of
from pensieve_jax.text.reply_events import ReplyEvent
from pensieve_jax.text.reply_parser import ReplyParser
from pensieve_jax.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from tests.seeds import new_seed
from tests.server.anthropic.streams import blocks_of, events_of

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "name": "x"}}</tool_call>'
THINKING = "<think>\nLet me see.\n</think>\n\n"
TEXT = {"type": "text", "text": "Well."}
USE = {"type": "tool_use", "id": "id_0", "name": "add", "input": {"a": 1, "name": "x"}}
THOUGHT = {"type": "thinking", "thinking": "Let me see.", "signature": SIGNATURE}


def call_id_of(index: int, header: str) -> str:
    return f"id_{index}"


def parser() -> ReplyParser:
    return ReplyParser(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])


def streamed(pieces: Iterable[str], **options) -> list[dict]:
    reader, blocks = parser(), BlockEvents(call_id_of, **options)
    events = [event for piece in pieces for event in blocks.feed(reader.feed(piece))]
    return blocks_of(events_of(b"".join([*events, *blocks.feed(reader.end()), *blocks.close()])))


def parsed(text: str) -> list[ReplyEvent]:
    reader = parser()
    return [*reader.feed(text), *reader.end()]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("", []),
        ("Well.", [TEXT]),
        (f"Well.\n{CALL}", [TEXT, USE]),
        (CALL, [USE]),
        (f"{THINKING}Well.", [THOUGHT, TEXT]),
        (f"{THINKING}{CALL}\n{CALL}", [THOUGHT, USE, {**USE, "id": "id_1"}]),
        (f"{CALL}Well.", [USE, TEXT]),
        ("<think>\nLet me see.", [THOUGHT]),
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', [{**USE, "name": "now", "input": {}}]),
    ],
)
def test_blocks_are_the_same_whole_and_streamed(text, blocks):
    assert content_of(parsed(text), call_id_of) == blocks
    rng = random.Random(new_seed())
    for _ in range(20):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        pieces = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert streamed(pieces) == blocks


def test_reasoning_may_be_hidden():
    hidden = [{**THOUGHT, "thinking": ""}, TEXT]
    assert content_of(parsed(f"{THINKING}Well."), call_id_of, shows_thinking=False) == hidden
    assert streamed([THINKING, "Well."], shows_thinking=False) == hidden


def test_arguments_that_are_no_object_are_told_as_a_text():
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b'
    (block,) = content_of(parsed(text), call_id_of)
    assert block["input"] == {"INVALID_JSON": '{"a": 1, "b'}
