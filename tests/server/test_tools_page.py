"""The examples of the pages on tool calls and reasoning are what a server takes and answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pensieve_jax.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from tests.launching import ROOT
from tests.server.fakes import ask
from tests.server.scripted import ScriptedServer
from tests.text.tool_templates import HERMES

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call>'


def blocks_of(page: str) -> list[Any]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]


def names_of(page: str) -> set[str]:
    """Return the names in the first column of the page's table of formats."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("## Formats")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def message_of(server: ScriptedServer, request: Any) -> Any:
    status, answer = ask(server.harness, "POST", "/v1/chat/completions", request)
    server.close()
    assert status == 200, answer
    return answer["choices"][0]["message"]


def test_the_example_of_a_call_is_answered(tmp_path: Path) -> None:
    request, expected = blocks_of("tools.md")
    message = message_of(ScriptedServer(tmp_path / "history.sqlite", [CALL], HERMES), request)
    message["tool_calls"][0]["id"] = "call_..."
    assert message == expected


def test_the_example_of_reasoning_is_answered(tmp_path: Path) -> None:
    (expected,) = blocks_of("reasoning.md")
    server = ScriptedServer(tmp_path / "history.sqlite", ["<think>\nIs it so?\n</think>\n\nYes, it is."])
    assert message_of(server, {"messages": [{"role": "user", "content": "so?"}]}) == expected


def test_the_tables_name_all_formats() -> None:
    assert names_of("tools.md") == set(TOOL_FORMATS)
    assert names_of("reasoning.md") == set(REASONING_FORMATS)
