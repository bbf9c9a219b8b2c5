"""Small seeded workloads, configurations in which everything happens, and decisions as plain values."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from pensieve_jax.cache import AnalyticCostModel, LearnedState
from pensieve_jax.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from pensieve_jax.scheduler import SchedulerOutput
from pensieve_lab.simulator import DeviceProfile, Replica, run
from pensieve_lab.simulator.routing import AffinityRouter
from pensieve_lab.workload import Answer, Client, ConversationTrace, Session, TurnTrace

PROFILE = DeviceProfile.load("h200_llama2-13b-gqa10")
MAX_CONTEXT_TOKENS = 400
# Attention makes up all of the cost, as in a long context, so that there are as many holes as possible.
COSTS = AnalyticCostModel(16, num_weights=0, attention_width=1)


def small_config(
    *, stateful: bool = True, max_num_running: int = 6, prompt_order: str = "arrival", **cache: Any
) -> EngineConfig:
    """Make a configuration with room for a few conversations, with chunks of 16 tokens."""
    sizes: dict[str, Any] = {"gpu_pages": 40, "cpu_pages": 30, "chunk_tokens": 16}
    return EngineConfig(
        stateful=stateful,
        cache=CacheConfig(**sizes | cache),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=96,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            max_num_buckets=3,
            prompt_order=prompt_order,
        ),
        runner=RunnerConfig(max_num_staged_pages=4),
    )


def make_sessions(
    seed: int, *, num_sessions: int = 24, gap_s: float = 0.3, think_s: float = 1.0
) -> list[Session]:
    """Make conversations of a few turns; some exceed the context."""
    rng = random.Random(seed)
    sessions, arrival_s = [], 0.0
    for number in range(num_sessions):
        arrival_s += rng.expovariate(1 / gap_s)
        turns = tuple(
            TurnTrace(rng.randint(1, 60), rng.choice((1, 2, 17, 40, 70)))
            for _ in range(rng.choice((1, 2, 3, 6)))
        )
        think = tuple(rng.expovariate(1 / think_s) for _ in turns[1:])
        sessions.append(Session(ConversationTrace(f"c{number}", turns), arrival_s, think))
    return sessions


def plain(output: SchedulerOutput) -> tuple[Any, ...]:
    """Convert a decision to plain values, without the engine's objects."""
    return (
        [(g.request.conversation.conversation_id, g.start, g.end, g.samples) for g in output.grants],
        output.num_tokens,
        [request.conversation.conversation_id for request in output.admitted],
        [request.conversation.conversation_id for request in output.suspended],
        output.drops,
        output.swap_outs,
        output.swap_ins,
        output.expedited,
    )


@dataclasses.dataclass
class Seen:
    """Decisions and answers of a run."""

    outputs: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    answers: list[Answer] = dataclasses.field(default_factory=list)
    stats: dict[str, int | float] = dataclasses.field(default_factory=dict)

    def plain_answers(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(answer) for answer in self.answers]


def serve(
    config: EngineConfig,
    sessions: list[Session],
    *,
    decode_runs: bool,
    observed: bool = True,
    learned_state: LearnedState | None = None,
) -> Seen:
    """Serve all sessions on one replica."""
    seen = Seen()

    def observe(output: SchedulerOutput) -> None:
        seen.outputs.append(plain(output))

    replica = Replica(
        config,
        PROFILE,
        COSTS,
        decode_runs=decode_runs,
        observe=observe if observed else None,
        learned_state=learned_state,
    )
    for answer in run(Client(sessions, MAX_CONTEXT_TOKENS), [replica], AffinityRouter(0)):
        seen.answers.append(answer)
        replica.check_integrity()
    seen.stats = replica.counters()
    return seen
