"""The paper's Figure 12, the attention kernel, from measurements of `benchmark_kernels.py`.

Owns: which committed document and cases belong to that figure, and the baselines' labels.
Does not know: how kernels are measured.
Called by `experiments.registry` and the pages.
"""

from __future__ import annotations

import re
from typing import Any

from pensieve_lab.experiments.committed import committed_document
from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.points import Measured
from pensieve_lab.experiments.settings import Experiment, Findings, Settings, Table

BEST_FLASH = "flash_attention_3_best"
_DOCUMENT = "h200_kernels_fig12.json"
_CASE = re.compile(r"multi_32x8x(\d+)_mha40")

NAMES = {
    "pallas_mosaic_gpu": "ours, on pages",
    "flash_attention_3": "FlashAttention-3, on the same pages",
    BEST_FLASH: "FlashAttention-3, at its best page size",
    "torch_cudnn": "cuDNN, contiguous keys",
    "copy_out": "straw man: pages copied together, then cuDNN",
    "rounds": "straw man: a round for every prompt token",
}
"""Kernels in display order; the term "straw man" is the paper's own."""


type Times = dict[int, dict[str, float]]
"""Microseconds per call by context tokens, and by kernel."""


def times_us() -> Times:
    """Return the times of the committed document."""
    return times_of(committed_document(_DOCUMENT))


def times_of(document: dict[str, Any]) -> Times:
    """Return times by context; skip kernels that were only tried, failed, or have no name here."""
    found: Times = {}
    for entry in document["results"]["measurements"]:
        case = _CASE.fullmatch(entry["case"])
        if case and "time_us" in entry and not entry.get("is_tried"):
            found.setdefault(int(case[1]), {})[entry["kernel"]] = entry["time_us"]
    shown: Times = {}
    for context, by_kernel in sorted(found.items()):
        flash = [us for kernel, us in by_kernel.items() if kernel.startswith("flash_attention_3")]
        with_best = {**by_kernel, **({BEST_FLASH: min(flash)} if flash else {})}
        shown[context] = {kernel: with_best[kernel] for kernel in NAMES if kernel in with_best}
    return shown


def _findings(settings: Settings, measured: list[Measured]) -> Findings:
    found = times_us()
    return Findings(
        tables=[
            Table(
                title="32 requests of 8 query tokens, 40 heads of their own keys, microseconds a call",
                columns=["context", *NAMES.values()],
                rows=[
                    [context, *(_cell(by_kernel.get(kernel)) for kernel in NAMES)]
                    for context, by_kernel in found.items()
                ],
            )
        ],
        panels=[
            Panel(
                title="32 requests of 8 query tokens, 40 heads of their own keys",
                x_label="context tokens of each request",
                y_label="microseconds a call",
                curves={
                    name: [(n, by_kernel[kernel]) for n, by_kernel in found.items() if kernel in by_kernel]
                    for kernel, name in NAMES.items()
                    if kernel != BEST_FLASH  # its curve would hide that of the same pages
                },
                dashed=frozenset([NAMES["copy_out"], NAMES["rounds"]]),
                log_x=True,
                log_y=True,
            )
        ],
        results={
            "time_us": {str(context): by_kernel for context, by_kernel in found.items()},
            "document": f"lab/results/{_DOCUMENT}",
            "document_command": committed_document(_DOCUMENT)["command"],
        },
        units={"time_us": "microseconds a call, by context tokens and kernel"},
        origin="measured on NVIDIA H200",
    )


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
