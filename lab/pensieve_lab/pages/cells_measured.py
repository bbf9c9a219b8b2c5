"""Markdown tables of measurements in `lab/docs/cells_figures.md`: loads, baselines, tasks, cuDNN, the host.

Owns: which documents are shown, and at which loads.
Does not know: how they were made.
Called by `programs.refresh_pages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pensieve_lab.cells.systems import BY_AGENDA, BY_DEPTH, CELLULAR, IDEAL, PADDING_OLDEST
from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.pages.cells_tables import Peak
from pensieve_lab.pages.paper_tables import markdown

_CUDNN: Final = "padding, cuDNN"
_KEEPS_UP: Final = 0.98  # share of the offered load
_BATCH: Final = 512
_NUM_RUNNING: Final = 1000  # requests in the engine, when the host's costs were measured


class Setting(NamedTuple):
    """A line of the table of peaks.

    Attributes:
      what: description.
      documents: of its runs, without "h200_" and ".json".
      rivals: baselines; the page shows the best one.
      bound: if known, the document of its cell's times, and words per request.
    """

    what: str
    documents: tuple[str, ...]
    rivals: tuple[str, ...]
    bound: tuple[str, float | None] | None = None


_SETTINGS: Final = (
    Setting("LSTM 1,024, float32", ("lstm", "lstm_padding"), (_CUDNN, PADDING_OLDEST), ("cells_lstm", None)),
    Setting("the same, batches of at most 64", ("lstm_64",), (PADDING_OLDEST,)),
    Setting("the same, 24 words each", ("lstm_24words",), (_CUDNN,), ("cells_lstm", 24)),
    Setting("the same, English of WMT, at most 50 words", ("lstm_wmt",), (_CUDNN,)),
    Setting("LSTM 4,096, bfloat16", ("lstm_4096",), (PADDING_OLDEST,), ("cells_lstm_4096", None)),
    Setting("LSTM 1,024, bfloat16", ("lstm_bf16",), (), ("cells_lstm_bf16", None)),
    Setting(
        "LSTM 1,024, bfloat16, another machine",
        ("lstm_bf16_first",),
        (PADDING_OLDEST,),
        ("cells_lstm_bf16", None),
    ),
    Setting("Seq2Seq 1,024, float32, batches of 512 and 256", ("seq2seq",), (PADDING_OLDEST,)),
    Setting("TreeLSTM 1,024, float32, batches of 64", ("trees",), (BY_AGENDA, BY_DEPTH)),
    Setting("the same, complete trees of 16 leaves", ("trees16",), (BY_AGENDA, IDEAL)),
)


class _Load(NamedTuple):
    rate: int
    throughput: float
    p90_ms: float
    launched_ms: float


def _loads(documents: Sequence[str], system: str) -> list[_Load]:
    points = [
        point
        for name in documents
        for point in committed_document(f"h200_cellular_{name}.json")["results"]["points"]
        if point["system"] == system
    ]
    return [
        _Load(
            point["rate"],
            point["throughput"],
            1e3 * point["latency_s"]["p90"],
            1e3 * point["queueing_s"]["p99"],
        )
        for point in sorted(points, key=lambda one: one["rate"])
    ]


def _most(loads: Sequence[_Load]) -> Peak:
    """Return the highest throughput at any load; if the highest load is served, the peak may be higher."""
    highest = max(loads, key=lambda one: one.rate)
    return Peak(max(load.throughput for load in loads), highest.throughput >= _KEEPS_UP * highest.rate)


def by_load() -> str:
    """Return the thesis' LSTM at every load, compared with cuDNN and padding of cells."""
    ours = _loads(("lstm",), CELLULAR)
    cudnn = {load.rate: load for load in _loads(("lstm",), _CUDNN)}
    padding = {load.rate: load for load in _loads(("lstm_padding",), PADDING_OLDEST)}
    body = []
    for load in ours:
        theirs, cells = cudnn[load.rate], padding.get(load.rate)
        body.append(
            (
                f"{load.rate:,}",
                f"{load.throughput:,.0f}",
                f"{load.p90_ms:.1f}",
                f"{load.launched_ms:.1f}",
                f"{theirs.throughput:,.0f}",
                f"{theirs.p90_ms:.1f}",
                f"{cells.p90_ms:.1f}" if cells else "",
            )
        )
    columns = (
        "offered, requests/s",
        "cellular: requests/s",
        "p90, ms",
        "p99 of queueing, ms",
        "cuDNN: requests/s",
        "p90, ms",
        "cells padded: p90, ms",
    )
    return markdown(columns, body)


