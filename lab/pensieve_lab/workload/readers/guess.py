"""Guesses the format of a file from its content.

Owns: the fields that distinguish formats.
Does not know: how any format is read, or whether the rest of a file has that format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pensieve_lab.workload.errors import TraceError
from pensieve_lab.workload.rows import first_line, read_json

# Fields of the first object or CSV header; the first entry that fits decides.
_FIELDS: Final = (
    ("pensieve", {"format", "digest", "num_conversations"}),
    ("bailian", {"chat_id", "parent_chat_id", "input_length"}),
    ("mooncake", {"timestamp", "input_length", "output_length"}),
    ("mooncake", {"timestamp_ms", "input_tokens", "output_tokens"}),
    ("agent-sessions", {"block_size", "requests"}),
    ("sharegpt", {"conversations"}),
    ("openai", {"messages"}),
    ("ultrachat", {"data"}),
    ("burstgpt", {"session", "turns"}),
    ("burstgpt", {"Timestamp", "Request tokens", "Response tokens"}),
    ("azure", {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    ("lengths", {"prompt_tokens", "output_tokens"}),
    ("lengths", {"num_prefill_tokens", "num_decode_tokens"}),
)


def guess_format(path: str | Path) -> str:
    """Return a key of `FORMATS`; raises TraceError if nothing fits, OSError if the file cannot be opened."""
    path = Path(path)
    if path.is_dir():
        return "agent-sessions"
    first = first_line(path)
    if first.startswith(("{", "[")):
        values = next((row.values for row in read_json(path)), {})
    else:
        values = dict.fromkeys(name.strip().strip('"') for name in first.split(","))
    found = next((name for name, fields in _FIELDS if fields <= values.keys()), None)
    found = found or _of_turns(values)
    if found is None:
        shown = ", ".join(map(repr, list(values)[:6])) or "none"
        raise TraceError(path, 1, f"is of no format that is known by its fields ({shown}): name the format")
    return found


def _of_turns(values: Mapping[str, object]) -> str | None:
    """Distinguish pairs of a speaker and a text from pairs of lengths."""
    match values.get("turns"):
        case [[str(), str()], *_]:
            return "dialogues"
        case [[int(), int()], *_]:
            return "lengths"
    return None
