"""Distance of the policies from an oracle that knows every return time.

Owns: that policy, and a memory model without an engine in which it is compared with LRU and the paper's
policy. Turns take no time there, and conversations lose chunks from their leading end, as in the cache.
Does not know: how the engine performs (`recorded_traces`), or how a trace is served (`trace_studies`).
Called by `experiments.registry`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.cache.order.ghost_cache import GhostCache
from pensieve_jax.cache.order.policies import (
    Activity,
    Candidate,
    EvictionCandidates,
    EvictionPolicy,
    LruPolicy,
    RetentionPolicy,
)
from pensieve_jax.cache.order.returns import Array
from pensieve_jax.cache.states import EvictionClass
from pensieve_lab.experiments.machines import load_profile, profile_name
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.points import Measured
from pensieve_lab.experiments.recompute import cost_model
from pensieve_lab.experiments.recorded_traces import studied_traces
from pensieve_lab.experiments.seeds import Spread, spread
from pensieve_lab.experiments.settings import Experiment, Findings, Settings, Table
from pensieve_lab.experiments.trace_studies import StudiedTrace
from pensieve_lab.workload import Session

_MODEL = "llama2-13b-gqa10"
_MIN_S = 1e-3  # smallest time until a return


class Turn(NamedTuple):
    """A turn that a user sends.

    Attributes:
      sent_s: time of arrival.
      conversation_id: its conversation.
      num_history_tokens: tokens that the engine had computed before it.
      num_tokens: of the conversation after the answer.
      returns_s: time of the conversation's next turn; infinity for the last one.
    """

    sent_s: float
    conversation_id: str
    num_history_tokens: int
    num_tokens: int
    returns_s: float


class OraclePolicy(EvictionPolicy):
    """Policy that values a chunk at its cost over the time until it is needed, or at about 0 if never.

    This is the paper's policy with the future in place of the past. The bucket of an activity is its turn's
    number.
    """

    name = "oracle"

    def __init__(self, turns: Sequence[Turn], costs_s: Sequence[float]) -> None:
        """Set the future of `turns`, and the costs of chunks by index."""
        self._returns_s = np.array([turn.returns_s for turn in turns])
        self._costs_s = np.array(costs_s)

    def chunk(self, sequence: Candidate, eviction_class: EvictionClass) -> int:
        """Return the leading chunk."""
        return sequence.first_of(eviction_class)

    def worth(self, sequence: Activity, index: int, now_s: float) -> float:
        """Return the seconds to recompute, over the seconds until that would happen."""
        until_s = max(self._returns_s[sequence.bucket] - now_s, _MIN_S)
        return float(self._costs_s[index] / until_s)

    def worths(self, candidates: EvictionCandidates, now_s: float) -> Array:
        """Return the same values for many chunks."""
        until_s = np.maximum(self._returns_s[candidates.buckets] - now_s, _MIN_S)
        worths: Array = self._costs_s[candidates.chunks] / until_s
        return worths


_ORDERS = (LruPolicy.name, RetentionPolicy.name, OraclePolicy.name)


def turns_of(sessions: Sequence[Session]) -> list[Turn]:
    """Return the turns in order of time, if answers take none."""
    return sorted(turn for session in sessions for turn in _turns(session))


def _turns(session: Session) -> Iterator[Turn]:
    conversation, first = session.conversation, session.first_turn
    sent_s = list(itertools.accumulate(session.think_s[first:], initial=session.arrival_s))
    for number, (time_s, returns_s) in enumerate(zip(sent_s, [*sent_s[1:], math.inf], strict=True), first):
        history = conversation.num_history_tokens(number)
        turn = conversation.turns[number]
        num_tokens = history + turn.prompt_tokens + turn.output_tokens
        yield Turn(time_s, conversation.conversation_id, history, num_tokens, returns_s)


def recomputed_share(
    turns: Sequence[Turn],
    policy: EvictionPolicy,
    costs_s: Sequence[float],
    num_chunks: int,
    chunk_tokens: int,
) -> float:
    """Return the seconds that a memory of `num_chunks` recomputes, over those of all histories."""
    before_s = [0.0, *itertools.accumulate(costs_s)]
    memory = GhostCache(policy, num_chunks)
    recomputed_s = history_s = 0.0
    for number, turn in enumerate(turns):
        num_history = turn.num_history_tokens // chunk_tokens
        num_lost = memory.returned(turn.conversation_id)
        recomputed_s += before_s[num_history if num_lost is None else min(num_lost, num_history)]
        history_s += before_s[num_history]
        memory.left(
            turn.conversation_id,
            turn.num_tokens // chunk_tokens,
            num_shared=0,
            bucket=number,
            now_s=turn.sent_s,
        )
    return recomputed_s / history_s if history_s else 0.0


def findings(settings: Settings, measured: list[Measured]) -> Findings:
    """Return the share of every policy over memory, for every trace."""
    rows = [row for studied in studied_traces(settings) for row in _compared(settings, studied)]
    return Findings(
        tables=[table_of(rows)],
        panels=[
            Panel(
                title=title,
                x_label="tokens of memory",
                y_label="recompute seconds, share of stateless",
                curves={
                    name: [(row["num_tokens"], _spread(row, name).mean) for row in of_trace]
                    for name in _ORDERS
                },
                log_x=True,
            )
            for title, of_trace in ((title, list(of)) for title, of in itertools.groupby(rows, _title))
        ],
        results={"orders": rows},
        profiles=[profile_name(settings.device, _MODEL)],
        units={
            "num_tokens": "of memory, one tier",
            "lru, retention, oracle": "by seed: seconds of recomputed history over those of all history",
        },
    )


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the document's `orders`."""
    return Table(
        title="Recompute seconds, share of a stateless system's; mean and range over seeds",
        columns=("trace", "memory, tokens", *_ORDERS),
        rows=[[row["title"], row["num_tokens"], *(_spread(row, name) for name in _ORDERS)] for row in rows],
    )


def _title(row: dict[str, Any]) -> str:
    return str(row["title"])


def _spread(row: dict[str, Any], name: str) -> Spread:
    found = spread(list(row[name].values()))
    assert found is not None
    return found


def _compared(settings: Settings, studied: StudiedTrace) -> Iterator[dict[str, Any]]:
    chunk_tokens = studied.chunk_tokens
    profile = load_profile(settings.device, _MODEL)
    costs = cost_model(profile, chunk_tokens, studied.workload.max_context_tokens)
    turns = {seed: turns_of(studied.workload.sessions(seed)) for seed in settings.seeds}
    longest = max(turn.num_tokens for of_seed in turns.values() for turn in of_seed)
    costs_s = [costs.chunk_cost_s((index + 1) * chunk_tokens) for index in range(longest // chunk_tokens)]
    for place in studied.places:
        num_chunks = place.num_tokens // chunk_tokens
        shares: dict[str, dict[str, float]] = {name: {} for name in _ORDERS}
        for seed, of_seed in turns.items():
            orders = (LruPolicy(), RetentionPolicy(costs, chunk_tokens), OraclePolicy(of_seed, costs_s))
            for order in orders:
                share = recomputed_share(of_seed, order, costs_s, num_chunks, chunk_tokens)
                shares[order.name][str(seed)] = round(share, 6)
        yield {"title": studied.title, "num_tokens": place.num_tokens, **shares}


ORACLE = Experiment(
    name="oracle",
    title="Orders beside one that knows the future",
    paper="Not in the paper.",
    points=lambda settings: [],
    findings=findings,
    flags=frozenset({"device", "seeds", "small", "traces"}),
)
