"""The attention kernel on the paper's Figure 12: what `benchmark_kernels.py` measured, put side by side.

Owns: which committed documents and cases belong to that figure, and what its rivals are called.
Does not know: how kernels are measured, or any figure.
Called by: the registry.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from experiments.committed import committed_document
from experiments.panels import Panel
from experiments.points import Measured
from experiments.settings import Experiment, Findings, Settings, Table

_DOCUMENTS = ("h200_kernels_decode.json", "h200_kernels_prompts.json", "h200_kernels_peers.json")
_CASE = re.compile(r"multi_32x8x(\d+)_(mha40|gqa10)")
_SHOWN_HEADS = "mha40"

NAMES = {
    "pallas_mosaic_gpu": "ours, on pages",
    "flash_attention_3": "FlashAttention-3, on pages",
    "flashinfer": "FlashInfer, on pages",
    "torch_cudnn": "cuDNN, contiguous keys",
    "copy_out": "straw man: pages copied together, then cuDNN",
    "rounds": "straw man: a round for every prompt token",
}
"""What is shown, in this order; the paper names its two straw men so itself."""


class Row(NamedTuple):
    """One case of one run.

    Attributes:
      heads: 40 of their own keys (`mha40`), or 40 over 10 (`gqa10`).
      context_tokens: of each request.
      document: of `docs/results`.
      time_us: microseconds a call by kernel.
    """

    heads: str
    context_tokens: int
    document: str
    time_us: dict[str, float]


def rows() -> list[Row]:
    """Of every document, by heads and context."""
    found = [row for name in _DOCUMENTS for row in rows_of(name, committed_document(name))]
    return sorted(found, key=lambda row: (row.heads != _SHOWN_HEADS, row.context_tokens))


def rows_of(name: str, document: dict[str, Any]) -> list[Row]:
    """Of one document: kernels that were only tried, or that failed, are left out."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for entry in document["results"]["measurements"]:
        case = _CASE.fullmatch(entry["case"])
        if case and entry["kernel"] in NAMES and "time_us" in entry and not entry.get("is_tried"):
            found.setdefault((case[2], int(case[1])), {})[entry["kernel"]] = entry["time_us"]
    return [Row(heads, context, name, times) for (heads, context), times in found.items()]


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    found = rows()
    return Findings(
        tables=[
            Table(
                title="32 requests of 8 query tokens, microseconds a call; a row is one run",
                columns=["heads", "context", *NAMES.values()],
                rows=[
                    [row.heads, row.context_tokens, *(_cell(row.time_us.get(kernel)) for kernel in NAMES)]
                    for row in found
                ],
            )
        ],
        panels=[
            Panel(
                title="32 requests of 8 query tokens, 40 heads of their own keys",
                x_label="context tokens of each request",
                y_label="microseconds a call",
                curves={name: curve for kernel, name in NAMES.items() if (curve := _curve(found, kernel))},
                dashed=frozenset([NAMES["torch_cudnn"]]),
                log_x=True,
                log_y=True,
            )
        ],
        results={
            "rows": [row._asdict() for row in found],
            "document_commands": {
                f"docs/results/{name}": committed_document(name)["command"] for name in _DOCUMENTS
            },
        },
        units={"time_us": "microseconds a call, by kernel"},
        origin="measured on NVIDIA H200",
    )


def _curve(found: list[Row], kernel: str) -> list[tuple[float, float]]:
    return [
        (row.context_tokens, row.time_us[kernel])
        for row in found
        if row.heads == _SHOWN_HEADS and kernel in row.time_us
    ]


def _cell(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:,.0f}"


KERNELS = Experiment(
    name="fig12",
    title="The multi-token kernel on paged state",
    paper="32 requests of 8 query tokens: the kernel over pages matches one over contiguous keys and is "
    "slightly faster; copying pages together first and a round for every prompt token, straw men, add much "
    "(section 6.4, without numbers).",
    points=lambda settings: [],
    findings=_findings,
    flags=frozenset(),
)
