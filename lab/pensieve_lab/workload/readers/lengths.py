"""Reader of lengths: the tokens of each turn, and times if they were recorded.

Owns: this format, as CSV and as JSON, such as token counts of ShareGPT or UltraChat.
Does not know: texts (`chats` counts them itself).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pensieve_lab.workload.checks import is_count
from pensieve_lab.workload.rows import Row, UniqueIds, first_line, read_csv, read_json
from pensieve_lab.workload.trace import ConversationTrace, TurnTrace, unused_id

_PROMPT: Final = ("prompt_tokens", "num_prefill_tokens")
_OUTPUT: Final = ("output_tokens", "num_decode_tokens")


@dataclass(slots=True)
class _Conversation:
    """Conversation under construction, from rows that need not be adjacent."""

    first_s: float | None = None
    last_s: float | None = None
    turns: list[TurnTrace] = field(default_factory=list)


def read_lengths(path: Path) -> Iterator[ConversationTrace]:
    """Read CSV, JSON lines or a JSON array, in one of two forms.

    A row per turn has `prompt_tokens,output_tokens` (the new ones of the turn). Optional fields are
    `conversation_id`, whose rows are its turns in order, and `time_s`, the turn's arrival by any clock;
    arrivals count from the earliest. A row without an id is a conversation of one turn. This covers the
    ShareGPT lengths of Sarathi-Serve, which call their columns `num_prefill_tokens,num_decode_tokens` and
    include the history in the first.

    A JSON object per conversation has `{"turns": [[prompt, output], ...]}`, with or without an `id`.
    """
    is_json = first_line(path)[:1] in ("{", "[")
    rows = read_json(path) if is_json else read_csv(path)
    found: dict[str | int, _Conversation] = {}  # by id, or by index in the file
    ids = UniqueIds()
    for index, row in enumerate(rows):
        if "turns" in row.values:
            name = ids.add(row, "id") if row.has("id") else None
            if name in found:
                raise row.error("id", "unique in the file; rows of single turns use it too")
            found[index if name is None else name] = _Conversation(turns=list(_pairs(row)))
        else:
            name = row.identifier("conversation_id") if row.has("conversation_id") else None
            if name is not None and ids.has(name):
                raise row.error("conversation_id", "different from the id of a row with all turns")
            _add(found.setdefault(index if name is None else name, _Conversation()), row)
    times_s = (one.first_s for one in found.values() if one.first_s is not None)
    start_s = min(times_s, default=0.0)
    for key, one in found.items():
        arrival_s = None if one.first_s is None else one.first_s - start_s
        # An index must not equal an id that looks like one.
        name = key if isinstance(key, str) else unused_id(str(key), found, "#")
        yield ConversationTrace(name, tuple(one.turns), arrival_s)


def _add(conversation: _Conversation, row: Row) -> None:
    prompt, output = row.count(row.name_of(*_PROMPT)), row.count(row.name_of(*_OUTPUT))
    time_s = row.optional_time("time_s")
    gap_s = None
    if not conversation.turns:
        conversation.first_s = time_s
    elif time_s is not None and conversation.last_s is not None:
        if time_s < conversation.last_s:
            raise row.error("time_s", f"at least {conversation.last_s:g}, the time of the turn before")
        gap_s = time_s - conversation.last_s
    conversation.last_s = time_s
    conversation.turns.append(TurnTrace(prompt, output, gap_s))


def _pairs(row: Row) -> Iterator[TurnTrace]:
    for index, pair in enumerate(row.items("turns", at_least=1)):
        match pair:
            case [prompt, output] if is_count(prompt, 1) and is_count(output, 1):
                yield TurnTrace(prompt, output)
            case _:
                raise row.error(
                    "turns", f"a list of [prompt, output], ints of at least 1; item {index} is not"
                )
