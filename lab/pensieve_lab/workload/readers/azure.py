"""Reader of the Azure LLM inference traces: CSV of requests without sessions, read as conversations of one
turn.

Owns: this format.
Does not know: conversations; `make_sessions` can give its arrivals to those of another trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pensieve_lab.workload.rows import Row, read_csv
from pensieve_lab.workload.trace import ConversationTrace, TurnTrace


def read_azure(path: Path) -> Iterator[ConversationTrace]:
    """Read `TIMESTAMP,ContextTokens,GeneratedTokens`; arrivals count from the earliest."""
    rows = [(_timestamp_s(row), row) for row in read_csv(path)]
    start_s = min((time_s for time_s, _ in rows), default=0.0)
    for index, (time_s, row) in enumerate(rows):
        turn = TurnTrace(row.count("ContextTokens"), row.count("GeneratedTokens"))
        yield ConversationTrace(str(index), (turn,), time_s - start_s)


def _timestamp_s(row: Row) -> float:
    try:
        time = datetime.fromisoformat(row.text("TIMESTAMP"))
    except ValueError as error:
        raise row.error("TIMESTAMP", "a date and a time of day, as 2023-11-16 18:15:46.68") from error
    # The files of 2023 have no time zone, those of 2024 do; only differences matter.
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
