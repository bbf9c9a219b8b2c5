"""One simulated run of an experiment, as a value that any process can carry out.

Owns: the definition of a point, and the figures that are kept of it.
Does not know: which points an experiment has, or what they mean there.
Called by `experiments.pool` and the experiments.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pensieve_jax import EngineConfig
from pensieve_jax.cache import LearnedState
from pensieve_lab.experiments.machines import load_profile
from pensieve_lab.experiments.recompute import RecomputeSeconds, cost_model
from pensieve_lab.experiments.workloads import Workload
from pensieve_lab.simulator import Outcome, Scenario, figures, simulate
from pensieve_lab.workload import UNITS as SIMULATOR_UNITS
from pensieve_lab.workload import Session

_MANY_SESSIONS = 1000

UNITS = {
    **SIMULATOR_UNITS,
    "recompute_s": "seconds by the cost model for the recomputed tokens of histories; for the first "
    "admission of a turn, without what suspended turns lost",
    "history_s": "the same for whole histories: what a stateless system recomputes for these answers",
    "recompute_share": "recompute_s / history_s",
    "latency_s": "mean normalized latency, as normalized_latency_s.mean; null without answers",
    "found_rate": "gpu_hit_rate + cpu_hit_rate",
    "*_by_seed": "the same of every seed, by its number",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run.

    Attributes:
      panel, series, x: position of its figures in the experiment's plot.
      seed: of the workload.
      device, model: as `machines.load_profile` takes them.
      engine: configuration of the engine; `cache.cpu_bytes` is converted to pages.
      workload: conversations and their arrival times.
      earlier_workload: what the same engine served before, so that a learning policy starts with what
        it learned there; None starts without. That run is not measured, and no KV cache outlives it.
    """

    panel: str
    series: str
    x: float
    seed: int
    device: str
    model: str
    engine: EngineConfig
    workload: Workload
    earlier_workload: Workload | None = None


class Measured(NamedTuple):
    """A point, and its figures by name: those of the simulator, and `UNITS`."""

    point: Point
    figures: dict[str, Any]


def measure(point: Point) -> Measured:
    """Carry out a run; the same point gives the same figures."""
    profile = load_profile(point.device, point.model)
    workload, cache = point.workload, point.engine.cache
    costs = cost_model(profile, cache.chunk_tokens, workload.max_context_tokens)
    scenario = Scenario(
        config=point.engine,
        profile=profile,
        cost_model=costs,
        max_context_tokens=point.engine.resolve_context_tokens(workload.max_context_tokens),
        warm_up_s=workload.warm_up_s,
        window_s=workload.window_s,
    )
    learned_state = None
    if point.earlier_workload is not None:
        learned_state = _simulate(scenario, point.earlier_workload, point.seed).learned_state
    outcome = _simulate(scenario, workload, point.seed, learned_state)
    found = figures(outcome, num_replicas=1)
    seconds = RecomputeSeconds(costs, cache.chunk_tokens, workload.max_context_tokens)
    recompute_s, history_s = seconds.of(outcome.answers, cache.policy)
    found |= {
        "recompute_s": recompute_s,
        "history_s": history_s,
        "recompute_share": recompute_s / history_s if history_s else 0.0,
        "found_rate": found["gpu_hit_rate"] + found["cpu_hit_rate"],
    }
    return Measured(point, found)


def _simulate(
    scenario: Scenario, workload: Workload, seed: int, learned_state: LearnedState | None = None
) -> Outcome:
    sessions = workload.sessions(seed)
    with _frozen(sessions):
        return simulate(scenario, sessions, learned_state=learned_state)


@contextlib.contextmanager
def _frozen(sessions: Sequence[Session]) -> Iterator[None]:
    """Freeze many sessions for the whole run, so that the garbage collector does not rescan them.

    Freezing first scans all objects once, which takes longer than a small run.
    """
    if len(sessions) < _MANY_SESSIONS:
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
