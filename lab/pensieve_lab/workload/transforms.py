"""Traces derived from traces: cut to a context length, or reduced to a part.

Owns: how a trace is cut to what a model can serve or an experiment needs.
Does not know: formats, arrivals or engines.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

from pensieve_lab.workload.checks import check_count, check_positive, check_time
from pensieve_lab.workload.errors import WorkloadError
from pensieve_lab.workload.trace import ConversationTrace, Trace, TurnTrace


def cap_context(trace: Trace, max_context_tokens: int) -> Trace:
    """Cut conversations before the turn that exceeds the context; drop those whose first turn does."""
    check_count("max_context_tokens", max_context_tokens, at_least=2)
    capped = (_cap(conversation, max_context_tokens) for conversation in trace.conversations)
    return Trace(trace.name, tuple(conversation for conversation in capped if conversation is not None))


def with_min_turns(trace: Trace, min_turns: int) -> Trace:
    """Keep the conversations of at least `min_turns` turns."""
    check_count("min_turns", min_turns)
    long = (conversation for conversation in trace.conversations if len(conversation.turns) >= min_turns)
    return Trace(trace.name, tuple(long))


def split_by_session(trace: Trace) -> tuple[Trace, Trace]:
    """Split into the half for choosing parameters and the held-out half; the result is always the same.

    A session is held out if the first byte of the SHA-256 of its id is odd. The forks and sub-agents of a
    session stay together, because they have the id of their root. The rule uses neither random draws nor the
    order of the file, so an added session moves no other.
    """
    held_out = [_is_held_out(conversation.root_id) for conversation in trace.conversations]
    pairs = list(zip(trace.conversations, held_out, strict=True))
    chosen, kept = (tuple(one for one, is_out in pairs if is_out is part) for part in (False, True))
    return Trace(trace.name, chosen), Trace(trace.name, kept)


def between(trace: Trace, begin_s: float, end_s: float) -> Trace:
    """Keep the conversations that begin within these recorded times, up to their last turn before `end_s`.

    The result equals a recording from `begin_s` to `end_s`; `begin_s` becomes time 0.
    """
    check_time("begin_s", begin_s)
    check_positive("end_s - begin_s", end_s - begin_s)
    cut = (_between(conversation, begin_s, end_s) for conversation in trace.conversations)
    return Trace(trace.name, tuple(conversation for conversation in cut if conversation is not None))


def from_first_arrival(trace: Trace) -> Trace:
    """Shift arrivals so that the first conversation begins at 0; without recorded arrivals change nothing."""
    arrivals_s = [one.arrival_s for one in trace.conversations if one.arrival_s is not None]
    begin_s = min(arrivals_s, default=0.0)
    moved = (
        one if one.arrival_s is None else replace(one, arrival_s=one.arrival_s - begin_s)
        for one in trace.conversations
    )
    return Trace(trace.name, tuple(moved))


def _between(conversation: ConversationTrace, begin_s: float, end_s: float) -> ConversationTrace | None:
    if conversation.arrival_s is None:
        raise WorkloadError(f"arrival_s of {conversation.conversation_id!r}", None, "recorded")
    if not begin_s <= conversation.arrival_s < end_s:
        return None
    times_s = itertools.accumulate(
        (turn.gap_s or 0.0 for turn in conversation.turns), initial=conversation.arrival_s
    )
    turns = [
        turn
        for turn, time_s in zip(conversation.turns, itertools.islice(times_s, 1, None), strict=True)
        if time_s < end_s
    ]
    return replace(conversation, arrival_s=conversation.arrival_s - begin_s, turns=tuple(turns))


def _is_held_out(session_id: str) -> bool:
    return hashlib.sha256(session_id.encode()).digest()[0] % 2 == 1


def _cap(conversation: ConversationTrace, max_context_tokens: int) -> ConversationTrace | None:
    turns: list[TurnTrace] = []
    context_tokens = 0
    for turn in conversation.turns:
        context_tokens += turn.num_tokens
        if context_tokens > max_context_tokens:
            break
        turns.append(turn)
    return replace(conversation, turns=tuple(turns)) if turns else None
