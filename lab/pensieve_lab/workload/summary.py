"""Summary statistics of a trace.

Owns: the statistics that reports show of a workload.
Does not know: where the trace comes from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pensieve_lab.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, quantiles and maximum of a quantity."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Statistics of a trace; `dataclasses.asdict` makes them JSON.

    Attributes:
      digest: digest of the trace.
      turns: turns per conversation.
      prompt_tokens: new tokens of a turn.
      follow_up_prompt_tokens: new tokens of turns other than the first; None without such turns.
      output_tokens: output tokens of a turn.
      input_tokens: history and prompt of a turn, which a stateless server reads.
      gap_s: recorded times from arrival to arrival; None if none was recorded.
      think_s: recorded times from answer to arrival; None if none was recorded.
    """

    name: str
    digest: str
    num_conversations: int
    num_turns: int
    turns: Distribution | None
    prompt_tokens: Distribution | None
    follow_up_prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    input_tokens: Distribution | None
    gap_s: Distribution | None
    think_s: Distribution | None


def summarize(trace: Trace) -> TraceSummary:
    """Compute the statistics of all turns of a trace."""
    turns = [turn for conversation in trace.conversations for turn in conversation.turns]
    follow_ups = [turn for conversation in trace.conversations for turn in conversation.turns[1:]]
    input_tokens: list[int] = []
    for conversation in trace.conversations:
        context_tokens = 0
        for turn in conversation.turns:
            input_tokens.append(context_tokens + turn.prompt_tokens)
            context_tokens += turn.num_tokens
    return TraceSummary(
        name=trace.name,
        digest=trace.digest,
        num_conversations=len(trace.conversations),
        num_turns=len(turns),
        turns=_distribution(len(conversation.turns) for conversation in trace.conversations),
        prompt_tokens=_distribution(turn.prompt_tokens for turn in turns),
        follow_up_prompt_tokens=_distribution(turn.prompt_tokens for turn in follow_ups),
        output_tokens=_distribution(turn.output_tokens for turn in turns),
        input_tokens=_distribution(input_tokens),
        gap_s=_distribution(turn.gap_s for turn in turns),
        think_s=_distribution(turn.think_s for turn in turns),
    )


def _distribution(values: Iterable[float | None]) -> Distribution | None:
    """Summarize the values that are not None; return None if there are no values."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    p50, p90, p99 = np.quantile(known, (0.5, 0.9, 0.99)).tolist()
    return Distribution(known.size, float(known.mean()), p50, p90, p99, float(known.max()))
