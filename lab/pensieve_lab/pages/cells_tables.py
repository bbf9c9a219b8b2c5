"""Markdown table of simulated results in `lab/docs/cells_figures.md`, compared with the thesis.

Owns: which claims are rows, which numbers follow from the inputs' times and lengths, and at which latency
loads are compared.
Does not know: how a document was made, or how anything is scheduled.
Called by `programs.refresh_pages`.

The thesis names no latency at which its peaks are read. Peaks here are of loads with a 90th percentile below
half a second, the thesis' criterion for an overloaded baseline: beyond it, a queue grows as long as a run
lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np

from pensieve_lab.cells.systems import BY_AGENDA, BY_DEPTH, CELLULAR, IDEAL, PADDING, PADDING_OLDEST
from pensieve_lab.cells.times import thesis_v100
from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.pages.paper_summary import claim
from pensieve_lab.pages.paper_tables import markdown
from pensieve_lab.workload.structures import europarl_like, treebank_like

_LEVEL_MS: Final = 500.0
_KEEPS_UP: Final = 0.98  # share of the offered load
_COLUMNS: Final = ("figure", "quantity", "thesis", "simulated", "by construction")
_BOTH: Final = (PADDING, PADDING_OLDEST)
_DIFFERENT, _SAME = "cellular, 512 and 256", "cellular, 256 and 256"

_MANY: Final = 20_000  # lengths and trees from which the means of the inputs are computed

type Line = tuple[str, ...]
"""Figure, subject, the thesis, this project, and the value that follows from times and lengths without a
scheduler, if any."""
type Curve = list[tuple[float, float]]


class Peak(NamedTuple):
    """The highest throughput of some loads.

    Attributes:
      throughput: requests per second; 0 if no load counts.
      is_least: whether a higher load might have shown more.
    """

    throughput: float
    is_least: bool

    def __str__(self) -> str:
        """Format for table cells."""
        if not self.throughput:
            return "none"
        return f"{'at least ' if self.is_least else ''}{self.throughput:,.0f}"


class Sweep:
    """A panel of a document: curves by series."""

    def __init__(self, experiment: str, panel: int = 0) -> None:
        """Read a panel; raises FileNotFoundError if the experiment has no document yet."""
        points = _results(experiment)["points"]
        title = list(dict.fromkeys(point["panel"] for point in points))[panel]
        self._points = [point for point in points if point["panel"] == title]

    def curve(self, series: str, read: Callable[[Mapping[str, Any]], float]) -> Curve:
        """Return a series' mean over seeds at each rate."""
        mine = [point for point in self._points if point["series"] == series]
        rates = list(dict.fromkeys(point["rate"] for point in mine))
        return [(rate, fmean(read(one) for one in mine if one["rate"] == rate)) for rate in rates]

    def p90_ms(self, series: str) -> dict[float, float]:
        """Return a series' 90th percentile of latency by rate, in milliseconds."""
        return dict(self.curve(series, lambda point: 1e3 * point["latency_s"]["p90"]))

    def peak(self, series: str) -> Peak:
        """Return a series' peak, which is a lower bound if its highest tried load was served in time."""
        served = dict(self.curve(series, lambda point: point["throughput"]))
        in_time = {rate: served[rate] for rate, p90 in self.p90_ms(series).items() if p90 <= _LEVEL_MS}
        highest = max(served)
        is_least = served[highest] > _KEEPS_UP * highest and highest in in_time
        return Peak(max(in_time.values(), default=0.0), is_least)

    def gain_shown(self, series: str, rival: str) -> str:
        """Return the ratio of a series' peak to the baseline's, as text."""
        mine, its = self.peak(series), self.peak(rival)
        if its.is_least:
            return "unknown: the rival keeps up"
        return f"{'at least ' if mine.is_least else ''}{mine.throughput / its.throughput:.2f} x"

    def most(self, series: str) -> float:
        """Return the highest throughput of a series."""
        return max(value for _, value in self.curve(series, lambda point: point["throughput"]))

    def lower_shown(self, series: str, rivals: Sequence[str]) -> str:
        """Return by how much its p90 is below the baselines', at loads below half of their peaks."""
        shares = []
        for rival in rivals:
            its = self.p90_ms(rival)
            half = self.peak(rival).throughput / 2
            shares += [100 * (1 - self.p90_ms(series)[rate] / its[rate]) for rate in its if rate <= half]
        if not shares:
            return "no load that low was tried"
        least, most = (f"{one(shares):.0f}" for one in (min, max))
        return f"{least}% lower" if least == most else f"{least} to {most}% lower"


