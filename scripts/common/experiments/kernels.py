"""The attention kernel on the paper's Figure 12: what `benchmark_kernels.py` measured, put side by side.

Owns: which committed document and cases belong to that figure.
Does not know: how kernels are measured.
Called by: the registry.
"""

from __future__ import annotations

from typing import Any

from common.experiments.committed import committed_document
from common.experiments.panels import Panel
from common.experiments.points import Measured
from common.experiments.settings import Experiment, Findings, Settings, Table

_DOCUMENT = "h200_kernels.json"
_CASES = {1024: "multi_32x8x1024_mha40", 4096: "multi_32x8x4096_mha40", 16_384: "multi_32x8x16384_mha40"}
# On another machine of the kind, as docs/kernels.md says: us by context. For documents without peers.
_ELSEWHERE = {
    "FlashAttention-3, paged, another H200": {1024: 181.0, 4096: 618.0, 16_384: 2389.0},
    "cuDNN, contiguous, another H200": {4096: 901.0, 16_384: 3504.0},
}


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    document = committed_document(_DOCUMENT)
    elsewhere = {} if _has_peers(document) else _ELSEWHERE
    times_us = _times_us(document) | elsewhere
    return Findings(
        tables=[
            Table(
                title=f"32 requests of 8 query tokens, 40 heads, microseconds a call; ours: {_DOCUMENT}",
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
                dashed=frozenset(elsewhere),
                log_x=True,
            )
        ],
        results={
            "document": f"docs/results/{_DOCUMENT}",
            "document_command": document["command"],
            "time_us": {name: {str(n): us for n, us in of.items()} for name, of in times_us.items()},
            "measured_earlier": sorted(elsewhere),
        },
        units={"time_us": "microseconds a call, by context tokens"},
    )


def _has_peers(document: dict[str, Any]) -> bool:
    """Whether other kernels were measured in the same run; the older form of documents has ours alone."""
    return isinstance(document["results"], dict)


def _times_us(document: dict[str, Any]) -> dict[str, dict[int, float]]:
    """By kernel and context, of the cases of the figure; the document may be of either form."""
    results = document["results"]
    entries = results["measurements"] if _has_peers(document) else results
    contexts = {case: context for context, case in _CASES.items()}
    found: dict[str, dict[int, float]] = {}
    for entry in entries:
        if entry["case"] in contexts and "time_us" in entry and not entry.get("is_tried"):
            name = entry.get("kernel") or entry["backend"]
            found.setdefault(name, {})[contexts[entry["case"]]] = entry["time_us"]
    return found


KERNELS = Experiment(
    name="fig12",
    title="The multi-token kernel on paged state",
    paper="A kernel over pages is close to one over contiguous keys, and far ahead of copying pages together "
    "first and of one round for every prompt token.",
    points=lambda settings: [],
    findings=_findings,
)
