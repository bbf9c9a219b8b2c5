"""Merges the answers of several replicas to one call.

Owns: the table of calls that go to all replicas, and the functions that merge their answers.
Does not know: how a replica is reached.

A call about a named conversation goes to the replica of that name. A call about a turn goes to all replicas:
its KV cache may be on the replica where it ran before the set of replicas changed. Counters are summed, and
also reported per replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.core.errors import EngineClosedError, EngineDiedError, UnknownTurnError

type Answers = Sequence[tuple[Any, Exception | None]]

BY_REPLICA: Final = "replicas"
"""Key of the counters per replica, next to their sums."""
_NOT_HERE: Final = (UnknownTurnError, EngineClosedError, EngineDiedError)
_SAME_FOR_ALL: Final = frozenset({"chunk_tokens"})


def summed(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum counters of several replicas by name; for other values, keep the first replica's."""
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
    """Sum histograms: the counts per bucket, and the totals."""
    found: dict[str, tuple[list[int], float]] = {}
    for one in values:
        for name, (counts, total) in one.items():
            before, before_total = found.get(name, ([], 0.0))
            width = max(len(before), len(counts))
            padded = [[*row, *[0] * (width - len(row))] for row in (before, counts)]
            found[name] = ([a + b for a, b in zip(*padded, strict=True)], before_total + total)
    return found


def _chunk_maps(values: Sequence[Mapping[str, Any]]) -> Any:
    """Sum the pages of the tiers, and concatenate the branches of all replicas."""
    branches = [branch for one in values for branch in one["branches"]]
    return {**summed(values), "branches": branches}


def _best_known(values: Sequence[Mapping[str, Any]]) -> Any:
    """Return the explanation of the replica that has most of the turn's KV cache, or else records of it.

    A replica that knows the turn from the history only also explains it, without any chunk or reason.
    """

    def known(one: Mapping[str, Any]) -> tuple[int, int]:
        held = sum(chunk["end"] - chunk["start"] for chunk in one["chunks"] if chunk["tier"] is not None)
        return held, sum(chunk["drop"] is not None for chunk in one["chunks"])

    return max(values, key=known)


def _conversations(values: Sequence[Sequence[Mapping[str, Any]]]) -> Any:
    """Merge the lists by id, keeping the latest; all replicas read one history, so most entries repeat."""
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
    "explain_turn": _best_known,
    "conversations": _conversations,
    "push_out_turn": _total,
    "forget_turn_state": _nothing,
    "forget_experience": _nothing,
}
"""Calls that go to every replica, and the functions that merge their answers."""


def merged(name: str, answers: Answers) -> Any:
    """Merge the answers of all replicas to the call `name`.

    Raises the error of a replica. An unknown turn or an engine that is not running is an error only if no
    replica has an answer. Raises EngineClosedError if `answers` is empty.
    """
    values = [value for value, error in answers if error is None]
    errors = [error for _, error in answers if error is not None]
    for error in errors:
        if not isinstance(error, _NOT_HERE):
            raise error
    if not values:
        raise errors[0] if errors else EngineClosedError("No replica answers; try again soon.")
    return OF_ALL[name](values)
