"""Loads of the balance study: traces, arrival rates, think times, and the memory of each replica.

Owns: those choices, the trace halves on which parameters may be chosen, and hot roots.
Does not know: fleets or rules.
Called by `balance_study.parts` and `balance_study.runs`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from pensieve_jax import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from pensieve_lab.simulator import DeviceProfile
from pensieve_lab.workload import (
    SHAREGPT,
    ExponentialThink,
    LognormalThink,
    RecordedThink,
    Session,
    ThinkTime,
    Trace,
    cap_context,
    generate_trace,
    make_sessions,
    read_trace,
    split_by_session,
    start_mid_life,
)

PROFILE = "h200_llama2-13b-gqa10"
CHUNK_TOKENS = 32
COMFORTABLE, NEAR = "comfortable", "near the knee"
_CHOSEN_ON, _HELD_OUT = 0, 1  # halves in the order of `split_by_session`
_MID_LIFE_TOKEN_S = 0.02
_NUM_MADE = 5000
_OTHERWISE = LognormalThink(4.8, 1.0)  # think times for turns without a recorded one
SMALL_BYTES, LARGE_BYTES = (40_000_000_000, 60_000_000_000), (80_000_000_000, 200_000_000_000)


@dataclass(frozen=True, kw_only=True)
class Load:
    """A trace and the way it is replayed, scaled to one replica.

    Attributes:
      name: label in tables.
      format: format of the trace file; None for a generated trace.
      half: half of a recorded trace. Parameters may be chosen on 0 but not on 1; None is the whole trace.
      rates: conversations that begin per second and replica, by level.
      think: think time between turns.
      max_context_tokens: conversations end before they exceed it.
      memory_bytes: memory for KV caches on device and host.
      mid_life_s: time between the first arrivals and the start of the run.
      warm_up_s, window_s: the start of the run that is not measured, and the measured part.
      hot_share, hot_roots: fraction of sessions that belong to a hot root, and the number of hot roots, whose
        shares follow Zipf's law.
    """

    name: str
    format: str | None = None
    half: int | None = None
    rates: dict[str, float]
    think: ThinkTime
    max_context_tokens: int = 16_384
    memory_bytes: tuple[int, int] = SMALL_BYTES
    mid_life_s: float = 600.0
    warm_up_s: float = 15.0
    window_s: float = 30.0
    hot_share: float = 0.0
    hot_roots: int = 100

    def sessions(self, files: dict[str, Path], level: str, num_replicas: int, seed: int) -> list[Session]:
        """Return the sessions of a fleet; raises ConfigError if the trace file was not given."""
        found = make_sessions(
            self._trace(files, seed),
            rate_per_s=self.rates[level] * num_replicas,
            think=self.think,
            seed=seed,
            duration_s=self.mid_life_s + self.warm_up_s + self.window_s,
        )
        started = start_mid_life(found, at_s=self.mid_life_s, token_s=_MID_LIFE_TOKEN_S)
        return _with_hot_roots(started, self.hot_share, self.hot_roots, seed) if self.hot_share else started

    def config(self, profile: DeviceProfile) -> EngineConfig:
        """Return the engine configuration of one replica."""
        gpu_bytes, cpu_bytes = self.memory_bytes
        pages = gpu_bytes // (CHUNK_TOKENS * profile.kv_token_bytes)
        config = EngineConfig(
            cache=CacheConfig(gpu_pages=pages, cpu_bytes=cpu_bytes, chunk_tokens=CHUNK_TOKENS),
            scheduler=SchedulerConfig(
                max_num_running=256, max_num_buckets=12, max_context_tokens=self.max_context_tokens
            ),
        )
        return config.with_cpu_pages(profile.host_chunk_bytes(CHUNK_TOKENS))

    def mean_output_tokens(self, files: dict[str, Path], seed: int) -> float:
        """Return the mean answer length, which front ends estimate in practice."""
        trace = self._trace(files, seed)
        outputs = [turn.output_tokens for conversation in trace.conversations for turn in conversation.turns]
        return sum(outputs) / len(outputs)

    def _trace(self, files: dict[str, Path], seed: int) -> Trace:
        if self.format is None:
            return generate_trace(SHAREGPT, num_conversations=_NUM_MADE, seed=seed)
        if self.format not in files:
            raise ConfigError("--traces", None, f"with a file of {self.format}")
        return _recorded(files[self.format], self.format, self.half, self.max_context_tokens)


@lru_cache(maxsize=8)
def _recorded(path: Path, format: str, half: int | None, max_context_tokens: int) -> Trace:
    trace = cap_context(read_trace(path, format=format), max_context_tokens)
    return trace if half is None else split_by_session(trace)[half]


def _with_hot_roots(sessions: list[Session], share: float, count: int, seed: int) -> list[Session]:
    """Assign a share of the sessions to hot roots; root k gets a part proportional to 1 / k."""
    rng = np.random.default_rng([seed, 1])
    weights = 1 / np.arange(1, count + 1)
    hot = rng.random(len(sessions)) < share
    roots = rng.choice(count, size=len(sessions), p=weights / weights.sum())
    return [
        replace(s, conversation=replace(s.conversation, session_id=f"hot-{root}")) if is_hot else s
        for s, is_hot, root in zip(sessions, hot.tolist(), roots.tolist(), strict=True)
    ]


_MADE = Load(name="made", rates={COMFORTABLE: 2.0, NEAR: 2.8}, think=ExponentialThink(20.0))
_SKEWED = replace(_MADE, name="made, hot roots", rates={COMFORTABLE: 1.8, NEAR: 2.4}, hot_share=0.3)
_MOONCAKE = Load(
    name="Mooncake",
    format="mooncake",
    half=_HELD_OUT,
    rates={COMFORTABLE: 0.5, NEAR: 0.8},
    think=RecordedThink(_OTHERWISE),
    max_context_tokens=65_536,
    memory_bytes=LARGE_BYTES,
    mid_life_s=900.0,
    warm_up_s=60.0,
    window_s=300.0,
)
_AGENTS = replace(
    _MOONCAKE, name="agents", format="agent-sessions", rates={COMFORTABLE: 0.03, NEAR: 0.05}, window_s=600.0
)
_BURSTGPT = Load(
    name="BurstGPT",
    format="burstgpt",
    rates={COMFORTABLE: 6.0, NEAR: 12.0},
    think=RecordedThink(_OTHERWISE),
    max_context_tokens=8192,
    mid_life_s=900.0,
)
MOONCAKE = _MOONCAKE
MADE = _MADE
TUNING = (_MADE, _SKEWED, replace(_MOONCAKE, half=_CHOSEN_ON))
"""Loads for choosing parameters, used with seeds from `TUNING_SEED` on."""
TUNING_SEED = 100
REPORTED = (_MADE, _SKEWED, _MOONCAKE, _AGENTS, _BURSTGPT)
HELD_OUT = ("Mooncake", "agents", "BurstGPT")
"""Recorded traces on which no parameter was chosen: the other half of Mooncake, and two unused traces."""
