"""Traces made from traces: fitted to a context length, or a part of one.

Owns: how a trace is cut to what a model can serve or an experiment wants.
Does not know: formats, arrivals or engines.
Called by: scripts.
"""

from __future__ import annotations

from dataclasses import replace

from pensieve_jax.workload.checks import check_count
from pensieve_jax.workload.trace import ConversationTrace, Trace, TurnTrace


def cap_context(trace: Trace, max_context_tokens: int) -> Trace:
    """Conversations up to the turn that would outgrow the context; without those whose first turn does."""
    check_count("max_context_tokens", max_context_tokens, at_least=2)
    capped = (_cap(conversation, max_context_tokens) for conversation in trace.conversations)
    return Trace(trace.name, tuple(conversation for conversation in capped if conversation is not None))


def with_min_turns(trace: Trace, min_turns: int) -> Trace:
    """The conversations of at least so many turns."""
    check_count("min_turns", min_turns)
    long = (conversation for conversation in trace.conversations if len(conversation.turns) >= min_turns)
    return Trace(trace.name, tuple(long))


def _cap(conversation: ConversationTrace, max_context_tokens: int) -> ConversationTrace | None:
    turns: list[TurnTrace] = []
    context_tokens = 0
    for turn in conversation.turns:
        context_tokens += turn.num_tokens
        if context_tokens > max_context_tokens:
            break
        turns.append(turn)
    return replace(conversation, turns=tuple(turns)) if turns else None
