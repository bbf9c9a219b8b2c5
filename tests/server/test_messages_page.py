"""docs/messages.md: its requests are answered, and its program runs."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from pensieve_jax.text import Tokenizer, byte_tokenizer
from tests.fake_llm import fake_llm
from tests.launching import ROOT
from tests.server.openai.test_tool_input import CHAT, ToolServer
from tests.text.tool_templates import QWEN3

PAGE = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")


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
    tokenizer = Tokenizer(byte_tokenizer()._backend, eos_token="<eos>", chat_template=QWEN3)
    llm, _ = fake_llm(monkeypatch, tokenizer=tokenizer)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(program, "messages.md", "exec"), {"llm": llm})
    (turn,) = llm.history("sums").turns
    assert [tool["function"]["name"] for tool in turn.template_input.tools] == ["add"]