def _results(experiment: str) -> dict[str, Any]:
    results: dict[str, Any] = committed_document(f"sim_{experiment}_v100.json")["results"]
    return results


def _claimed(id: str) -> float:
    return claim(f"batchmaker-{id}").value


def beside_the_thesis() -> str:
    """Return every row; an experiment without a document gets a row that says so."""
    body: list[tuple[str, ...]] = []
    for figure, make in _ROWS.items():
        try:
            body += [(*line[:4], line[4] if len(line) > 4 else "") for line in make()]
        except FileNotFoundError:
            body.append((figure, "no document yet", "", "", ""))
    return markdown(_COLUMNS, body)


class _Inputs:
    """Inputs of the simulation, and results that follow from them without queueing, or with full tasks."""

    def __init__(self) -> None:
        """Take the thesis' times, and the lengths and trees from which requests are drawn."""
        self._times = thesis_v100()
        pairs = [europarl_like(_MANY, seed=seed) for seed in range(3)]
        self.words = fmean(float(one.target.mean()) for one in pairs)
        self.source_words = fmean(float(one.source.mean()) for one in pairs)
        self.long_words = [float(np.percentile(one.target, 90)) for one in pairs]
        self.nodes = fmean(2 * tree.num_leaves - 1 for tree in treebank_like(_MANY, seed=0))

    def step_s(self, batch_size: int, name: str = "lstm") -> float:
        """Return the seconds of a cell's task."""
        return self._times.task_of(name, batch_size)

    def peak(self, batch_size: int, cells: float) -> float:
        """Return the requests per second of `cells` cells each, in full tasks."""
        return batch_size / self.step_s(batch_size) / cells

    def pairs_peak(self, num_devices: int, encoders: int) -> float:
        """Return the peak for sentences that are encoded `encoders` at a time and decoded 256 at a time."""
        encode_s = self.source_words * self.step_s(encoders, "encoder") / encoders
        return num_devices / (encode_s + self.words * self.step_s(256, "decoder") / 256)


@cache
def _inputs() -> _Inputs:
    return _Inputs()


def _chains() -> list[Line]:
    full, narrow = Sweep("cells2.7"), Sweep("cells2.7", 1)
    flat = _claimed("2.7-flat")
    mine = [value for rate, value in full.p90_ms(CELLULAR).items() if rate <= flat]
    first = min(full.p90_ms(PADDING))
    rivals = " and ".join(f"{full.p90_ms(one)[first]:.0f}" for one in _BOTH)
    lower = f"{_claimed('2.7-lower-least'):g} to {_claimed('2.7-lower-most'):g}% lower"
    inputs = _inputs()
    long_ms = [1e3 * inputs.step_s(64) * words for words in inputs.long_words]
    alone = f"{min(long_ms):.1f} to {max(long_ms):.1f} ms"
    low, their_low = (sweep.p90_ms(CELLULAR)[first] for sweep in (narrow, full))
    return [
        (
            "2.7a",
            f"p90 up to {flat:,.0f} requests/s",
            f"{_claimed('2.7-p90'):g} ms",
            f"{min(mine):.1f} to {max(mine):.1f} ms",
            alone,
        ),
        (
            *("2.7a", "peak", f"{_claimed('2.7-peak'):,.0f}", str(full.peak(CELLULAR))),
            f"{inputs.peak(512, inputs.words):,.0f}",
        ),
        (
            "2.7a",
            "p90 of padding, in turn and oldest first",
            f"{_claimed('2.7-rivals-p90'):g} ms at best",
            f"{rivals} ms at {first:,.0f} requests/s",
        ),
        (
            "2.7a",
            "peak of padding, the same",
            f"{_claimed('2.7-rivals-load'):,.0f}",
            " and ".join(str(full.peak(one)) for one in _BOTH),
        ),
        (
            "2.7",
            "peak over padding's, oldest first",
            f"{1 + _claimed('2.7-gain') / 100:.2f} x",
            full.gain_shown(CELLULAR, PADDING_OLDEST),
        ),
        ("2.7", "p90 below half of padding's peak", lower, full.lower_shown(CELLULAR, _BOTH)),
        (
            "2.7b",
            "at most 64 in a batch: p90 at low load, peak",
            "the same p90, a lower peak",
            f"{low:.1f} ms (512: {their_low:.1f}), {narrow.peak(CELLULAR)}",
            f"{alone}, {inputs.peak(64, inputs.words):,.0f}",
        ),
    ]


