"""What a run of an experiment is asked for, and what it gives back.

Owns: the types between `pensieve_lab.programs.reproduce` and the experiments.
Does not know: any experiment, or how flags are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pensieve_lab.experiments.panels import Panel
from pensieve_lab.experiments.points import Measured, Point

type Row = Sequence[object]

SIMULATION_FLAGS = frozenset({"device", "seeds", "small", "num_processes", "keep"})
"""What an experiment that simulates workloads goes by."""


@dataclass(frozen=True)
class TraceFile:
    """A recorded trace of the user's.

    Attributes:
      path: the file.
      format: as `pensieve_lab.workload.read_trace` takes it.
    """

    path: Path
    format: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an experiment is run.

    Attributes:
      device: whose profiles are simulated: one of `machines.DEVICES`.
      seeds: each of them is a run of every point.
      small: the version that takes seconds, on little memory.
      traces: for the experiment on recorded traces.
    """

    device: str
    seeds: tuple[int, ...]
    small: bool = False
    traces: tuple[TraceFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """For people.

    Attributes:
      title: above it.
      columns, rows: as `pensieve_jax.commands.report.table` takes them.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What an experiment showed.

    Attributes:
      tables: for people.
      panels: of the plot.
      results: for the JSON document.
      profiles: names of the simulated profiles; none where no profile was simulated.
      origin: without profiles, in words where the figures are from.
      is_simulated: whether times are virtual; those of profiles always are.
      units: of `results`.
    """

    tables: Sequence[Table]
    panels: Sequence[Panel]
    results: Mapping[str, Any]
    profiles: Sequence[str] = ()
    origin: str = ""
    is_simulated: bool = False
    units: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure of the paper, or a study of ours.

    Attributes:
      name: what `--experiment` takes.
      title: in a line.
      paper: what the paper says there, in our words.
      points: what is to be simulated; empty where nothing is.
      findings: what the simulated points come to.
      flags: those of the run that change anything here; others are refused rather than ignored.
    """

    name: str
    title: str
    paper: str
    points: Callable[[Settings], list[Point]]
    findings: Callable[[Settings, list[Measured]], Findings]
    flags: frozenset[str] = SIMULATION_FLAGS
