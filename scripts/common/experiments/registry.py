"""Every experiment by name.

Called by: `scripts/reproduce.py`.
"""

from __future__ import annotations

from common.experiments.eviction import EVICTION
from common.experiments.kernels import KERNELS
from common.experiments.paper_sweeps import LOAD_EXPERIMENTS
from common.experiments.recorded_traces import RECORDED_TRACES
from common.experiments.single_steps import CHUNKS, TURNS
from common.experiments.think_time import THINK_TIME

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (TURNS, CHUNKS, *LOAD_EXPERIMENTS, KERNELS, EVICTION, THINK_TIME, RECORDED_TRACES)
}
