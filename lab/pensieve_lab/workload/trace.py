"""A workload as values: conversations of turns, each with its prompt and output tokens.

Owns: the trace type that all readers and generators make and all benchmarks and the simulator use. Owns its
digest and its file format, which feeds all systems of a benchmark.
Does not know: token ids or texts, other formats (`readers`), when sessions start (`arrivals`), any engine.

A conversation only grows: turn k is sent on top of everything that was said before it. A recorded session
whose context was cut or rewritten is therefore more than one conversation here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from pensieve_lab.workload.checks import check_count, check_time
from pensieve_lab.workload.errors import TraceError, WorkloadError
from pensieve_lab.workload.rows import Row, UniqueIds, read_json_lines, write_text

_FILE_FORMAT: Final = "pensieve-trace-1"


@dataclass(frozen=True, slots=True)
class TurnTrace:
    """Turn: what the user adds to the conversation, and how long the answer is.

    Attributes:
      prompt_tokens: new tokens of this turn, without the history; at least 1.
      output_tokens: tokens of the answer; at least 1.
      gap_s: recorded seconds from the arrival of the turn before to the arrival of this one; None for a
        first turn, and if it was not recorded.
      think_s: recorded seconds from the end of the answer before to the arrival of this turn; None if it was
        not recorded and must be drawn.
    """

    prompt_tokens: int
    output_tokens: int
    gap_s: float | None = None
    think_s: float | None = None

    def __post_init__(self) -> None:
        """Raise WorkloadError for a length below 1 or a time below 0."""
        check_count("prompt_tokens", self.prompt_tokens)
        check_count("output_tokens", self.output_tokens)
        if self.gap_s is not None:
            check_time("gap_s", self.gap_s)
        if self.think_s is not None:
            check_time("think_s", self.think_s)

    @property
    def num_tokens(self) -> int:
        """Tokens that the turn adds to its conversation."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class ConversationTrace:
    """Conversation of turns that build on one another.

    Attributes:
      conversation_id: id, unique in its trace.
      turns: turns in the order in which they are sent; at least one.
      arrival_s: recorded time of the first turn, in seconds since the start of the trace; None if it was not
        recorded.
      session_id: session of several conversations that this one is part of, as forks and sub-agents are; None
        if it is a whole session.
    """

    conversation_id: str
    turns: tuple[TurnTrace, ...]
    arrival_s: float | None = None
    session_id: str | None = None

    def __post_init__(self) -> None:
        """Raise WorkloadError for an empty conversation or id, or an arrival before the trace begins."""
        if not isinstance(self.conversation_id, str) or not self.conversation_id:
            raise WorkloadError("conversation_id", self.conversation_id, "a non-empty string")
        if self.session_id is not None and (not isinstance(self.session_id, str) or not self.session_id):
            raise WorkloadError("session_id", self.session_id, "None or a non-empty string")
        if not self.turns:
            raise WorkloadError(f"turns of {self.conversation_id!r}", self.turns, "at least one turn")
        if self.arrival_s is not None:
            check_time("arrival_s", self.arrival_s)

    @property
    def root_id(self) -> str:
        """Id of the session, or of the conversation if it is a whole session."""
        return self.session_id or self.conversation_id

    @property
    def num_tokens(self) -> int:
        """Length of the finished conversation."""
        return self.num_history_tokens(len(self.turns))

    def num_history_tokens(self, turn_index: int) -> int:
        """Return the length of the history that turn `turn_index` builds on."""
        return sum(turn.num_tokens for turn in self.turns[:turn_index])


@dataclass(frozen=True)
class Trace:
    """Set of recorded or generated conversations.

    Attributes:
      name: origin, for reports; not part of the digest.
      conversations: conversations with unique ids. Their order is part of the digest, since seeded draws
        depend on it.
    """

    name: str
    conversations: tuple[ConversationTrace, ...]

    def __post_init__(self) -> None:
        """Raise WorkloadError for two conversations with one id."""
        seen: set[str] = set()
        for conversation in self.conversations:
            if conversation.conversation_id in seen:
                raise WorkloadError("conversation_id", conversation.conversation_id, "unique in the trace")
            seen.add(conversation.conversation_id)

    @property
    def num_turns(self) -> int:
        """Total turns of all conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hex over the lines of the trace's file; equal digests mean equal workloads."""
        digest = hashlib.sha256()
        for line in self._lines():
            digest.update(line.encode())
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a header and one JSON line per conversation; compressed if the name ends in `.gz`."""
        header = {
            "format": _FILE_FORMAT,
            "name": self.name,
            "digest": self.digest,
            "num_conversations": len(self.conversations),
        }
        write_text(Path(path), "".join([json.dumps(header) + "\n", *self._lines()]))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file of `save`; raises TraceError for other files, and for lost or altered lines."""
        path = Path(path)
        rows = read_json_lines(path)
        header = next(rows, None)
        if header is None or header.values.get("format") != _FILE_FORMAT:
            raise TraceError(path, 1, f'must be a header with "format": "{_FILE_FORMAT}"')
        name, digest = header.text("name"), header.text("digest")
        num_conversations = header.count("num_conversations", at_least=0)
        ids = UniqueIds()
        trace = cls(name, tuple(_read_conversation(row, ids) for row in rows))
        if len(trace.conversations) != num_conversations:
            reason = f"has {len(trace.conversations)} conversations, but its header says {num_conversations}"
            raise TraceError(path, None, reason)
        if trace.digest != digest:
            raise TraceError(path, None, f"has the digest {trace.digest}, but its header says {digest}")
        return trace

    def _lines(self) -> Iterator[str]:
        return (json.dumps(_to_json(conversation)) + "\n" for conversation in self.conversations)


def unused_id(conversation_id: str, taken: Container[str | int], mark: str) -> str:
    """Append `mark` to a generated id until it is not among those `taken`."""
    while conversation_id in taken:
        conversation_id += mark
    return conversation_id


def _to_json(conversation: ConversationTrace) -> dict[str, object]:
    turns = []
    for turn in conversation.turns:
        lengths = {"prompt_tokens": turn.prompt_tokens, "output_tokens": turn.output_tokens}
        turns.append(lengths | _times(gap_s=turn.gap_s, think_s=turn.think_s))
    ids = {"conversation_id": conversation.conversation_id}
    if conversation.session_id is not None:
        ids["session_id"] = conversation.session_id
    return ids | _times(arrival_s=conversation.arrival_s) | {"turns": turns}


def _times(**times: float | None) -> dict[str, float]:
    # 5 and 5.0, and 0.0 and -0.0, are equal; they get one spelling so that equal traces have equal digests.
    return {name: float(time_s) + 0.0 for name, time_s in times.items() if time_s is not None}


def _read_conversation(row: Row, ids: UniqueIds) -> ConversationTrace:
    turns = tuple(
        TurnTrace(
            turn.count("prompt_tokens"),
            turn.count("output_tokens"),
            turn.optional_time("gap_s"),
            turn.optional_time("think_s"),
        )
        for turn in row.rows("turns", at_least=1)
    )
    session_id = row.identifier("session_id") if row.has("session_id") else None
    return ConversationTrace(
        ids.add(row, "conversation_id"), turns, row.optional_time("arrival_s"), session_id
    )
