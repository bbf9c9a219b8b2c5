"""The attention kernel on the paper's Figure 12: what `benchmark_kernels.py` measured, put side by side.

Owns: which committed documents and cases belong to that figure, and which of two documents a kernel is from.
Does not know: how kernels are measured, or any figure.
Called by: the registry.
"""

from __future__ import annotations

from typing import Any

from common.experiments.committed import committed_document
from common.experiments.panels import Panel
from common.experiments.points import Measured
from common.experiments.settings import Experiment, Findings, Settings, Table

_DOCUMENT = "h200_kernels_multi.json"
_EARLIER = "h200_kernel_peers_earlier.json"
_CASES = {1024: "multi_32x8x1024_mha40", 4096: "multi_32x8x4096_mha40", 16_384: "multi_32x8x16384_mha40"}

type Times = dict[str, dict[int, float]]
"""Microseconds a call by kernel and context."""


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    document, earlier = committed_document(_DOCUMENT), committed_document(_EARLIER)
    times_us = _times_us(document)
    others_us = _others(times_us, _times_us(earlier))
    named_us = times_us | {f"{name}, another {earlier['device']}": of for name, of in others_us.items()}
    return Findings(
        tables=[
            Table(
                title=f"32 requests of 8 query tokens, 40 heads, microseconds a call; ours: {_DOCUMENT}",
                columns=["context", *named_us],
                rows=[
                    [context, *(f"{of[context]:.0f}" if context in of else "-" for of in named_us.values())]
                    for context in _CASES
                ],
            )
        ],
        panels=[
            Panel(
                title="NVIDIA H200, measured",
                x_label="context tokens of each request",
                y_label="microseconds a call",
                curves={name: sorted(of.items()) for name, of in named_us.items()},
                dashed=frozenset(named_us) - frozenset(times_us),
                log_x=True,
            )
        ],
        results={
            "time_us": {name: {str(n): us for n, us in of.items()} for name, of in named_us.items()},
            "documents": {
                name: f"docs/results/{_DOCUMENT if name in times_us else _EARLIER}" for name in named_us
            },
            "document_command": document["command"],
            "earlier_source": earlier["source"] if others_us else None,
        },
        units={"time_us": "microseconds a call, by context tokens"},
    )


def _others(times_us: Times, earlier_us: Times) -> Times:
    """Kernels that were measured earlier alone: a newer measurement stands instead of them, never beside."""
    return {name: of for name, of in earlier_us.items() if name not in times_us}


def _times_us(document: dict[str, Any]) -> Times:
    """Of the cases of the figure; the older form of documents is a list of results of our kernel alone."""
    results = document["results"]
    entries = results["measurements"] if isinstance(results, dict) else results
    contexts = {case: context for context, case in _CASES.items()}
    found: Times = {}
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
    flags=frozenset(),
)
