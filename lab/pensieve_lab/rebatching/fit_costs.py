"""Costs of a ring out of measured launches.

Owns: which launch says which coefficient, and what is kept where nothing was measured.
Does not know: how launches are timed (`launch_times`), or who simulates with the result.

Each coefficient is fitted alone, by least squares of relative errors, so that a short launch counts as much
as a long one. What one document cannot tell apart keeps the share that it has in the profile one begins with:
a single shape's decode says how long its columns take only if its weights are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pensieve_jax.core.errors import ConfigError
from pensieve_jax.rebatching.ring_shapes import RingShape
from pensieve_lab.rebatching.costs import NUMBERS, RingCosts

DECODE, PREFILL, INSERT, TAKE = "decode", "prefill", "insert a row", "take a row out"
COPIES = ("park a row", "bring a row back")
RESIZE = "from "  # one shape to another

_COEFFICIENTS = tuple(name for name in NUMBERS if name.endswith("_s"))


class Row(NamedTuple):
    """A measured launch.

    Attributes:
      launch: its name, as `launch_times` has it.
      batch, length: of it; of a prefill the prompts, of a row that is moved its own.
      ring: the shape of the ring that it was measured with.
      took_s: median.
      num_bytes: that it had to move.
    """

    launch: str
    batch: int
    length: int
    ring: RingShape
    took_s: float
    num_bytes: int


class Fitted(NamedTuple):
    """A profile, and what it says of what was measured.

    Attributes:
      costs: the profile.
      kept: coefficients that nothing was measured of.
      rows: measured launches.
    """

    costs: RingCosts
    kept: list[str]
    rows: list[Row]


def rows_of(document: Mapping[str, Any]) -> list[Row]:
    """Launches of a document of `benchmark_rebatching.py --part=steps`.

    Raises:
      ConfigError: there is no decode in it, which says how large the ring was.
    """
    found = list(_launches(document.get("results", {})))
    rings = [RingShape(one["batch"], one["length"]) for one in found if one["launch"] == DECODE]
    if not rings:
        raise ConfigError(
            "--documents", sorted(document), "documents of benchmark_rebatching.py --part=steps"
        )
    ring = max(rings, key=lambda shape: shape.length)  # rows are moved in and out of the longest
    return [
        Row(one["launch"], one["batch"], one["length"], ring, one["launch_s"], one["bound_bytes"])
        for one in found
        if one["launch_s"] > 0
    ]


def _launches(part: Any) -> Iterator[Mapping[str, Any]]:
    """Wherever they stand in a document."""
    if isinstance(part, dict) and {"launch", "launch_s", "batch", "length", "bound_bytes"} <= set(part):
        yield part
    elif isinstance(part, dict | list):
        for one in part.values() if isinstance(part, dict) else part:
            yield from _launches(one)


def fit(base: RingCosts, rows: Sequence[Row], provenance: Mapping[str, str]) -> Fitted:
    """A profile of these launches.

    Args:
      base: what is taken where nothing was measured.
      rows: of one model on one device.
      provenance: of the rows; words on what is kept of `base` are added.
    """
    found: dict[str, float] = {}
    by = {name: [row for row in rows if row.launch == name] for name in (DECODE, PREFILL, INSERT, TAKE)}
    found |= _decode(base, by[DECODE])
    found |= _prefill(with_numbers(base, found), by[PREFILL])
    found |= _insert(base, by[INSERT])
    if by[TAKE]:
        found["take_column_s"] = _slope([(row.length, row.took_s) for row in by[TAKE]])
    if copies := [row for row in rows if row.launch in COPIES]:
        found["copy_bytes_per_s"] = sum(row.num_bytes for row in copies) / sum(row.took_s for row in copies)
    if resizes := [row for row in rows if row.launch.startswith(RESIZE)]:
        found["relayout_column_s"] = _slope([(row.batch * row.length, row.took_s) for row in resizes])
    kept = [name for name in _COEFFICIENTS if name not in found]
    texts = {name: text for name, text in base.provenance.items() if set(name.split(", ")) & set(kept)}
    costs = with_numbers(base, found)
    costs = dataclasses.replace(costs, source="measured", provenance={**provenance, **texts})
    return Fitted(costs, kept, list(rows))


def with_numbers(costs: RingCosts, numbers: Mapping[str, float]) -> RingCosts:
    """The same but for some coefficients."""
    changes: dict[str, Any] = dict(numbers)
    return dataclasses.replace(costs, **changes)


def predicted_s(costs: RingCosts, row: Row) -> float:
    """What a profile says of a launch."""
    shape = RingShape(row.batch, row.length)
    match row.launch:
        case "decode":
            return costs.decode_of(shape)
        case "prefill":
            return costs.prefill_of(row.batch, row.length)
        case "insert a row":
            return costs.insert_of(row.ring)
        case "take a row out":
            return costs.take_of(row.length)
        case name if name in COPIES:
            return costs.copy_of(row.length)
        case _:
            return costs.resize_of(shape, moves=True)


def _decode(base: RingCosts, rows: Sequence[Row]) -> dict[str, float]:
    """Columns, and what is there whatever their number: first weights, and the rest of it is the step's."""
    if not rows:
        return {}
    points = [(row.batch * row.length, row.took_s) for row in rows]
    fixed_s = base.weights_s + base.step_s
    if len({num for num, _ in points}) > 1:
        fixed_s, column_s = _line(points)
    if fixed_s <= 0 or len({num for num, _ in points}) == 1:
        fixed_s = min(base.weights_s + base.step_s, min(took_s for _, took_s in points))
        column_s = _slope([(num, took_s - fixed_s) for num, took_s in points])
    weights_s = min(base.weights_s, fixed_s)
    return {"column_s": max(column_s, 0.0), "weights_s": weights_s, "step_s": fixed_s - weights_s}


