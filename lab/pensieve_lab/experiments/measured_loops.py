"""The paper's Figure 11 as measured: open loops on several GPUs, and the predictions for them.

Owns: which committed documents belong to which run, and which prediction was committed before it.
Does not know: how a loop is run or simulated.
Called by `experiments.registry`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.experiments.panels import Curve, Panel
from pensieve_lab.experiments.points import Measured
from pensieve_lab.experiments.settings import Experiment, Findings, Settings, Table

_MAX_MS = 100.0  # per token; predicted points above it, of systems over their limit, are left out
_SHOWN_MS = 115.0  # measured points above it, of systems far over their limit, are cut off
_LABELS = {  # shorter than those of `experiments.systems`, so that two columns fit under a panel
    "pensieve": "both tiers",
    "pensieve-gpu": "device alone",
    "stateless": "no state",
    "vllm-offload": "vLLM ({max_num_batched_tokens:,})",
}


class Run(NamedTuple):
    """A model on devices of one host.

    Attributes:
      title: model and devices.
      predicted: the prediction's document.
      loops: first part of the loop documents' names, before the system.
      points: by system, the last parts of their names.
      other_users: the same for runs with another seed; `points` and the prediction use seed 0.
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
            "vllm-offload": ("2_512", "1", "1.5"),
        },
        {"pensieve": ("2.5_seed1",), "pensieve-gpu": ("1.25_seed1",), "stateless": ("0.75_seed1",)},
    ),
)  # fmt: skip


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    rows, panels, results = [], [], {}
    for run in RUNS:
        documents, other_documents = _names(run.loops, run.points), _names(run.loops, run.other_users)
        loops, other_loops = _measured(documents), _measured(other_documents)
        predicted = committed_document(run.predicted)["results"]["systems"]
        curves = {f"{label}, measured": points for label, points in loops.items()}
        curves |= {f"{label}, other users": points for label, points in other_loops.items()}
        rows += [
            [run.title, name, f"{x:.2f}", f"{y:.1f}"] for name, points in curves.items() for x, y in points
        ]
        forecasts = {
            f"{_LABELS[name]}, predicted": [point for point in _curve(points) if point[1] <= _MAX_MS]
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
                    for what in ("predicted", "other users")
                },
            )
        )
        results[run.title] = {
            "measured": loops,
            "of_other_users": other_loops,
            "documents": [*documents, *other_documents],
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
            "measured": "[requests answered a second, milliseconds a token] by label and load",
            "of_other_users": "likewise, of other seeds",
        },
        origin="measured on NVIDIA H200 and H100; predictions simulated before",
    )


def _names(loops: str, points: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the names of the documents, grouped by system."""
    return [f"{loops}_{system}_{rest}.json" for system, ends in points.items() for rest in ends]


def _measured(documents: list[str]) -> dict[str, Curve]:
    """Return measured points by label; vLLM's label names its largest number of step tokens."""
    found: dict[str, Curve] = {}
    for name in documents:
        loop = committed_document(name)["results"]
        label = _LABELS[loop["system"]].format(**loop.get("options", {}))
        found[label] = [*found.get(label, ()), *_curve(loop["points"])]
    return found


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