def _widths() -> list[Line]:
    widths = [f"width {width}" for width in (1, 10, 40)]
    sweeps = [Sweep("cells2.8", panel) for panel in range(2)]
    first = min(sweeps[0].p90_ms(widths[0]))
    p90 = "; ".join(", ".join(f"{sweep.p90_ms(one)[first]:.0f}" for one in widths) for sweep in sweeps)
    peaks = "; ".join(", ".join(str(sweep.peak(one)) for one in widths) for sweep in sweeps)
    what = f"padding by 1, 10, 40 words, in turn; oldest first: p90 at {first:,.0f} requests/s"
    return [
        ("2.8", what, "40 is best", f"{p90} ms"),
        ("2.8", "the same: peak", "1 has the highest peak", peaks),
    ]


def _queueing() -> list[Line]:
    found = {
        row["system"]: row["p99, ms"] for row in _results("cells2.9")["rows"] if row["part"] == "queueing"
    }
    return [
        (
            "2.9a",
            "p99 of queueing at 5,000 requests/s",
            f"{_claimed('2.9-queueing'):g} ms",
            f"{found[CELLULAR]:.2f} ms",
            f"{5e3 * _inputs().step_s(64):.2f} ms",
        ),
        (
            "2.9a",
            "the same, padding in turn and oldest first",
            f"over {_claimed('2.9-rivals-queueing'):g} ms",
            f"{found[PADDING]:.0f} and {found[PADDING_OLDEST]:.0f} ms",
        ),
    ]


def _variance() -> list[Line]:
    fixed, bound, inputs = Sweep("cells2.11"), _claimed("2.11-bound"), _inputs()
    shares = {name: 100 * fixed.most(name) / bound for name in (CELLULAR, *_BOTH)}
    first = min(fixed.p90_ms(CELLULAR))
    p90 = ", ".join(f"{Sweep('cells2.11', panel).p90_ms(CELLULAR)[first]:.1f}" for panel in range(3))
    padding = ", ".join(f"{Sweep('cells2.11', panel).p90_ms(PADDING)[first]:.0f}" for panel in range(3))
    return [
        (
            "2.11",
            f"24 words each: throughput, of {bound:,.0f}",
            f"{_claimed('2.11-share'):g}%",
            f"{shares[CELLULAR]:.0f}%",
            f"{100 * inputs.peak(512, 24) / bound:.0f}%",
        ),
        (
            "2.11",
            "the same, padding in turn and oldest first",
            "closely",
            f"{shares[PADDING]:.0f} and {shares[PADDING_OLDEST]:.0f}%",
        ),
        (
            "2.11",
            f"24, at most 50, at most 100 words: p90 at {first:,.0f} requests/s",
            "the same",
            f"{p90} ms",
            f"24 words: {24e3 * inputs.step_s(64):.1f} ms",
        ),
        ("2.11", "the same, padding in turn", "much worse", f"{padding} ms"),
    ]


