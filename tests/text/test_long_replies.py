"""The work of reading a reply grows with its length, not with its square."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from pensieve_jax.core.template_input import ReplyFormat, TemplateInput
from pensieve_jax.text.replies import num_reasoning_tokens
from pensieve_jax.text.reply_events import parsed_reply
from pensieve_jax.text.reply_parser import ReplyParser
from pensieve_jax.text.tool_formats import TOOL_FORMATS

HARMONY = TemplateInput(reply=ReplyFormat(reasoning="harmony"))


def num_lines(work: Callable[[], Any]) -> int:
    """Return how many lines of Python `work` executes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def check_linear(work: Callable[[int], Any]) -> None:
    short, long = num_lines(lambda: work(50)), num_lines(lambda: work(400))
    assert long < 12 * short


def in_pieces(name: str, text: str) -> Any:
    parser = ReplyParser(TOOL_FORMATS[name])
    events = [event for at in range(0, len(text), 4) for event in parser.feed(text[at : at + 4])]
    return parsed_reply([*events, *parser.end()])


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("pythonic", '[f(a="', '")]'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', '"}}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {"a": "', '"}}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "', '"}'),
        ("qwen3_xml", "<tool_call><function=f><parameter=a>", "</parameter></function></tool_call>"),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": "', '"}'),
    ],
)
def test_a_long_argument_is_read_once(name: str, start: str, end: str) -> None:
    (call,) = in_pieces(name, f"{start}{'word ' * 400}x{end}").calls
    assert json.loads(call.arguments) == {"a": "word " * 400 + "x"}
    check_linear(lambda num: in_pieces(name, f"{start}{'word ' * num}x{end}"))


@pytest.mark.parametrize(
    "pieces",
    [
        ["<|channel|>", "analysis", "<|message|>", "x", "<|end|>"],
        ["<|channel|>", "analysis", "<|message|>", "x", "<|call|>"],
        ["<|channel|>", "analysis"],
    ],
)
def test_reasoning_tokens_are_counted_in_one_pass(pieces: list[str]) -> None:
    check_linear(lambda num: num_reasoning_tokens(pieces * num, HARMONY))


@pytest.mark.parametrize(
    ("pieces", "num"),
    [
        (["<|channel|>", "analysis", "<|message|>", "x", "<|end|>", "y"], 5),
        (["<|channel|>", "analysis", "<|message|>", "x", "<|call|>", "y"], 4),
        (["<|channel|>", "analysis", "<|message|>", "x", "y"], 5),
        (["<|channel|>", "analysis", "x"], 0),
        (["<|channel|>", "final", "<|message|>", "x", "<|end|>"], 0),
        (["<|channel|>", "analysis", "<|message|>", "x", "<|end|>", "<|start|>"] * 2, 10),
    ],
)
def test_the_reasoning_of_harmony_is_counted(pieces: list[str], num: int) -> None:
    assert num_reasoning_tokens(pieces, HARMONY) == num


class Counted(str):
    """Text that counts the characters that searches in it read."""

    num_read = 0

    def find(self, part: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
        found = super().find(part, start, len(self) if end is None else end)
        Counted.num_read += (found if found >= 0 else min(len(self), end or len(self))) - start
        return found

    def __getitem__(self, key: Any) -> Counted:
        return Counted(super().__getitem__(key))

    def __radd__(self, before: str) -> Counted:
        return Counted(before + str(self))

    def lstrip(self, characters: str | None = None) -> Counted:
        return Counted(super().lstrip(characters))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("harmony", "<|message|>a<|end|>"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
        ("hermes", "<tool_call>x"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("qwen3_xml", "<tool_call><function=f><parameter=a>b</parameter></function></tool_call>"),
        ("qwen3_xml", "<tool_call><function=f>x"),
        ("mistral", "[TOOL_CALLS]f{}"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ],
)
def test_a_search_does_not_read_the_rest_of_a_reply_again_and_again(name, part):
    parser = ReplyParser(TOOL_FORMATS[name])
    text = Counted(part * (20_000 // len(part)))
    Counted.num_read = 0
    parser.feed(text)
    parser.end()
    assert Counted.num_read < 10 * len(text)
