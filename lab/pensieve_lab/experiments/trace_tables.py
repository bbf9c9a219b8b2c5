"""Tables and panels of the results on recorded traces, made only from the document.

Owns: what is shown, and when a policy counts as losing.
Does not know: how the results came about.
Called by `recorded_traces` and the page `lab/docs/recorded_traces.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.settings import Row, Table

TIERS = "both tiers"
BETTER_OF: Final = ("lru", "retention")
"""Baselines of the comparison: the common policy, and the paper's."""
_LOSES: Final = 1.03  # recompute seconds relative to the better of the two, mean over seeds


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a document's results."""
    orders = list(dict.fromkeys(point["series"] for point in results["points"]))
    return [
        Table(
            title="What is served, with the first seed",
            columns=("trace", "sessions", "turns", "they begin", "times", "returning history p50", "p90"),
            rows=[_served(one) for one in results["traces"]],
        ),
        Table(
            title="Rate of return x idle time, by minutes idle; the paper's order takes it to be constant",
            columns=("trace", *_idle_columns(results)),
            rows=[_returns(one) for one in results["traces"]],
        ),
        Table(
            title="Recompute seconds as a share of what a stateless system recomputes, means over seeds",
            columns=("trace", "memory, tokens", *orders),
            rows=[[*place, *(_share(found[name]) for name in orders)] for place, found in _places(results)],
        ),
        Table(
            title="Recompute seconds beside the better one of lru and retention in each seed: mean (range)",
            columns=("trace", "memory, tokens", *orders),
            rows=list(_compared(results, orders, "recompute")),
        ),
        Table(
            title="Mean ms a token beside the better one of lru and retention in each seed: mean (range)",
            columns=("trace", "memory, tokens", *orders),
            rows=list(_compared(results, orders, "latency")),
        ),
        Table(
            title="Latency and tokens, means over seeds",
            columns=(
                *("trace", "memory, tokens", "order", "ms/token", "p50", "p90", "p99", "first token ms"),
                *("p90 ", "on device", "on host", "recomputed tokens", "recompute s"),
            ),
            rows=[_latency(point) for point in results["points"]],
        ),
        Table(
            title=f"Where an order needs over {_LOSES:g} of the better one's recompute seconds",
            columns=("order", "trace", "memory, tokens", "mean", "lowest", "highest"),
            rows=list(_losses(results)),
        ),
    ]


def panels(results: Mapping[str, Any]) -> list[Panel]:
    """Return a panel per trace: recompute seconds over the better baseline's, by memory."""
    names = dict.fromkeys(point["panel"] for point in results["points"])
    return [
        Panel(
            title=name,
            x_label="tokens of device and host memory",
            y_label="recompute s / better of lru, retention",
            curves={order: _curve(results, name, order) for order in _orders(results)},
            level=1.0,
            log_x=True,
            y_min=0.5,
            y_max=1.5,
        )
        for name in names
        if name.endswith(TIERS)
    ]


def _orders(results: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(point["series"] for point in results["points"]))


def _curve(results: Mapping[str, Any], panel: str, order: str) -> list[tuple[float, float]]:
    return sorted(
        (one["x"], one["recompute"]["mean"])
        for one in results["beside_better"]
        if (one["panel"], one["series"]) == (panel, order) and one["recompute"]
    )


def _places(results: Mapping[str, Any]) -> Iterator[tuple[list[object], dict[str, Mapping[str, Any]]]]:
    """Yield panel and memory, and the points of all policies there."""
    found: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for point in results["points"]:
        found.setdefault((point["panel"], point["x"]), {})[point["series"]] = point
    for (panel, x), by_order in found.items():
        yield [panel, round(x)], by_order


def _served(one: Mapping[str, Any]) -> Row:
    rate, scale = one["rate_per_s"], one["time_scale"]
    history = one["returning_history_tokens"]
    return [
        *(one["title"], one["num_sessions"], one["num_turns"]),
        "as recorded" if rate is None else f"at random, {rate:g} a second",
        "as recorded" if scale == 1 else f"x {scale:g}",
        *(history["p50"], history["p90"]),
    ]


def _idle_columns(results: Mapping[str, Any]) -> list[str]:
    return [f"{row['from_s'] / 60:g}-{row['to_s'] / 60:g}" for row in results["traces"][0]["returns"]]


def _returns(one: Mapping[str, Any]) -> Row:
    rates = [row["rate_x_idle"] for row in one["returns"]]
    return [one["title"], *("-" if rate is None else f"{rate:.2f}" for rate in rates)]


def _share(point: Mapping[str, Any]) -> str:
    lost = 1 - point["found_rate"]
    return f"{point['recompute_share']:.3f} ({lost:.0%})"


def _compared(results: Mapping[str, Any], orders: Sequence[str], what: str) -> Iterator[Row]:
    by_place: dict[tuple[str, float], dict[str, str]] = {}
    for one in results["beside_better"]:
        found = one[what]
        text = "-" if found is None else f"{found['mean']:.2f} ({found['low']:.2f}-{found['high']:.2f})"
        by_place.setdefault((one["panel"], one["x"]), {})[one["series"]] = text
    for (panel, x), texts in by_place.items():
        yield [panel, round(x), *(texts[order] for order in orders)]


def _latency(point: Mapping[str, Any]) -> Row:
    latency, first = point["normalized_latency_s"], point["first_token_s"]
    return [
        *(point["panel"], round(point["x"]), point["series"]),
        *(f"{1e3 * latency[part]:.1f}" for part in ("mean", "p50", "p90", "p99")),
        *(f"{1e3 * first[part]:,.0f}" for part in ("mean", "p90")),
        *(f"{point[name]:.0%}" for name in ("gpu_hit_rate", "cpu_hit_rate")),
        *(round(point["recomputed_tokens"]), f"{point['recompute_s']:.2f}"),
    ]


def _losses(results: Mapping[str, Any]) -> Iterator[Row]:
    for one in sorted(results["beside_better"], key=lambda one: one["series"]):
        found = one["recompute"]
        if found and found["mean"] > _LOSES and one["series"] not in ("conversation", "trailing"):
            yield [
                *(one["series"], one["panel"], round(one["x"])),
                *(f"{found[part]:.2f}" for part in ("mean", "low", "high")),
            ]
