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
}


class Run(NamedTuple):
    """A model on devices of one host.

    Attributes:
      title: what ran on what.
      predicted: the prediction's document.
      loops: what documents of the loops are called before the system's name.
      points: by label the rest of their names; a line joins those of a label, whose settings are the same, of
        vLLM with the most tokens of a step in brackets.
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
        {
            "both tiers": ("pensieve_0.9", "pensieve_1.1"),
            "device alone": ("pensieve-gpu_0.9",),
            "no state": ("stateless_0.75", "stateless_0.9"),
        },
        {},
    ),
    Run(
        "Llama-2-70B, four H100s", "predicted_h100x4_llama2-70b.json", "h100x4_open_llama2-70b",
        {
            "both tiers": ("pensieve_2.5_first_sums",),
            "device alone": ("pensieve-gpu_1.5",),
            "no state": ("stateless_1", "stateless_1.5"),
        },
        {},
    ),
    Run(
        "OPT-66B, two H200s", "predicted_h200x2_opt-66b.json", "h200x2_open_opt-66b",
        {
            "both tiers": ("pensieve_0.5", "pensieve_0.6"),
            "device alone": ("pensieve-gpu_0.5", "pensieve-gpu_0.6"),
            "no state": ("stateless_0.4", "stateless_0.5"),
            "vLLM (512)": ("vllm-offload_0.5_512",),
        },
        {
            "both tiers": ("pensieve_0.6_seed1",),
            "device alone": ("pensieve-gpu_0.6_seed1",),
            "no state": ("stateless_0.5_seed1",),
        },
    ),
    Run(
        "Llama-2-70B, two H200s", "predicted_h200x2_llama2-70b.json", "h200x2_open_llama2-70b",
        {
            "both tiers": ("pensieve_1.5", "pensieve_2", "pensieve_2.5"),
            "device alone": ("pensieve-gpu_1", "pensieve-gpu_1.25"),
            "no state": ("stateless_0.5", "stateless_0.75"),
            "vLLM (512)": ("vllm-offload_2_512",),
            "vLLM (2,048)": ("vllm-offload_1", "vllm-offload_1.5"),
        },
        {
            "both tiers": ("pensieve_2.5_seed1",),
            "device alone": ("pensieve-gpu_1.25_seed1",),
            "no state": ("stateless_0.75_seed1",),
        },
    ),
)  # fmt: skip


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    rows, panels, results = [], [], {}
    for run in RUNS:
        documents, of_others = _names(run.loops, run.points), _names(run.loops, run.other_users)
        found = {label: _measured(names) for label, names in documents.items()}
        found_of_others = {label: _measured(names) for label, names in of_others.items()}
        predicted = committed_document(run.predicted)["results"]["systems"]
        curves = {f"{label}, measured": points for label, points in found.items()}
        curves |= {f"{label}, other users": points for label, points in found_of_others.items()}
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
                    for what in ("predicted", "other users")
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
            "measured": "[requests answered a second, milliseconds a token] by label and load",
            "of_other_users": "likewise, of other seeds",
        },
        origin="measured on NVIDIA H200 and H100; predictions simulated before",
    )


def _names(loops: str, points: dict[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Documents, by label."""
    return {label: [f"{loops}_{rest}.json" for rest in ends] for label, ends in points.items()}


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
