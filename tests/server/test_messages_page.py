"""docs/messages.md: its requests are answered, and its program runs."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from pensieve_jax.core.template_input import ReplyFormat
from pensieve_jax.text import Tokenizer, byte_tokenizer, replies
from pensieve_jax.text.replies import ReplyParts
from pensieve_jax.text.reply_parser import ReplyParser
from tests.fake_llm import fake_llm
from tests.launching import ROOT
from tests.server.openai.test_tool_input import CHAT, ToolServer
from tests.text.tool_templates import QWEN3

PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def test_the_requests_are_answered(tmp_path: Path) -> None:
    bodies = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
    server = ToolServer(tmp_path / "history.sqlite")
    with closing(server.stored):
        contexts = []
        for body in bodies:
            server.answered(CHAT, "fine", **body | {"model": "fake", "store": True})
            contexts.append(server.context)
    tools, prefill = bodies
    texts = [tools["messages"][-1]["content"], tools["tools"][0]["function"]["description"]]
    assert all(text in contexts[0] for text in texts)
    assert contexts[1].endswith(prefill["messages"][-1]["content"]) and prefill["continue_final_message"]


def test_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model calls the tool in its first reply, and answers in the next."""
    read, seen = replies._parts, []

    def first_is_a_call(parser: ReplyParser, text: str, reply: ReplyFormat, turn: str) -> ReplyParts:
        seen.append(turn)
        return read(parser, CALL if turn == seen[0] else text, reply, turn)

    monkeypatch.setattr(replies, "_parts", first_is_a_call)
    tokenizer = Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=QWEN3)
    llm, _ = fake_llm(monkeypatch, tokenizer=tokenizer)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(program, "messages.md", "exec"), {"llm": llm})
    turns = llm.history("sums").turns
    assert [turn.messages[0]["role"] for turn in turns] == ["user", "tool"]
    assert all(turn.template_input.tools[0]["function"]["name"] == "add" for turn in turns)
