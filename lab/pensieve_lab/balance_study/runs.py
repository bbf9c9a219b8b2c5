"""One run of a fleet and its figures.

Owns: fleets of both replica models, and the definitions of the figures.
Does not know: which runs the study makes.
Called by `balance_study.parts`.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from model_defs import preset
from pensieve_jax.assembly import estimated_cost_model
from pensieve_jax.balance import ConsistentHash, RootPlacement, Speeds
from pensieve_jax.scheduler import token_buckets
from pensieve_lab.balance.bounded_hash import BoundedHash
from pensieve_lab.balance.migrating import MigratingHash
from pensieve_lab.balance.policy import Policy
from pensieve_lab.balance.state_aware import LeastTokens, StateAware
from pensieve_lab.balance_study.loads import CHUNK_TOKENS, PROFILE, Load
from pensieve_lab.simulator import DeviceProfile, Replica
from pensieve_lab.simulator.fleet import Change, Fleet, Fronts, Member
from pensieve_lab.simulator.fluid_replica import FluidReplica
from pensieve_lab.simulator.step_time import StepLoad, StepTime
from pensieve_lab.workload import Session
from pensieve_lab.workload.client import Client
from pensieve_lab.workload.turns import Answer

UNITS = {
    "latency_s": "p50, p99 over turns of seconds from arrival to the last token, per output token",
    "first_token_s": "mean, p50, p99 over turns of seconds from arrival to the first token",
    "recomputed_share": "history tokens that were computed again / history tokens",
    "recomputed_tokens": "history tokens that were computed again",
    "moved_share": "turns with a history that were served elsewhere than the turn before / such turns",
    "imbalance": "tokens computed and answered by the busiest replica / mean over replicas",
    "num_unfinished": "turns that were sent and not answered at the end of the window",
    "cpu_s": "of this process, for the run",
}

type MakePolicy = Callable[[Speeds], Policy]


def policy(name: str, **parameters: float) -> MakePolicy:
    """Return a factory for the rule with this name in tables."""
    match name:
        case "hash":
            return lambda speeds: ConsistentHash()
        case "bounded":
            return lambda speeds: BoundedHash(**parameters)  # type: ignore[arg-type]
        case "least-tokens":
            return lambda speeds: LeastTokens()
        case "state-aware" | "placed":
            return lambda speeds: StateAware(speeds, **parameters)  # type: ignore[arg-type]
        case "named":
            return lambda speeds: RootPlacement(speeds)
        case "migrating":
            return lambda speeds: MigratingHash(**parameters)  # type: ignore[arg-type]
    raise AssertionError(name)


@lru_cache(maxsize=1)
def profile() -> DeviceProfile:
    """Return the device profile of every replica."""
    return DeviceProfile.load(PROFILE)


def speeds(load: Load, output_tokens: float) -> Speeds:
    """Return the replica speeds that front ends use, from the profile's step times.

    One step of 8 decodes gives the decode time; one full prefill step gives the time per prompt token.
    """
    config, costs = load.config(profile()), profile().step
    steps = StepTime(costs, token_buckets(config.scheduler))
    budget = config.scheduler.max_num_batched_tokens
    few, full = StepLoad(), StepLoad()
    for _ in range(8):
        few.add(1, 1)
    full.add(budget, budget)
    return Speeds(
        token_s=steps.seconds(full) / budget,
        step_s=steps.seconds(few),
        context_token_s=costs.kv_read_s,
        output_tokens=output_tokens,
        capacity_tokens=config.cache.num_gpu_pages * CHUNK_TOKENS,
    )


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Inputs that all compared runs share.

    Attributes:
      load, level, num_replicas, seed: identify the scene.
      sessions: in order of arrival.
      speeds: replica speeds as front ends know them.
    """

    load: Load
    level: str
    num_replicas: int
    seed: int
    sessions: Sequence[Session]
    speeds: Speeds

    @classmethod
    def of(cls, load: Load, files: dict[str, Path], level: str, num_replicas: int, seed: int) -> Scene:
        """Build or read the sessions, and freeze them so that the collector does not rescan them."""
        sessions = load.sessions(files, level, num_replicas, seed)
        gc.collect()
        gc.freeze()
        return cls(
            load=load,
            level=level,
            num_replicas=num_replicas,
            seed=seed,
            sessions=sessions,
            speeds=speeds(load, load.mean_output_tokens(files, seed)),
        )


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of a run: its figures, and the answers in its window."""

    figures: dict[str, Any]
    answers: Sequence[Answer]
    fleet: Fleet


def run(
    scene: Scene,
    make_policy: MakePolicy,
    *,
    fronts: Fronts | None = None,
    changes: Sequence[Change] = (),
    is_real: bool = False,
) -> RunResult:
    """Serve the sessions of a scene. Times in `changes` count from the start of the run, before warm-up."""
    load, begun_s = scene.load, time.process_time()
    start_s = min((s.last_active_s for s in scene.sessions if s.first_turn), default=0.0)
    fleet = Fleet(
        _make(load, is_real=is_real),
        lambda: make_policy(scene.speeds),
        [f"replica-{number}" for number in range(scene.num_replicas)],
        fronts=fronts,
        changes=changes,
        seed=scene.seed,
        start_s=min(start_s, 0.0),
    )
    fleet.place(scene.sessions)
    client = Client(scene.sessions, load.max_context_tokens)
    for _ in fleet.serve(client, load.warm_up_s):
        pass
    num_moved = fleet.num_moved
    answers = list(fleet.serve(client, load.warm_up_s + load.window_s))
    found = figures(answers, scene.num_replicas)
    num_returning = sum(answer.turn.num_history_tokens > 0 for answer in answers)
    found |= {
        "moved_share": (fleet.num_moved - num_moved) / max(num_returning, 1),
        "num_unfinished": sum(server.num_unfinished for server in fleet.servers),
        "num_resent": fleet.num_resent,
        "cpu_s": time.process_time() - begun_s,
    }
    return RunResult(figures=found, answers=answers, fleet=fleet)


def figures(answers: Sequence[Answer], num_replicas: int) -> dict[str, Any]:
    """Return the figures of answered turns; see `UNITS`."""
    latency = [(a.end_s - a.turn.arrival_s) / a.usage.output_tokens for a in answers]
    first = [a.first_token_s - a.turn.arrival_s for a in answers]
    history = sum(a.turn.num_history_tokens for a in answers)
    recomputed = sum(a.usage.recomputed_tokens for a in answers)
    served: Counter[int] = Counter()
    for answer in answers:
        usage = answer.usage
        served[answer.replica] += usage.recomputed_tokens + usage.prefilled_tokens + usage.output_tokens
    return {
        "num_turns": len(answers),
        "latency_s": _spread(latency),
        "first_token_s": _spread(first),
        "recomputed_share": recomputed / max(history, 1),
        "recomputed_tokens": recomputed,
        "imbalance": max(served.values(), default=0) * num_replicas / max(served.total(), 1),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p99": p99}


def _make(load: Load, *, is_real: bool) -> Callable[[int, float], Member]:
    config, device = load.config(profile()), profile()
    if not is_real:
        return lambda number, start_s: FluidReplica(config, device, number=number, start_s=start_s)
    costs = estimated_cost_model(preset(device.model), CHUNK_TOKENS)
    return lambda number, start_s: Replica(config, device, costs, number=number, start_s=start_s)
