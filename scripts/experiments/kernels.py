"""The attention kernel on the paper's Figure 12: what `benchmark_kernels.py` measured, put side by side.

Owns: which committed documents and cases belong to that figure.
Does not know: how kernels are measured, or any figure.
Called by: the registry.
"""

from __future__ import annotations

from typing import Any

from experiments.committed import committed_document
from experiments.panels import Panel
from experiments.points import Measured
from experiments.settings import Experiment, Findings, Settings, Table

_DOCUMENTS = ("h200_kernels_decode.json", "h200_kernels_prompts.json")
_CASES = {1024: "multi_32x8x1024_mha40", 4096: "multi_32x8x4096_mha40", 16_384: "multi_32x8x16384_mha40"}

type Times = dict[str, dict[int, float]]
"""Microseconds a call by kernel and context."""


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    documents = {name: committed_document(name) for name in _DOCUMENTS}
    times_us: Times = {}
    for document in documents.values():
        for name, of in _times_us(document).items():
            times_us.setdefault(name, {}).update(of)
    return Findings(
        tables=[
            Table(
                title="32 requests of 8 query tokens, 40 heads, microseconds a call",
                columns=["context", *times_us],
                rows=[
                    [context, *(f"{of[context]:.0f}" if context in of else "-" for of in times_us.values())]
                    for context in _CASES
                ],
            )
        ],
        panels=[
            Panel(
                title="NVIDIA H200, measured",
                x_label="context tokens of each request",
                y_label="microseconds a call",
                curves={name: sorted(of.items()) for name, of in times_us.items()},
                log_x=True,
            )
        ],
        results={
            "time_us": {name: {str(n): us for n, us in of.items()} for name, of in times_us.items()},
            "document_commands": {
                f"docs/results/{name}": document["command"] for name, document in documents.items()
            },
        },
        units={"time_us": "microseconds a call, by context tokens"},
    )


def _times_us(document: dict[str, Any]) -> Times:
    """Of the cases of the figure."""
    contexts = {case: context for context, case in _CASES.items()}
    found: Times = {}
    for entry in document["results"]["measurements"]:
        if entry["case"] in contexts and "time_us" in entry and not entry.get("is_tried"):
            found.setdefault(entry["kernel"], {})[contexts[entry["case"]]] = entry["time_us"]
    return found


KERNELS = Experiment(
    name="fig12",
    title="The multi-token kernel on paged state",
    paper="A kernel over pages is close to one over contiguous keys, and far ahead of copying pages together "
    "first and of one round for every prompt token.",
    points=lambda settings: [],
    findings=_findings,
    flags=frozenset(),
)
