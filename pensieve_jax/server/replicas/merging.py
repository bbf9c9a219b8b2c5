"""Calls that concern more than one replica: which those are, and how their answers become one.

Owns: the table of calls by name, sums of counters, and who is asked for what.
Does not know: how a replica is reached.

Calls about one conversation by name go to the replica of that name. Those about a turn go to all: its state
may be where it ran before the replicas changed. Counters are added up, and kept by replica beside the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, UnknownTurnError

type Answers = Sequence[tuple[Any, Exception | None]]

BY_REPLICA: Final = "replicas"
"""The key of counters by replica beside their sums."""
_NOT_HERE: Final = (UnknownTurnError, EngineClosedError, EngineDiedError)
_SAME_FOR_ALL: Final = frozenset({"chunk_tokens"})


def summed(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counters of several replicas, added up by name; what is no number is the first one's."""
    total: dict[str, Any] = {}
    for one in counters:
        for name, value in one.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name in total and is_number and name not in _SAME_FOR_ALL:
                total[name] += value
            else:
                total.setdefault(name, value)
    return total


def _stats(values: Sequence[Any]) -> Any:
    return summed(values)


def _distributions(values: Sequence[Mapping[str, tuple[Sequence[int], float]]]) -> Any:
    """Histograms: counts by place, and totals."""
    found: dict[str, tuple[list[int], float]] = {}
    for one in values:
        for name, (counts, total) in one.items():
            before, before_total = found.get(name, ([], 0.0))
            width = max(len(before), len(counts))
            padded = [[*row, *[0] * (width - len(row))] for row in (before, counts)]
            found[name] = ([a + b for a, b in zip(*padded, strict=True)], before_total + total)
    return found


def _chunk_maps(values: Sequence[Mapping[str, Any]]) -> Any:
    """How full the tiers are together, and the branches of all."""
    branches = [branch for one in values for branch in one["branches"]]
    return {**summed(values), "branches": branches}


def _conversations(values: Sequence[Sequence[Mapping[str, Any]]]) -> Any:
    """All read one history, so each knows most of them."""
    found: dict[str, Mapping[str, Any]] = {}
    for one in values:
        for row in one:
            known = found.get(row["conversation_id"])
            if known is None or known["last_active_s"] < row["last_active_s"]:
                found[row["conversation_id"]] = row
    return list(found.values())


def _total(values: Sequence[Any]) -> Any:
    return sum(values)


def _nothing(values: Sequence[Any]) -> Any:
    return None


OF_ALL: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "stats": _stats,
    "census": _stats,
    "distributions": _distributions,
    "chunk_map": _chunk_maps,
    "conversations": _conversations,
    "push_out_turn": _total,
    "forget_turn_state": _nothing,
    "forget_experience": _nothing,
}
"""Calls that every replica is asked, and how their answers become one; a turn need be known to one only."""


def merged(name: str, answers: Answers) -> Any:
    """One answer of those of all replicas; raises what one raised, and EngineClosedError where there is none.

    That a turn is unknown, or an engine is not there, is raised only where no replica has an answer.
    """
    values = [value for value, error in answers if error is None]
    errors = [error for _, error in answers if error is not None]
    for error in errors:
        if not isinstance(error, _NOT_HERE):
            raise error
    if not values:
        raise errors[0] if errors else EngineClosedError("No replica answers; try again soon.")
    return OF_ALL[name](values)
