"""Registry of all experiments by name."""

from __future__ import annotations

from pensieve_lab.experiments.baton import BATON
from pensieve_lab.experiments.cells import CELLS
from pensieve_lab.experiments.datasets import DATASETS
from pensieve_lab.experiments.eviction import EVICTION
from pensieve_lab.experiments.kernels import KERNELS
from pensieve_lab.experiments.long_warm_up import LONG_WARM_UP
from pensieve_lab.experiments.measured_loops import MEASURED_LOOPS
from pensieve_lab.experiments.oracle import ORACLE
from pensieve_lab.experiments.paper_sweeps import LOAD_EXPERIMENTS
from pensieve_lab.experiments.recorded_traces import RECORDED_TRACES
from pensieve_lab.experiments.single_steps import CHUNKS, TURNS
from pensieve_lab.experiments.think_time import THINK_TIME

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        *(TURNS, CHUNKS, *LOAD_EXPERIMENTS, MEASURED_LOOPS, KERNELS, EVICTION, THINK_TIME, DATASETS),
        *(LONG_WARM_UP, RECORDED_TRACES, ORACLE),
        *CELLS,
        *BATON,
    )
}