def _devices() -> list[Line]:
    two, four = Sweep("cells2.13"), Sweep("cells2.13", 1)
    batches = f"{_claimed('2.13-batches-least'):g} to {_claimed('2.13-batches-most'):g}%"
    gains = [
        100 * (one.peak(_DIFFERENT).throughput / one.peak(_SAME).throughput - 1)
        for one in (two, four)
        if not one.peak(_SAME).is_least
    ]
    ours = f"{min(gains):.1f} to {max(gains):.1f}%" if gains else "unknown: both keep up"
    inputs = _inputs()
    alone = 100 * (inputs.pairs_peak(1, 512) / inputs.pairs_peak(1, 256) - 1)
    return [
        (
            *("2.13", "two, four devices: peak"),
            " and ".join(f"{_claimed(f'2.13-peak-{count}'):,.0f}" for count in (2, 4)),
            " and ".join(str(one.peak(_DIFFERENT)) for one in (two, four)),
            " and ".join(f"{inputs.pairs_peak(count, 512):,.0f}" for count in (2, 4)),
        ),
        (
            "2.13",
            "peak over padding's, oldest first, on two and four",
            f"{1 + _claimed('2.13-gain') / 100:.2f} x",
            ", ".join(one.gain_shown(_DIFFERENT, PADDING_OLDEST) for one in (two, four)),
        ),
        ("2.13", "peak with batches of 512 and 256 over 256 and 256", batches, ours, f"{alone:.1f}%"),
    ]


def _trees() -> list[Line]:
    sweep, inputs = Sweep("cells2.14"), _inputs()
    p90 = {name: sweep.p90_ms(name)[1000] for name in (CELLULAR, BY_AGENDA, BY_DEPTH)}
    ratio = _claimed("2.14-peak") / _claimed("2.14-dynet-peak")
    claims = f"{_claimed('2.14-dynet-gain'):g} x as claimed, {ratio:.2f} x of the two peaks"
    return [
        ("2.14", "p90 at 1,000 requests/s", f"{_claimed('2.14-p90'):g} ms", f"{p90[CELLULAR]:.1f} ms"),
        (
            "2.14",
            "the same: DyNet; merging by agenda and by depth",
            f"{_claimed('2.14-dynet-p90'):g} ms",
            f"{p90[BY_AGENDA]:.1f} and {p90[BY_DEPTH]:.1f} ms",
        ),
        (
            *("2.14", "peak", f"{_claimed('2.14-peak'):,.0f}", str(sweep.peak(CELLULAR))),
            f"{inputs.peak(64, inputs.nodes):,.0f}",
        ),
        (
            "2.14",
            "the same: DyNet; merging by agenda",
            f"{_claimed('2.14-dynet-peak'):,.0f}",
            str(sweep.peak(BY_AGENDA)),
        ),
        ("2.14", "peak over DyNet's; merging by agenda", claims, sweep.gain_shown(CELLULAR, BY_AGENDA)),
    ]


def _equal_trees() -> list[Line]:
    sweep = Sweep("cells2.15")
    first = min(sweep.p90_ms(CELLULAR))
    mine, ideal = sweep.peak(CELLULAR), sweep.peak(IDEAL)
    less = f"{100 * (1 - mine.throughput / ideal.throughput):.0f}%, {mine} against {ideal}"
    if mine.is_least:
        less = f"unknown: both keep up, {mine} and {ideal}"
    times = thesis_v100()  # the ideal pays for its cells only
    alone = 100 * (1 - times.cells_s["leaf"][64] / times.task_of("leaf", 64))
    p90 = f"{sweep.p90_ms(CELLULAR)[first]:.1f} ms against {sweep.p90_ms(IDEAL)[first]:.1f}"
    return [
        ("2.15", "peak below the ideal's", f"about {_claimed('2.15-less'):g}%", less, f"{alone:.0f}%"),
        ("2.15", f"p90 at {first:,.0f} requests/s against the ideal's", "lower", p90),
    ]


_ROWS: Final[dict[str, Callable[[], list[Line]]]] = {
    "2.7": _chains,
    "2.8": _widths,
    "2.9": _queueing,
    "2.11": _variance,
    "2.13": _devices,
    "2.14": _trees,
    "2.15": _equal_trees,
}

TABLES: Final[dict[str, Callable[[], str]]] = {"cells-thesis": beside_the_thesis}
