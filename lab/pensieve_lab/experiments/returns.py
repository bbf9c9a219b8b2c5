"""Return rates of a trace's conversations, to test the assumption behind the paper's policy.

Owns: the rate of return by idle time. The paper's policy assumes that it is 1 / idle time, so that rate x
idle time is constant.
Does not know: any policy.
Called by `recorded_traces`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from pensieve_lab.workload import ConversationTrace, Trace

_EDGES_S: Final = tuple(15.0 * 2**power for power in range(9))  # to 64 minutes


class _Idle(NamedTuple):
    """Seconds that a conversation was idle, and whether it returned then."""

    seconds: float
    returned: bool


def returns(trace: Trace) -> list[dict[str, Any]]:
    """Return per bin of idle seconds the returns, and their rate x the bin's middle, or None.

    Pauses run from arrival to arrival. A conversation that never returned was idle until the last arrival of
    the trace, or forever without recorded arrivals. A trace without pauses has no returns.
    """
    turns = (turn for conversation in trace.conversations for turn in conversation.turns)
    is_recorded = any(turn.gap_s is not None or turn.think_s is not None for turn in turns)
    idles = list(_idles(trace)) if is_recorded else []
    rows = []
    for low, high in itertools.pairwise(_EDGES_S):
        num_returns = sum(idle.returned and low < idle.seconds <= high for idle in idles)
        exposed_s = sum(min(idle.seconds, high) - low for idle in idles if idle.seconds > low)
        rate = num_returns / exposed_s if exposed_s else None
        rows.append(
            {
                "from_s": low,
                "to_s": high,
                "num_returns": num_returns,
                "rate_x_idle": None if rate is None else round(rate * math.sqrt(low * high), 4),
            }
        )
    return rows


def _idles(trace: Trace) -> Iterator[_Idle]:
    last_s = max(
        (time_s for conversation in trace.conversations for time_s in _times(conversation)), default=0.0
    )
    for conversation in trace.conversations:
        times = list(_times(conversation))
        for earlier, later in itertools.pairwise(times):
            yield _Idle(later - earlier, True)
        is_dated = conversation.arrival_s is not None
        yield _Idle(last_s - times[-1] if is_dated else math.inf, False)


def _times(conversation: ConversationTrace) -> Iterator[float]:
    """Yield the arrival times of the turns by their gaps; without a gap, the think time is used."""
    pauses = (turn.think_s if turn.gap_s is None else turn.gap_s for turn in conversation.turns[1:])
    return itertools.accumulate((pause or 0.0 for pause in pauses), initial=conversation.arrival_s or 0.0)