def peaks() -> str:
    """Return the peak of each setting, compared with its best baseline in the same run."""
    return markdown(
        (
            "model and load",
            "peak, requests/s",
            "share of the bound",
            "best rival's peak, requests/s",
            "p90 at about half of the peak, ms",
            "rival's p90, ms",
        ),
        [_line(one) for one in _SETTINGS],
    )


def _line(setting: Setting) -> tuple[str, ...]:
    ours = _loads(setting.documents, CELLULAR)
    most = _most(ours)
    share = "" if setting.bound is None else f"{100 * most.throughput / _bound(*setting.bound):.0f}%"
    half = min(ours, key=lambda one: abs(one.rate - most.throughput / 2))
    rivals = {name: _loads(setting.documents, name) for name in setting.rivals}
    best = max(rivals, key=lambda name: _most(rivals[name]).throughput, default=None)
    if best is None:
        return (setting.what, str(most), share, "", _at(half), "")
    its = next((load for load in rivals[best] if load.rate == half.rate), None)
    shown = f"{_most(rivals[best])}, {best}"
    return (setting.what, str(most), share, shown, _at(half), _at(its) if its else "")


def _at(load: _Load) -> str:
    return f"{load.p90_ms:.1f} at {load.rate:,}"


def _bound(document: str, words: float | None) -> float:
    """Return the requests per second if every task were full and took as long as it does alone."""
    mean = (
        committed_document("sim_cells2.10_v100.json")["results"]["rows"]["mean"] if words is None else words
    )
    return _BATCH / _task_s(document, _BATCH) / float(mean)


def _task_s(document: str, size: int) -> float:
    points = committed_document(f"h200_{document}.json")["results"]["points"]
    most = max(point["num_tasks"] for point in points)
    (found,) = (p["task_s"] for p in points if p["batch_size"] == size and p["num_tasks"] == most)
    return float(found)


def tasks() -> str:
    """Return task times in launches of one and of several, compared with a step of cuDNN's LSTM."""
    body = []
    for name, document in _CELLS.items():
        results = committed_document(f"h200_{document}.json")["results"]
        peers = {(one["peer"], one["batch_size"]): one["step_s"] for one in results["peers"]}
        for size in (64, _BATCH):
            single = _first(
                p["task_s"] for p in results["points"] if (p["batch_size"], p["num_tasks"]) == (size, 1)
            )
            others = [
                f"{1e6 * peers[peer, size]:.1f}" if (peer, size) in peers else ""
                for peer in ("cudnn", "torch")
            ]
            several = 1e6 * _task_s(document, size)
            body.append((name, str(size), f"{1e6 * single:.1f}", f"{several:.1f}", *others))
    columns = (
        "LSTM",
        "batch",
        "task, alone in a launch, µs",
        "task, one of several, µs",
        "cuDNN's step through JAX, µs",
        "through torch, µs",
    )
    return markdown(columns, body)


def _first(values: Any) -> float:
    return float(next(iter(values)))


def host() -> str:
    """Return the host's costs with `_NUM_RUNNING` requests and a device that takes no time."""
    body = []
    for name, document in _CELLS.items():
        loads = committed_document(f"h200_{document}.json")["results"]["host"]
        body += [(name, *_host_line(load)) for load in loads if load["num_running"] == _NUM_RUNNING]
    columns = (
        "LSTM",
        "cells per launch",
        "form a launch, µs",
        "complete it, µs",
        "submit a request, µs",
        "most requests/s",
    )
    return markdown(columns, body)


def _host_line(load: Mapping[str, float]) -> tuple[str, ...]:
    return (
        f"{load['cells_per_launch']:,.0f}",
        *(f"{1e6 * load[name]:.0f}" for name in ("form_s", "complete_s")),
        f"{1e6 * load['submit_s']:.1f}",
        f"{load['requests_per_s']:,.0f}",
    )


_CELLS: Final = {
    "1,024, float32": "cells_lstm",
    "1,024, bfloat16": "cells_lstm_bf16",
    "4,096, bfloat16": "cells_lstm_4096",
}
TABLES: Final[dict[str, Callable[[], str]]] = {
    "cells-by-load": by_load,
    "cells-peaks": peaks,
    "cells-tasks": tasks,
    "cells-host": host,
}
