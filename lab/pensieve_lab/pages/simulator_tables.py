"""Markdown tables of `lab/docs/simulator_errors.md`, from the documents of `programs.validate_simulator`.

Owns: which points stand together, and in which order.
Does not know: what is compared, or within which limit.
Called by `programs.refresh_pages`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.pages.paper_tables import markdown

_LLAMA: Final = "llama2-13b-gqa10"
_OPT: Final = "opt-13b"
_LLAMA_70B: Final = "llama2-70b"
_OPT_66B: Final = "opt-66b"
_H200: Final = f"h200_{_LLAMA}"
_GROUPS: Final = {"new": ("new", "knee"), "fitted": ("fitted",), "older": ("older",)}
"""Kinds of points by table, in the order of the page."""
_BUCKETS: Final = (128, 256, 512, 1024, 2048)
_SHARES: Final = (  # figures whose errors are shown, with the columns' names
    *(("mean, %", "ms/token mean"), ("p99, %", "ms/token p99"), ("first token, mean, %", "ttft ms mean")),
    ("device hits, points", "gpu hits"),
)

type _Point = dict[str, Any]


def _kind(point: _Point) -> str:
    """Return the kind of a point: over the knee, fitted, or measured with current or older launches."""
    if point["over_the_knee"]:
        return "knee"
    if point["fitted"]:
        return "fitted"
    return "new" if point["launches"] == "jaxlib" else "older"


def _points(document: str, group: str | None) -> list[_Point]:
    """Return the points of `results/validation_DOCUMENT.json`, of one group or all of them."""
    found = committed_document(f"validation_{document}.json")["results"]["points"]
    chosen = (one for one in found if group is None or _kind(one) in _GROUPS[group])
    return sorted(chosen, key=lambda one: (str(one["document"]), one["rate"]))


def _name(point: _Point, model: str) -> str:
    """Return the name of a point's document, without the parts that all points share."""
    _, _, name = point["document"].removesuffix(".json").partition("_")  # the device is the table's
    return f"`{name.replace(f'_{model}', '')}`"


def _compared(point: _Point, figure: str) -> dict[str, Any]:
    """Return measured value, simulated value and difference; empty if the point lacks the figure."""
    return next((one for one in point["criteria"] if one["figure"] == figure), {})


def _percent(point: _Point, figure: str) -> str:
    difference = _compared(point, figure).get("difference")
    return "" if difference is None else f"{100 * difference:+.1f}"


def _latencies(document: str, group: str | None, model: str) -> str:
    rows = []
    for point in _points(document, group):
        measured = _compared(point, "ms/token mean")["measured"]
        errors = (_percent(point, figure) for _, figure in _SHARES)
        rows.append([_name(point, model), f"{point['rate']:g}", f"{measured:.1f}", *errors])
    columns = ["run", "conversations/s", "ms/token, measured", *(name for name, _ in _SHARES)]
    return markdown(columns, rows)


def _steps() -> str:
    """Return the range of errors of the mean step times, by bucket and group."""
    rows = [
        [f"{bucket:,}", *(_range(_points(_H200, group), f"ms/step of {bucket}") for group in _GROUPS)]
        for bucket in _BUCKETS
    ]
    return markdown(["bucket, tokens", "not fitted, %", "fitted, %", "older runs, %"], rows)


def _range(points: list[_Point], figure: str) -> str:
    differences = [100 * _compared(point, figure)["difference"] for point in points]
    return f"{min(differences):+.1f} to {max(differences):+.1f}"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "validation-new": partial(_latencies, _H200, "new", _LLAMA),
    "validation-older": partial(_latencies, _H200, "older", _LLAMA),
    "validation-opt": partial(_latencies, f"h200_{_OPT}", "new", _OPT),
    "validation-kv": partial(_latencies, f"{_H200}_kv", None, _LLAMA),
    "validation-h100": partial(_latencies, f"h100_{_LLAMA}", None, _LLAMA),
    "validation-two-llama": partial(_latencies, f"h200x2_{_LLAMA_70B}", None, _LLAMA_70B),
    "validation-two-opt": partial(_latencies, f"h200x2_{_OPT_66B}", None, _OPT_66B),
    "validation-four-opt": partial(_latencies, f"h200x4_{_OPT_66B}", None, _OPT_66B),
    "validation-steps": _steps,
}
"""Tables by their name in the page."""
