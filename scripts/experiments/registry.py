"""Every experiment by name."""

from __future__ import annotations

from experiments.baton import BATON
from experiments.cells import CELLS
from experiments.datasets import DATASETS
from experiments.eviction import EVICTION
from experiments.kernels import KERNELS
from experiments.long_warm_up import LONG_WARM_UP
from experiments.measured_loops import MEASURED_LOOPS
from experiments.oracle import ORACLE
from experiments.paper_sweeps import LOAD_EXPERIMENTS
from experiments.recorded_traces import RECORDED_TRACES
from experiments.single_steps import CHUNKS, TURNS
from experiments.think_time import THINK_TIME

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        *(TURNS, CHUNKS, *LOAD_EXPERIMENTS, MEASURED_LOOPS, KERNELS, EVICTION, THINK_TIME, DATASETS),
        *(LONG_WARM_UP, RECORDED_TRACES, ORACLE),
        *CELLS,
        *BATON,
    )
}
