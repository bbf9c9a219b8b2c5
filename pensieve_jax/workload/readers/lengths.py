"""Reader of lengths: how many tokens each turn has, and nothing else unless it was recorded.

Owns: this format, as CSV and as JSON; it is what becomes of a ShareGPT or UltraChat that somebody counted.
Does not know: texts (`chats` counts them itself).
Called by: `read_trace`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pensieve_jax.workload.rows import Row, UniqueIds, first_line, read_csv, read_json
from pensieve_jax.workload.trace import ConversationTrace, TurnTrace

_PROMPT: Final = ("prompt_tokens", "num_prefill_tokens")
_OUTPUT: Final = ("output_tokens", "num_decode_tokens")


@dataclass(slots=True)
class _Conversation:
    """In the making, from rows that need not lie together."""

    arrival_s: float | None = None
    last_s: float | None = None
    turns: list[TurnTrace] = field(default_factory=list)


def read_lengths(path: Path) -> Iterator[ConversationTrace]:
    """CSV, JSON lines or a JSON array, in one of two shapes.

    A row for each turn: `prompt_tokens,output_tokens` (the new ones of the turn), and where they are known
    `conversation_id`, whose rows are its turns in their order, and `time_s`, when the turn arrived. Without
    an id a row is a conversation of one turn; so are the ShareGPT lengths of Sarathi-Serve, which call their
    columns `num_prefill_tokens,num_decode_tokens` and hold the history in the first.

    Or, in JSON, an object for each conversation: `{"turns": [[prompt, output], ...]}`, with an `id` or
    without.
    """
    is_json = first_line(path)[:1] in ("{", "[")
    rows = read_json(path) if is_json else read_csv(path)
    found: dict[str, _Conversation] = {}
    ids = UniqueIds()
    for index, row in enumerate(rows):
        if "turns" in row.values:
            conversation_id = ids.add(row, "id") if row.has("id") else str(index)
            yield ConversationTrace(conversation_id, tuple(_pairs(row)))
        else:
            grouped = row.has("conversation_id")
            conversation_id = row.identifier("conversation_id") if grouped else str(index)
            _add(found.setdefault(conversation_id, _Conversation()), row)
    for conversation_id, one in found.items():
        yield ConversationTrace(conversation_id, tuple(one.turns), one.arrival_s)


def _add(conversation: _Conversation, row: Row) -> None:
    prompt, output = row.count(row.name_of(*_PROMPT)), row.count(row.name_of(*_OUTPUT))
    time_s = row.optional_time("time_s")
    gap_s = None
    if not conversation.turns:
        conversation.arrival_s = time_s
    elif time_s is not None and conversation.last_s is not None:
        if time_s < conversation.last_s:
            raise row.error("time_s", f"at least {conversation.last_s:g}, the time of the turn before")
        gap_s = time_s - conversation.last_s
    conversation.last_s = time_s
    conversation.turns.append(TurnTrace(prompt, output, gap_s))


def _pairs(row: Row) -> Iterator[TurnTrace]:
    for index, pair in enumerate(row.items("turns", at_least=1)):
        match pair:
            case [int(prompt), int(output)] if prompt > 0 and output > 0:
                yield TurnTrace(prompt, output)
            case _:
                raise row.error(
                    "turns", f"a list of [prompt, output], ints of at least 1; item {index} is none"
                )
