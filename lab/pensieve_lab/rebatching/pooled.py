"""Loads of several seeds pooled: latencies of all queries, and the cost of preemption to low-priority ones.

Owns: what is pooled, and the comparison query by query.
Does not know: how a run was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pensieve_lab.rebatching.methods import BATON_PD, PREEMPTIVE
from pensieve_lab.rebatching.real_time import spread

UNITS = {
    "pooled": "queries of all seeds together; latencies as in points; lost: extra latency with preemption of "
    "the same queries of priority 0, as mean and maximum in seconds, as share of their mean latency, and the "
    "share of them that end later",
}
Row = Mapping[str, Any]
_ALIKE = ("kv_bytes", "batch", "rate", "method")


def pooled(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Pool the rows that differ only in their seed, in the order of the rows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in _ALIKE), []).append(row)
    found = []
    for place, alike in groups.items():
        priority, latency_s, first_s = _of_queries(alike)
        kinds = {f"priority {one}": priority == one for one in sorted(set(priority.tolist()))}
        kinds = {"all": np.full(len(priority), True), **kinds}
        found.append(
            {
                **dict(zip(_ALIKE, place, strict=True)),
                "seeds": [row["seed"] for row in alike],
                "num_queries": {name: int(which.sum()) for name, which in kinds.items()},
                "latency_s": {name: spread(latency_s[which]) for name, which in kinds.items()},
                "first_token_s": {name: spread(first_s[which]) for name, which in kinds.items()},
                "num_suspensions": sum(row["stats"]["num_suspensions"] for row in alike),
                "lost": _lost(groups, place, alike),
            }
        )
    return found


def _lost(
    groups: Mapping[tuple[Any, ...], Sequence[Row]], place: tuple[Any, ...], alike: Sequence[Row]
) -> dict[str, float] | None:
    """Return the latency that preempted queries lose, or None without a baseline run of the same loads."""
    without = groups.get((*place[:-1], BATON_PD))
    if place[-1] != PREEMPTIVE or without is None:
        return None
    if [row["digest"] for row in alike] != [row["digest"] for row in without]:
        return None
    priority, latency_s, _ = _of_queries(alike)
    more_s = (latency_s - _of_queries(without)[1])[priority == 0]
    if not len(more_s):
        return None
    mean_s = float(_of_queries(without)[1][priority == 0].mean())
    return {
        "mean_s": float(more_s.mean()),
        "max_s": float(more_s.max()),
        "share_of_mean": float(more_s.mean()) / mean_s,
        "share_later": float((more_s > 0).mean()),
    }


def _of_queries(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate priorities, latencies and times to first token of all queries."""
    names = ("priority", "latency_s", "first_token_s")
    priority, latency_s, first_s = (
        np.concatenate([np.asarray(row["queries"][name]) for row in rows]) for name in names
    )
    return priority, latency_s, first_s
