"""The load: short and long requests that arrive at random, and what is reported of how they were served.

Owns: drawing arrivals, the table of served requests, and its summary.
Does not know: who serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from pensieve_lab.common.spread import percentiles

LONG, SHORT = "long", "short"
KINDS: Final = (SHORT, LONG)
COLUMNS: Final = (
    *("is_long", "prompt_tokens", "output_tokens"),
    *("arrival_us", "first_token_us", "end_us", "num_suspensions"),
)
"""Columns of the table, one array each. Times are whole microseconds since the start of the run."""
UNITS: Final = {
    "requests": "compressed .npz in base64, and its SHA-256; columns in pensieve_lab/head_of_line/load.py",
    "first_token_s": "seconds from a request's arrival to its first token",
    "latency_s": "seconds from a request's arrival to its last token",
    "num_suspensions": "suspensions of all requests; null if the server does not report them",
    "rate_per_s": "arrivals per second; pauses are exponential",
    "prompt_tokens, output_tokens": "mean lengths; they are even from 3/4 to 5/4 of it",
}


class Kind(NamedTuple):
    """Requests of one kind: arrivals per second, and mean lengths."""

    rate_per_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request."""
        return sum(int(1.25 * mean) for mean in (self.prompt_tokens, self.output_tokens))


class Sent(NamedTuple):
    """Request of the load; it belongs to no conversation."""

    kind: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int


class Served(NamedTuple):
    """Answered request; `num_suspensions` is -1 if the server does not report it."""

    sent: Sent
    first_token_s: float
    end_s: float
    num_suspensions: int


def draw(kinds: Mapping[str, Kind], seed: int, duration_s: float) -> list[Sent]:
    """Draw the requests that arrive within `duration_s`, by arrival; a seed gives the same ones each time."""
    sent = []
    for name, stream in zip(KINDS, np.random.default_rng(seed).spawn(len(KINDS)), strict=True):
        kind, arrival_s = kinds[name], 0.0
        while True:
            arrival_s += float(stream.exponential(1 / kind.rate_per_s))
            if arrival_s >= duration_s:
                break
            means = (kind.prompt_tokens, kind.output_tokens)
            lengths = (int(stream.integers(3 * mean // 4, 5 * mean // 4, endpoint=True)) for mean in means)
            sent.append(Sent(name, arrival_s, *lengths))
    return sorted(sent, key=lambda one: one.arrival_s)


def as_table(served: Iterable[Served]) -> dict[str, Any]:
    """Return the table of served requests, by arrival."""
    rows = [
        (
            one.sent.kind == LONG,
            one.sent.prompt_tokens,
            one.sent.output_tokens,
            *(int(1e6 * time_s) for time_s in (one.sent.arrival_s, one.first_token_s, one.end_s)),
            one.num_suspensions,
        )
        for one in sorted(served, key=lambda one: one.sent.arrival_s)
    ]
    table = np.array(rows, np.int64).reshape(len(rows), len(COLUMNS))
    return {name: table[:, number] for number, name in enumerate(COLUMNS)}


def summary(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the spreads of each kind over all requests of some tables."""
    columns = {name: np.concatenate([table[name] for table in tables]) for name in COLUMNS}
    found: dict[str, Any] = {}
    for kind in KINDS:
        of_kind = columns["is_long"] == (kind == LONG)
        suspensions = columns["num_suspensions"][of_kind]
        found[kind] = {
            "num_requests": int(of_kind.sum()),
            "first_token_s": _spread((columns["first_token_us"] - columns["arrival_us"])[of_kind]),
            "latency_s": _spread((columns["end_us"] - columns["arrival_us"])[of_kind]),
            "num_suspensions": None if (suspensions < 0).any() else int(suspensions.sum()),
        }
    return found


def _spread(times_us: np.ndarray) -> dict[str, float] | None:
    seconds = (1e-6 * times_us).tolist()
    found = percentiles(seconds)
    return None if found is None else found | {"max": max(seconds)}
