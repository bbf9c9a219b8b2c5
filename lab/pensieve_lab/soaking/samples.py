"""Samples of a busy server's resources, and the check that they do not grow.

Owns: the figures of a sample, where they come from, and what counts as growth.
Does not know: what clients do.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pensieve_jax.server.http.text_processes import WORKER
from pensieve_jax.server.workers import MAX_THREADS

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ENGINE_TABLES = (
    *("num_live_conversations", "num_known_turns", "num_known_chunks", "num_shared_prefixes"),
    *("num_running", "num_waiting"),
)


class Slack(NamedTuple):
    """Growth that is allowed: the maximum of the last third may exceed the earlier one by the larger of both.

    Maxima, not medians: tables follow the load, which varies on a shared host.
    """

    ratio: float
    amount: float


_SLACKS = {
    "rss_mb": Slack(1.05, 4.0),
    "threads": Slack(1.0, MAX_THREADS),  # the front end starts its worker threads on first use
    "descriptors": Slack(1.1, 12.0),
}
_TABLES_SLACK = Slack(1.25, 20.0)


@dataclass
class Samples:
    """Series of figures by name, all as long as `minutes`, the times of the samples."""

    minutes: list[float] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)

    def add(self, minutes: float, figures: Mapping[str, float]) -> None:
        """Add a sample; a name that is new gets zeros for the earlier samples."""
        num_before = len(self.minutes)
        self.minutes.append(round(minutes, 2))
        for name in {**self.series, **figures}:
            self.series.setdefault(name, [0.0] * num_before).append(figures.get(name, 0.0))

    def growing(self) -> dict[str, str]:
        """Return the series that grow and a description of the growth."""
        found = {}
        for name, values in sorted(self.series.items()):
            slack = next((s for end, s in _SLACKS.items() if name.endswith(end)), _TABLES_SLACK)
            third = max(1, len(values) // 3)
            before, last = max(values[:-third], default=values[0]), max(values[-third:])
            if last > max(before * slack.ratio, before + slack.amount):
                found[name] = f"at most {before:g} in the first two thirds, {last:g} in the last"
        return found

    def summary(self) -> dict[str, dict[str, float]]:
        """Return first value, medians of the second and last third, maximum and last value of each series."""
        return {
            name: {
                "first": values[0],
                "second_third": _thirds(values)[0],
                "last_third": _thirds(values)[1],
                "largest": max(values),
                "last": values[-1],
            }
            for name, values in sorted(self.series.items())
        }


def process_figures(name: str, pid: int) -> dict[str, float]:
    """Return resident memory (MB), threads and descriptors of a process; raises OSError if it is gone."""
    process = Path("/proc") / str(pid)
    resident = int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
    return {
        f"{name}_rss_mb": round(resident / 1e6, 2),
        f"{name}_threads": float(len(os.listdir(process / "task"))),
        f"{name}_descriptors": float(len(os.listdir(process / "fd"))),
    }


def child_of(pid: int) -> int:
    """Return the engine's process, a child of the front end; raise ValueError if the engine does not run."""
    for thread in (Path("/proc") / str(pid) / "task").iterdir():
        for child in (thread / "children").read_text().split():
            if WORKER not in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise ValueError(f"process {pid} has no engine")


def table_figures(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the number of rows of each table of ids, from an answer of /v1/pensieve/stats."""
    engine = {f"engine_{name.removeprefix('num_')}": float(stats[name]) for name in _ENGINE_TABLES}
    return {**{f"front_{name}": float(rows) for name, rows in stats["tables"].items()}, **engine}


def _thirds(values: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the second and of the last third."""
    third = max(1, len(values) // 3)
    return statistics.median(values[third : 2 * third] or values), statistics.median(values[-third:])
