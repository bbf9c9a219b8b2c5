"""Reader of BurstGPT: its CSV as published, and JSON lines of sessions derived from it.

Owns: both formats, and which tokens of a request in the published file are new.
Does not know: how gaps become think times (`think`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pensieve_lab.workload.errors import TraceError
from pensieve_lab.workload.rows import Row, UniqueIds, first_line, read_csv, read_json_lines
from pensieve_lab.workload.trace import ConversationTrace, TurnTrace

_SESSION: Final = "Session ID"
# The recorded service sent this many rounds with each request, and dropped earlier ones.
_ROUNDS_SENT: Final = 4


def read_burstgpt(path: Path, on_skip: Callable[[TraceError], None] | None) -> Iterator[ConversationTrace]:
    """Read the published CSV, or `{"session", "start_s", "turns": [{"gap_s", "new_tokens",
    "output_tokens"}]}`.

    CSV: `Timestamp` (s), `Request tokens`, `Response tokens`, and in the third file also `Session ID` and
    `Elapsed time` (s, of the answer). Rows of files without sessions become conversations of one turn. In a
    file with sessions, rows without a session (its API log) are left out, because their context is unknown.
    Failed requests, whose response has no token, are left out too. A request holds the last four rounds of
    its session: its new tokens are those beyond these rounds, at least 1.

    JSON: a gap runs from arrival to arrival, null for a first turn. Turns marked as an anomaly, whose new
    tokens could not be recovered from the logged context, are used as they are.

    `on_skip` is called once for each kind of rows that were left out.
    """
    if first_line(path).startswith("{"):
        ids = UniqueIds()
        return (_session(row, ids) for row in read_json_lines(path))
    return _read_csv(path, on_skip or (lambda skipped: None))


def _session(row: Row, ids: UniqueIds) -> ConversationTrace:
    turns = tuple(_turn(turn, index) for index, turn in enumerate(row.rows("turns", at_least=1)))
    return ConversationTrace(ids.add(row, "session"), turns, row.time("start_s"))


def _turn(row: Row, index: int) -> TurnTrace:
    if index == 0 and row.has("gap_s"):
        raise row.error("gap_s", "null: nothing came before a first turn")
    gap_s = row.time("gap_s") if index else None
    return TurnTrace(row.count("new_tokens"), row.count("output_tokens"), gap_s)


@dataclass(slots=True)
class _Session:
    """Session under construction; `last_s` and `last_elapsed_s` are of its latest request."""

    start_s: float
    last_s: float
    last_elapsed_s: float | None
    turns: list[TurnTrace] = field(default_factory=list)


def _read_csv(path: Path, on_skip: Callable[[TraceError], None]) -> Iterator[ConversationTrace]:
    sessions: dict[str, _Session] = {}
    num_failed = num_unknown = 0
    first_s = previous_s = None
    for index, row in enumerate(read_csv(path)):
        time_s = row.time("Timestamp")
        if previous_s is not None and time_s < previous_s:
            raise row.error("Timestamp", f"at least {previous_s:g}, the time of the row before")
        previous_s = time_s
        first_s = time_s if first_s is None else first_s
        request, response = row.count("Request tokens", at_least=0), row.count("Response tokens", at_least=0)
        has_sessions = _SESSION in row.values
        if has_sessions and not row.has(_SESSION):
            num_unknown += 1
        elif not request or not response:
            num_failed += 1
        else:
            session_id = row.identifier(_SESSION) if has_sessions else str(index)
            elapsed_s = row.optional_time("Elapsed time")
            session = sessions.setdefault(session_id, _Session(time_s - first_s, time_s, None))
            session.turns.append(_logged_turn(session, time_s, request, response))
            session.last_s, session.last_elapsed_s = time_s, elapsed_s
    for number, what in ((num_unknown, "without a Session ID"), (num_failed, "without a token in or out")):
        if number:
            on_skip(TraceError(path, None, f"has {number:,} requests {what}, which are left out"))
    for session_id, session in sessions.items():
        yield ConversationTrace(session_id, tuple(session.turns), session.start_s)


def _logged_turn(session: _Session, time_s: float, request: int, response: int) -> TurnTrace:
    new_tokens = max(request - _sent_again(session.turns), 1)
    if not session.turns:
        return TurnTrace(new_tokens, response)
    gap_s = time_s - session.last_s
    elapsed_s = session.last_elapsed_s
    # Both times are whole seconds, so an answer may seem to end after the next request.
    think_s = None if elapsed_s is None else max(gap_s - elapsed_s, 0.0)
    return TurnTrace(new_tokens, response, gap_s, think_s)


def _sent_again(turns: Sequence[TurnTrace]) -> int:
    return sum(turn.num_tokens for turn in turns[-_ROUNDS_SENT:])
