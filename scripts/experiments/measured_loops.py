"""The paper's Figure 11 as it was measured: open loops on several GPUs, beside what was predicted of them.

Owns: which committed documents belong to which run, and which prediction was committed before it.
Does not know: how a loop is run or simulated.
Called by: the registry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from experiments.committed import committed_document
from experiments.panels import Curve, Panel
from experiments.points import Measured
from experiments.settings import Experiment, Findings, Settings, Table

_MOST_MS = 100.0  # a token: predicted points beyond it are left out, of systems over their limit
_SHOWN_MS = 115.0  # measured ones beyond it are cut off: a system far over its limit
_LABELS = {  # shorter than those of `experiments.systems`: two columns of them fit under a panel
    "pensieve": "both tiers",
    "pensieve-gpu": "device alone",
    "stateless": "no state",
    "vllm-offload": "vLLM",
}
_OF_SMALL_STEPS = "_512.json"  # documents of vLLM with steps as small as ours, which are not joined to others


class Run(NamedTuple):
    """A model on devices of one host.

    Attributes:
      title: what ran on what.
      predicted: the prediction's document.
      loops: what documents of the loops are called before the system's name.
      points: by system the rest of their names.
      other_users: likewise, of another seed than the points' and the prediction's, 0.
    """

    title: str
    predicted: str
    loops: str
    points: dict[str, tuple[str, ...]]
    other_users: dict[str, tuple[str, ...]]


RUNS = (
    Run(
        "OPT-66B, four H200s", "predicted_h200x4_opt-66b.json", "h200x4_open_opt-66b",
        {"pensieve": ("0.9", "1.1"), "pensieve-gpu": ("0.9",), "stateless": ("0.75", "0.9")}, {},
    ),
    Run(
        "Llama-2-70B, four H100s", "predicted_h100x4_llama2-70b.json", "h100x4_open_llama2-70b",
        {"pensieve": ("2.5_first_sums",), "pensieve-gpu": ("1.5",), "stateless": ("1", "1.5")}, {},
    ),
    Run(
        "OPT-66B, two H200s", "predicted_h200x2_opt-66b.json", "h200x2_open_opt-66b",
        {
            "pensieve": ("0.5", "0.6"), "pensieve-gpu": ("0.5", "0.6"), "stateless": ("0.4", "0.5"),
            "vllm-offload": ("0.5_512",),
        },
        {"pensieve": ("0.6_seed1",), "pensieve-gpu": ("0.6_seed1",), "stateless": ("0.5_seed1",)},
    ),
    Run(
        "Llama-2-70B, two H200s", "predicted_h200x2_llama2-70b.json", "h200x2_open_llama2-70b",
        {
            "pensieve": ("1.5", "2", "2.5"), "pensieve-gpu": ("1", "1.25"), "stateless": ("0.5", "0.75"),
            "vllm-offload": ("1", "1.5", "2_512"),
        },
        {"pensieve": ("2.5_seed1",), "pensieve-gpu": ("1.25_seed1",), "stateless": ("0.75_seed1",)},
    ),
)  # fmt: skip


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    rows, panels, results = [], [], {}
    for run in RUNS:
        documents, of_others = _names(run.loops, run.points), _names(run.loops, run.other_users)
        found = {name: _measured(names) for name, names in documents.items()}
        found_of_others = {name: _measured(names) for name, names in of_others.items()}
        predicted = committed_document(run.predicted)["results"]["systems"]
        curves = _joined(documents)
        curves |= {f"{_LABELS[name]}, other users": points for name, points in found_of_others.items()}
        rows += [
            [run.title, name, f"{x:.2f}", f"{y:.1f}"] for name, points in curves.items() for x, y in points
        ]
        forecasts = {
            f"{_LABELS[name]}, predicted": [at for at in _curve(points) if at[1] <= _MOST_MS]
            for name, points in predicted.items()
        }
        panels.append(
            Panel(
                title=run.title,
                x_label="requests answered a second",
                y_label="milliseconds a token",
                curves=curves | forecasts,
                dashed=frozenset(forecasts),
                x_from_zero=True,
                y_max=_SHOWN_MS,
                coloured_as={
                    f"{label}, {what}": f"{label}, measured"
                    for label in _LABELS.values()
                    for what in ("predicted", "other users", "steps of 512")
                },
            )
        )
        results[run.title] = {
            "measured": found,
            "of_other_users": found_of_others,
            "documents": [
                name for part in (documents, of_others) for names in part.values() for name in names
            ],
            "prediction": run.predicted,
        }
    return Findings(
        tables=[
            Table(
                title="Open loops, measured",
                columns=["run", "system", "requests/s", "ms a token"],
                rows=rows,
            )
        ],
        panels=panels,
        results=results,
        units={
            "measured": "[requests answered a second, milliseconds a token] by system and load",
            "of_other_users": "likewise, of other seeds",
        },
        origin="measured on NVIDIA H200 and H100; predictions simulated before",
    )


def _names(loops: str, points: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Documents, by system."""
    return {system: [f"{loops}_{system}_{rest}.json" for rest in ends] for system, ends in points.items()}


def _joined(documents: dict[str, list[str]]) -> dict[str, Curve]:
    """By label what is joined by lines: points of a system with steps of one size."""
    return {
        f"{_LABELS[system]}, {what}": points
        for system, names in documents.items()
        for what, is_small in (("measured", False), ("steps of 512", True))
        if (points := _measured([name for name in names if name.endswith(_OF_SMALL_STEPS) == is_small]))
    }


def _measured(documents: list[str]) -> Curve:
    found = [committed_document(name)["results"]["points"] for name in documents]
    return _curve([point for points in found for point in points])


def _curve(points: list[dict[str, Any]]) -> Curve:
    return [(p["requests_per_s"], 1e3 * p["normalized_latency_s"]["mean"]) for p in points]


MEASURED_LOOPS = Experiment(
    name="fig11-measured",
    title="Large models on several GPUs",
    paper="OPT-66B on four GPUs 2.04 times vLLM's throughput at 200 ms a token, Llama-2-70B 3.0 times at "
    "400 ms (Figure 11, section 6.2).",
    points=lambda settings: [],
    findings=_findings,
    flags=frozenset(),
)
