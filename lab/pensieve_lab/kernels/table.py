"""Reports of kernel measurements: a line per measurement, a summary at the end, and entries of the JSON.

Owns: the record of a measurement, its share of the bound, and the ratio of whole batches to their parts.
Does not know: how anything was measured.
Called by the kernel benchmarks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_kernels.ragged_paged_attention import TileClass
from pensieve_jax.commands.report import table
from pensieve_lab.kernels.timing import Timing
from pensieve_lab.steps.bounds import Operation
from pensieve_lab.steps.ceilings import Ceilings

UNITS = {
    "time_us": "median microseconds a call",
    "bound_us": "microseconds: max(num_bytes / read bandwidth, flop / peak of products)",
    "share_of_bound": "bound / time",
    "gb_per_s": "1e9 byte/s",
    "tflop_per_s": "1e12 FLOP/s",
    "max_error": "largest difference from the references, absolute up to 1 and relative above",
    "over_parts": "time / (time of its decodes alone + time of its prompts alone)",
    "ceilings": "byte/s and FLOP/s, measured in this run",
}
HEADER = (
    f"{'case':28} {'kernel':18} {'us':>10} {'bound':>8} {'share':>6} {'TB/s':>5} {'TFLOP/s':>8}"
    f" {'error':>7} {'/parts':>6}  set up as"
)


@dataclasses.dataclass(frozen=True)
class Result:
    """One kernel on one case.

    Attributes:
      name: of a back end or a baseline.
      is_peer: whether it is a baseline.
      work: bytes and FLOP that the case needs at least.
      bound_s: time of that work at the ceilings.
      label: configuration of the kernel.
      max_error: difference from the references; None without an answer.
      timing: None without an answer, or after a wrong one.
      reason: why there is no timing.
      blocks: tile classes of this project's kernel.
      is_tried: whether the blocks differ from the kernel's default.
      parts_s: times of the decodes and of the prompts of a mixed batch, alone.
    """

    name: str
    is_peer: bool
    work: Operation
    bound_s: float
    label: str = ""
    max_error: float | None = None
    timing: Timing | None = None
    reason: str = ""
    blocks: tuple[TileClass, ...] = ()
    is_tried: bool = False
    parts_s: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time of a call; infinite without a timing, so that it sorts last."""
        return self.timing.seconds if self.timing is not None else float("inf")

    @property
    def share(self) -> float:
        """Fraction of the roofline bound that is reached."""
        return self.bound_s / self.seconds

    @property
    def over_parts(self) -> float | None:
        """Time of the whole over the sum of its parts, if it has parts."""
        return self.seconds / sum(self.parts_s.values()) if self.parts_s else None

    def line(self) -> str:
        """Return the line for the terminal, under `HEADER`."""
        start = f"{self.work.name:28} {self.name:18}"
        if self.timing is None:
            return f"{start} {self.reason}"
        parts = "" if self.over_parts is None else f"{self.over_parts:.3f}"
        return (
            f"{start} {1e6 * self.seconds:10.1f} {1e6 * self.bound_s:8.1f} {self.share:6.1%}"
            f" {1e-12 * self.work.num_bytes / self.seconds:5.2f}"
            f" {1e-12 * self.work.flop / self.seconds:8.1f} {self.max_error:7.0e} {parts:>6}  {self.label}"
        ).rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for the JSON document."""
        found: dict[str, Any] = {
            "case": self.work.name,
            "kernel": self.name,
            "is_peer": self.is_peer,
            "label": self.label,
            "num_bytes": self.work.num_bytes,
            "flop": self.work.flop,
            "bound_us": round(1e6 * self.bound_s, 2),
        }
        if self.blocks:
            found["blocks"] = [dataclasses.asdict(one) for one in self.blocks]
            found["is_tried"] = self.is_tried
        if self.max_error is not None:
            # JSON has no NaN, which a wrong answer's error may be.
            found["max_error"] = self.max_error if self.max_error < float("inf") else None
        if self.timing is None:
            return found | {"reason": self.reason}
        found |= {
            "time_us": round(1e6 * self.seconds, 2),
            "share_of_bound": round(self.share, 4),
            "gb_per_s": round(1e-9 * self.work.num_bytes / self.seconds, 1),
            "tflop_per_s": round(1e-12 * self.work.flop / self.seconds, 1),
            "num_iterations": self.timing.num_iterations,
            "timed_by": self.timing.timed_by,
        }
        if self.over_parts is not None:
            found["parts_us"] = {name: round(1e6 * one, 2) for name, one in self.parts_s.items()}
            found["over_parts"] = round(self.over_parts, 4)
        return found


def summary(results: Sequence[Result]) -> str:
    """Return a table of the project's best kernel and the best baseline for every case."""
    rows = []
    for case in dict.fromkeys(result.work.name for result in results):
        of_case = sorted((r for r in results if r.work.name == case), key=lambda result: result.seconds)
        ours = next((r for r in of_case if not r.is_peer and r.timing is not None), None)
        peer = next((r for r in of_case if r.is_peer and r.timing is not None), None)
        if ours is None:
            continue
        rows.append(
            [case, ours.name, f"{1e6 * ours.seconds:.1f}", f"{ours.share:.1%}"]
            + (
                [peer.name, f"{1e6 * peer.seconds:.1f}", f"{peer.seconds / ours.seconds:.2f}"]
                if peer
                else [""] * 3
            )
            + ["" if ours.over_parts is None else f"{ours.over_parts:.3f}", ours.label]
        )
    columns = [
        "case",
        "best of ours",
        "us",
        "of bound",
        "best peer",
        "us",
        "peer / ours",
        "whole / parts",
        "ours set up as",
    ]
    return table(columns, rows)


def ceilings_line(ceilings: Ceilings) -> str:
    """Return the line that lists the ceilings behind the bounds."""
    read, copy, flop = (1e-12 * one for one in ceilings)
    return f"ceilings: read {read:.2f} TB/s, copy {copy:.2f} TB/s, products {flop:.1f} TFLOP/s"
