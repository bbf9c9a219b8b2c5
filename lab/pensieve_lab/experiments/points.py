"""One simulated run of an experiment, as a value that any process can carry out.

Owns: what a point is made of, and the figures that are kept of it.
Does not know: which points an experiment has, or what they mean there.
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
    "recompute_s": "seconds by the cost model to recompute what was recomputed of histories; for the first "
    "admission of a turn, without what suspended turns lost",
    "history_s": "the same for whole histories: what a stateless system recomputes for these answers",
    "recompute_share": "recompute_s / history_s",
    "latency_s": "mean normalized latency, as normalized_latency_s.mean; null where nobody was answered",
    "found_rate": "gpu_hit_rate + cpu_hit_rate",
    "*_by_seed": "the same of every seed, by its number",
}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run.

    Attributes:
      panel, series, x: where its figures belong in the experiment's plot.
      seed: of the workload.
      device, model: as `machines.load_profile` takes them.
      engine: what serves; `cache.cpu_bytes` is turned into pages.
      workload: who comes when.
      experience: who came before, to the same engine: what an order that learns begins the run with. None
        lets it begin with nothing. Nothing of that run counts, and no state outlives it.
    """

    panel: str
    series: str
    x: float
    seed: int
    device: str
    model: str
    engine: EngineConfig
    workload: Workload
    experience: Workload | None = None


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
    experience = None
    if point.experience is not None:
        experience = _simulate(scenario, point.experience, point.seed).experience
    outcome = _simulate(scenario, workload, point.seed, experience)
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
    scenario: Scenario, workload: Workload, seed: int, experience: LearnedState | None = None
) -> Outcome:
    sessions = workload.sessions(seed)
    with _kept(sessions):
        return simulate(scenario, sessions, experience=experience)


@contextlib.contextmanager
def _kept(sessions: Sequence[Session]) -> Iterator[None]:
    """Sessions stay for the whole run: the garbage collector need not look at many of them again and again.

    To set aside what is no garbage it looks at everything once, which takes longer than a small run.
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
