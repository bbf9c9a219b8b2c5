"""Estimates how long serving a workload will take, from a probe of a few steps.

Owns: the probe, and the extrapolation from its times to the whole workload.
Does not know: variants or tiers; it gives the times for a hit rate of 100% and of 0%.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from pensieve_jax import SamplingParams
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_lab.serving.rounds import Workload

_PROBE_TOKENS = 8


class Pace(NamedTuple):
    """Result of a probe: seconds per decode step, and per prompt token."""

    step_s: float
    prompt_token_s: float


def probe(engine: Engine, workload: Workload, concurrency: int) -> Pace:
    """Serve the beginnings of the first turns; the engine keeps their conversations."""
    params = SamplingParams(max_tokens=_PROBE_TOKENS, ignore_eos=True)
    first = workload.prompts[0][:concurrency]
    start_s = time.perf_counter()
    turns = engine.submit([TurnSpec(ids, params, name) for name, ids in first])
    while not all(turn.token_ids or turn.done for turn in turns):
        engine.step()
    prompts_s, step_s = time.perf_counter() - start_s, []
    while engine.has_unfinished:
        start_s = time.perf_counter()
        engine.step()
        step_s.append(time.perf_counter() - start_s)
    return Pace(statistics.median(step_s or [0.0]), prompts_s / sum(len(ids) for _, ids in first))


def seconds(workload: Workload, concurrency: int, pace: Pace) -> tuple[float, float]:
    """Return the serving time if every history is reused, and if all of them are recomputed."""
    num_turns = sum(map(len, workload.prompts))
    lengths: dict[str, int] = {}
    num_prompt = num_history = 0
    for one_round in workload.prompts:
        for name, ids in one_round:
            num_history += lengths.get(name, 0)
            num_prompt += len(ids)
            lengths[name] = lengths.get(name, 0) + len(ids) + workload.output_tokens
    decoding = -(-num_turns // concurrency) * workload.output_tokens * pace.step_s
    found = decoding + num_prompt * pace.prompt_token_s
    return found, found + num_history * pace.prompt_token_s
