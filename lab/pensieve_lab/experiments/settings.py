"""Settings and results of an experiment.

Owns: the types between `programs.reproduce` and the experiments.
Does not know: any experiment, or the names of flags.
Called by both.
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
"""Flags that an experiment with simulated workloads uses."""


@dataclass(frozen=True)
class TraceFile:
    """A recorded trace file from the user.

    Attributes:
      path: the file.
      format: as `pensieve_lab.workload.read_trace` takes it.
    """

    path: Path
    format: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an experiment's run.

    Attributes:
      device: simulated device, one of `machines.DEVICES`.
      seeds: every point runs once per seed.
      small: run the version that takes seconds, on little memory.
      traces: for the experiment on recorded traces.
    """

    device: str
    seeds: tuple[int, ...]
    small: bool = False
    traces: tuple[TraceFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for the terminal and documents.

    Attributes:
      title: text above it.
      columns, rows: as `pensieve_jax.commands.report.table` takes them.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of an experiment.

    Attributes:
      tables: for readers.
      panels: of the plot.
      results: for the JSON document.
      profiles: names of the simulated profiles; empty if no profile was simulated.
      origin: source of the figures as text, for figures without profiles.
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
    """One figure of the paper, or a further study.

    Attributes:
      name: value of `--experiment`.
      title: one line.
      paper: summary of the paper's statement.
      points: points to simulate; may be empty.
      findings: function from the simulated points to results.
      flags: flags that affect this experiment; others are refused rather than ignored.
    """

    name: str
    title: str
    paper: str
    points: Callable[[Settings], list[Point]]
    findings: Callable[[Settings, list[Measured]], Findings]
    flags: frozenset[str] = SIMULATION_FLAGS
