"""Streams of Anthropic's API, added up as its client does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_FIELDS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", "json"),
}


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; each has its type as its name, too."""
    parts = raw.decode().split("\n\n")
    assert parts.pop() == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def blocks_of(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the content blocks that the events of blocks add up to."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        assert is_open == (event["type"] != "content_block_start")
        assert event["index"] == len(blocks) - is_open
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            field, name = _FIELDS[delta["type"]]
            assert delta.keys() == {"type", field} and delta[field]
            blocks[-1][name] += delta[field]
        else:
            assert event["type"] == "content_block_stop"
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(written or "{}")
    return blocks
