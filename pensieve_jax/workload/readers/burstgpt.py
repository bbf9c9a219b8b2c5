"""Reader of BurstGPT sessions: JSON lines of sessions with real gaps.

Owns: this format.
Does not know: how gaps become think times (`think`).
Called by: `read_trace`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pensieve_jax.workload.rows import Row, UniqueIds, read_json_lines
from pensieve_jax.workload.trace import ConversationTrace, TurnTrace


def read_burstgpt(path: Path) -> Iterator[ConversationTrace]:
    """`{"session", "start_s", "turns": [{"gap_s", "new_tokens", "output_tokens"}]}`.

    A gap runs from arrival to arrival, null for a first turn. Turns marked as an anomaly, whose new tokens
    could not be recovered from the logged context, are taken as they stand.
    """
    ids = UniqueIds()
    for row in read_json_lines(path):
        turns = tuple(_turn(turn, index) for index, turn in enumerate(row.rows("turns", at_least=1)))
        yield ConversationTrace(ids.add(row, "session"), turns, row.time("start_s"))


def _turn(row: Row, index: int) -> TurnTrace:
    if index == 0 and row.has("gap_s"):
        raise row.error("gap_s", "null: nothing came before a first turn")
    gap_s = row.time("gap_s") if index else None
    return TurnTrace(row.count("new_tokens"), row.count("output_tokens"), gap_s)
