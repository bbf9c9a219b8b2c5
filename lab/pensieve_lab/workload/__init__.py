"""Workloads: conversations from public traces or a generator, their users, and the figures of a run.

Owns: the trace type, readers of public formats, the synthetic generator, arrivals and think times; users,
their turns and the answers, and the figures of a run, measured or simulated.
Does not know: jax, engines or models.
"""

from pensieve_lab.workload.arrivals import Session, make_sessions, start_mid_life
from pensieve_lab.workload.client import Client
from pensieve_lab.workload.errors import TraceError, WorkloadError
from pensieve_lab.workload.figures import UNITS, answer_figures, throughput
from pensieve_lab.workload.readers import (
    FORMATS,
    TEXT_FORMATS,
    CountTokens,
    OnSkip,
    count_words,
    guess_format,
    read_trace,
)
from pensieve_lab.workload.server import History, Server
from pensieve_lab.workload.step_totals import StepLog, Steps, StepTotals, step_figures, subtract_steps
from pensieve_lab.workload.summary import Distribution, TraceSummary, summarize
from pensieve_lab.workload.synthetic import (
    SHAPES,
    SHAREGPT,
    ULTRACHAT,
    ConversationShape,
    Lengths,
    generate_trace,
)
from pensieve_lab.workload.think import ExponentialThink, LognormalThink, RecordedThink, ThinkTime
from pensieve_lab.workload.trace import ConversationTrace, Trace, TurnTrace
from pensieve_lab.workload.transforms import (
    between,
    cap_context,
    from_first_arrival,
    split_by_session,
    with_min_turns,
)
from pensieve_lab.workload.turns import Answer, UserTurn

__all__ = [
    "FORMATS",
    "SHAPES",
    "SHAREGPT",
    "TEXT_FORMATS",
    "ULTRACHAT",
    "UNITS",
    "Answer",
    "Client",
    "ConversationShape",
    "ConversationTrace",
    "CountTokens",
    "Distribution",
    "ExponentialThink",
    "History",
    "Lengths",
    "LognormalThink",
    "OnSkip",
    "RecordedThink",
    "Server",
    "Session",
    "StepLog",
    "StepTotals",
    "Steps",
    "ThinkTime",
    "Trace",
    "TraceError",
    "TraceSummary",
    "TurnTrace",
    "UserTurn",
    "WorkloadError",
    "answer_figures",
    "between",
    "cap_context",
    "count_words",
    "from_first_arrival",
    "generate_trace",
    "guess_format",
    "make_sessions",
    "read_trace",
    "split_by_session",
    "start_mid_life",
    "step_figures",
    "subtract_steps",
    "summarize",
    "throughput",
    "with_min_turns",
]