def _prefill(base: RingCosts, rows: Sequence[Row]) -> dict[str, float]:
    """Tokens and pairs of prompts that are long enough for arithmetic to take longer than weights."""
    long = [row for row in rows if base.token_s * row.batch * row.length > base.weights_s]
    if not long:
        return {}
    took_s = np.array([row.took_s for row in long])
    terms = np.array(
        [[row.batch * row.length, row.batch * row.length * (row.length + 1) / 2] for row in long]
    )
    rest_s = took_s - base.step_s
    if len(long) == 1:  # in the shares that they had
        factor = float(rest_s[0] / (terms[0] @ [base.token_s, base.pair_s]))
        return {"token_s": factor * base.token_s, "pair_s": factor * base.pair_s}
    (token_s, pair_s), *_ = np.linalg.lstsq(terms / took_s[:, None], rest_s / took_s, rcond=None)
    if pair_s < 0:
        return {"token_s": _slope(zip(terms[:, 0], rest_s, strict=True)), "pair_s": 0.0}
    return {"token_s": float(token_s), "pair_s": float(pair_s)}


def _insert(base: RingCosts, rows: Sequence[Row]) -> dict[str, float]:
    """A line over lengths of the ring, whose whole row is written whatever is inserted."""
    if not rows:
        return {}
    points = [(row.ring.length, row.took_s) for row in rows]
    fixed_s = base.insert_s
    if len({length for length, _ in points}) > 1:
        fixed_s, column_s = _line(points)
        if fixed_s >= 0 and column_s >= 0:
            return {"insert_s": fixed_s, "insert_column_s": column_s}
        fixed_s = base.insert_s
    fixed_s = min(fixed_s, min(took_s for _, took_s in points))
    column_s = _slope([(length, took_s - fixed_s) for length, took_s in points])
    return {"insert_s": fixed_s, "insert_column_s": column_s}


def _slope(points: Iterable[tuple[float, float]]) -> float:
    """Of a line through the origin, by relative errors; 0 at least."""
    ratios = [(num / took_s) for num, took_s in points if took_s > 0]
    return float(sum(ratios) / sum(one * one for one in ratios)) if ratios else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Its value at 0 and its slope, by relative errors."""
    took_s = np.array([one for _, one in points])
    terms = np.array([[1.0, num] for num, _ in points]) / took_s[:, None]
    (at_zero, slope), *_ = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)
    return float(at_zero), float(slope)
