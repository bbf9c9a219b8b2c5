"""Workloads: conversations from public traces or made to measure, and when they are sent.

Owns: the trace type, readers of public formats, the synthetic generator, arrivals and think times.
Does not know: jax, engines, clocks or token ids: lengths and times only.
Called by: scripts and `pensieve_jax.simulator`.
"""

from pensieve_jax.workload.arrivals import Session, make_sessions, start_mid_life
from pensieve_jax.workload.errors import TraceError, WorkloadError
from pensieve_jax.workload.readers import FORMATS, TEXT_FORMATS, CountTokens, OnSkip, read_trace
from pensieve_jax.workload.summary import Distribution, TraceSummary, summarize
from pensieve_jax.workload.synthetic import (
    SHAPES,
    SHAREGPT,
    ULTRACHAT,
    ConversationShape,
    Lengths,
    generate_trace,
)
from pensieve_jax.workload.think import ExponentialThink, LognormalThink, RecordedThink, ThinkTime
from pensieve_jax.workload.trace import ConversationTrace, Trace, TurnTrace
from pensieve_jax.workload.transforms import cap_context, with_min_turns

__all__ = [
    "FORMATS",
    "SHAPES",
    "SHAREGPT",
    "TEXT_FORMATS",
    "ULTRACHAT",
    "ConversationShape",
    "ConversationTrace",
    "CountTokens",
    "Distribution",
    "ExponentialThink",
    "Lengths",
    "LognormalThink",
    "OnSkip",
    "RecordedThink",
    "Session",
    "ThinkTime",
    "Trace",
    "TraceError",
    "TraceSummary",
    "TurnTrace",
    "WorkloadError",
    "cap_context",
    "generate_trace",
    "make_sessions",
    "read_trace",
    "start_mid_life",
    "summarize",
    "with_min_turns",
]
