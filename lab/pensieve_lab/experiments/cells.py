"""BatchMaker's figures (chapter 2 of the thesis) as experiments, and the thesis' statements about them.

Owns: names and texts of these experiments.
Does not know: how one is run.
Called by `experiments.registry`.

Figures 2.1, 2.2, 2.4, 2.6 and 2.12 are drawings, so there is nothing to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pensieve_jax.commands.engine_flags import shows_progress
from pensieve_lab.experiments import cell_figures, cell_sweeps
from pensieve_lab.experiments.points import Measured
from pensieve_lab.experiments.settings import Experiment, Findings, Settings


def _experiment(
    name: str, title: str, paper: str, sweeps: Callable[[], Sequence[cell_sweeps.Sweep]]
) -> Experiment:
    def findings(asked: Settings, _: list[Measured]) -> Findings:
        return cell_sweeps.sweep_findings(sweeps(), asked, shown=shows_progress())

    return Experiment(
        name=name,
        title=title,
        paper=paper,
        points=lambda _: [],
        findings=findings,
        flags=frozenset({"seeds", "small"}),
    )


def _single(name: str, title: str, paper: str, findings: Any, flags: set[str]) -> Experiment:
    return Experiment(
        name=name, title=title, paper=paper, points=lambda _: [], findings=findings, flags=frozenset(flags)
    )


CELLS = (
    _single(
        "cells2.3",
        "a step of LSTM by batch size",
        "It takes 185 us up to 64, about, and 784 us at 512; beyond, the time doubles with the batch.",
        cell_figures.steps,
        set(),
    ),
    _single(
        "cells2.5",
        "eight requests, at most four in a batch",
        "By graphs requests 1 to 4 end at 5, the others at 12. By cells request 5 joins at 2, when request 1 "
        "leaves, and 6 and 7 at 3, when 2 and 3 do.",
        cell_figures.joining,
        set(),
    ),
    _experiment(
        "cells2.7",
        "LSTM on lengths like Europarl's, one device",
        "p90 is 12 ms up to 8,000 requests a second and goes up to the peak of 20,000; baselines have at "
        "least 25 ms, and more than 500 ms at 16,000.",
        cell_sweeps.by_batch,
    ),
    _experiment(
        "cells2.8",
        "padding with buckets of 1, 10 and 40 words",
        "Width 40 is best at low load, width 1 has the highest peak, width 10 is the compromise.",
        cell_sweeps.by_width,
    ),
    _single(
        "cells2.9",
        "queueing and computation of LSTM at 5,000 requests a second",
        "99% queue for at most 1.38 ms, with baselines for more than 100 ms; computation is shorter, too.",
        cell_figures.shares,
        {"seeds", "small"},
    ),
    _single(
        "cells2.10",
        "lengths of sentences",
        "The mean is 24 words, the longest sentence 330, about 99% are shorter than 100.",
        cell_figures.lengths_of_sentences,
        {"seeds"},
    ),
    _experiment(
        "cells2.11",
        "LSTM on lengths of no, some and more variance",
        "With 24 words each, baselines reach the bound of 27,136 requests a second, BatchMaker 87% of it; "
        "with variance they lose latency and throughput, and it does not.",
        cell_sweeps.by_variance,
    ),
    _experiment(
        "cells2.13",
        "Seq2Seq on two and four devices",
        "The peak is about 8,500 requests a second on two devices and 17,000 on four, 60% above baselines; "
        "batches of 512 and 256 gain 3.5 to 6% over 256 and 256.",
        cell_sweeps.by_devices,
    ),
    _experiment(
        "cells2.14",
        "TreeLSTM on trees like the TreeBank's, at most 64 in a batch",
        "At 1,000 requests a second p90 is 6.8 ms, and 9.5 with DyNet; the peaks are 3,100 and 2,100.",
        cell_sweeps.trees,
    ),
    _experiment(
        "cells2.15",
        "TreeLSTM on one tree of 16 leaves, at most 64 in a batch",
        "The ideal has about 30% more throughput at its peak, and a higher latency, as it runs 31 cells in a "
        "row.",
        cell_sweeps.equal_trees,
    ),
)
