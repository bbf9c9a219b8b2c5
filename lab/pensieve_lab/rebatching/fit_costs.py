"""Fits a ring's cost profile to measured launches.

Owns: which launch determines which coefficient, and which coefficients of the base profile are kept.
Does not know: how launches are timed (`launch_times`), or who simulates with the result.

Each coefficient is fitted alone, by least squares of relative errors, so that a short launch counts as much
as a long one. If a document cannot separate two coefficients, they keep their proportion in the base profile.
For example, decode steps of a single shape determine the column time only if the weights' time is known.
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
RESIZE = "from "  # prefix of "from SHAPE to SHAPE"

_COEFFICIENTS = tuple(name for name in NUMBERS if name.endswith("_s"))


class Row(NamedTuple):
    """Measured launch.

    Attributes:
      launch: name of the launch in `launch_times`.
      batch, length: size of the launch; prompts of a prefill, 1 and the row's length of a move.
      ring: shape of the ring during the measurement.
      took_s: median time.
      num_bytes: bytes that it had to move.
    """

    launch: str
    batch: int
    length: int
    ring: RingShape
    took_s: float
    num_bytes: int


class Fitted(NamedTuple):
    """Fitted profile and the measurements behind it.

    Attributes:
      costs: the profile.
      kept: coefficients without a measurement, taken from the base profile.
      rows: measured launches.
    """

    costs: RingCosts
    kept: list[str]
    rows: list[Row]


def rows_of(document: Mapping[str, Any]) -> list[Row]:
    """Extract the launches from a document of `benchmark_rebatching.py --part=steps`.

    Raises:
      ConfigError: the document has no decode launch, which tells the size of the ring.
    """
    found = list(_launches(document.get("results", {})))
    rings = [RingShape(one["batch"], one["length"]) for one in found if one["launch"] == DECODE]
    if not rings:
        raise ConfigError(
            "--documents", sorted(document), "documents of benchmark_rebatching.py --part=steps"
        )
    ring = max(rings, key=lambda shape: shape.length)  # rows were moved in and out of the longest ring
    return [
        Row(one["launch"], one["batch"], one["length"], ring, one["launch_s"], one["bound_bytes"])
        for one in found
        if one["launch_s"] > 0
    ]


def _launches(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the launches at any depth of a document."""
    if isinstance(part, dict) and {"launch", "launch_s", "batch", "length", "bound_bytes"} <= set(part):
        yield part
    elif isinstance(part, dict | list):
        for one in part.values() if isinstance(part, dict) else part:
            yield from _launches(one)


def fit(base: RingCosts, rows: Sequence[Row], provenance: Mapping[str, str]) -> Fitted:
    """Fit a profile to launches.

    Args:
      base: profile whose coefficients are kept where nothing was measured.
      rows: launches of one model on one device.
      provenance: origin of the rows; the origin of what is kept of `base` is added.
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
    """Return a copy with some coefficients replaced."""
    changes: dict[str, Any] = dict(numbers)
    return dataclasses.replace(costs, **changes)


def predicted_s(costs: RingCosts, row: Row) -> float:
    """Return the time that a profile predicts for a launch."""
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
    """Fit the column time and the fixed time; weights get their base time first, the step the rest."""
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
    """Fit token and pair times to prompts so long that arithmetic takes longer than reading weights."""
    long = [row for row in rows if base.token_s * row.batch * row.length > base.weights_s]
    if not long:
        return {}
    took_s = np.array([row.took_s for row in long])
    terms = np.array(
        [[row.batch * row.length, row.batch * row.length * (row.length + 1) / 2] for row in long]
    )
    rest_s = took_s - base.step_s
    if len(long) == 1:  # keep the proportion of the base profile
        factor = float(rest_s[0] / (terms[0] @ [base.token_s, base.pair_s]))
        return {"token_s": factor * base.token_s, "pair_s": factor * base.pair_s}
    (token_s, pair_s), *_ = np.linalg.lstsq(terms / took_s[:, None], rest_s / took_s, rcond=None)
    if pair_s < 0:
        return {"token_s": _slope(zip(terms[:, 0], rest_s, strict=True)), "pair_s": 0.0}
    return {"token_s": float(token_s), "pair_s": float(pair_s)}


def _insert(base: RingCosts, rows: Sequence[Row]) -> dict[str, float]:
    """Fit a line over lengths of the ring; an insertion writes the whole row, whatever it inserts."""
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
    """Return the slope of a line through the origin, at least 0, by least squares of relative errors."""
    ratios = [(num / took_s) for num, took_s in points if took_s > 0]
    return float(sum(ratios) / sum(one * one for one in ratios)) if ratios else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of a line, by least squares of relative errors."""
    took_s = np.array([one for _, one in points])
    terms = np.array([[1.0, num] for num, _ in points]) / took_s[:, None]
    (at_zero, slope), *_ = np.linalg.lstsq(terms, np.ones(len(points)), rcond=None)
    return float(at_zero), float(slope)
