"""A simulated run of users, a router and replicas, in the order of virtual time.

Owns: the parts of a run, and which part of it counts.
Does not know: what happens next (`driving`), how a replica serves, or what is reported (`figures`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pensieve_jax.cache import CostModel, LearnedState
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.errors import ConfigError
from pensieve_lab.simulator.driving import drive
from pensieve_lab.simulator.profile import DeviceProfile
from pensieve_lab.simulator.replica import Replica
from pensieve_lab.simulator.routing import ROUTERS, Router
from pensieve_lab.workload import Session
from pensieve_lab.workload.client import Client
from pensieve_lab.workload.server import History, Server
from pensieve_lab.workload.step_totals import Steps, StepTotals, add_steps, subtract_steps
from pensieve_lab.workload.turns import Answer, UserTurn


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Settings of a simulation.

    Attributes:
      config: configuration of every replica; `cache.cpu_bytes` must be converted to pages.
      profile: profile of every replica's device.
      cost_model: cost model of the retention policy.
      max_context_tokens: longest history plus turn.
      num_replicas, routing: number of replicas, and the key in `ROUTERS` of the routing rule.
      seed: seed of the routing.
      warm_up_s: virtual time before the measured window.
      window_s: length of the window; None means until every turn is answered.
      drain_s: virtual time after the window, while users continue; only `on_answer` sees its answers.
      decode_runs: see `Replica`.
    """

    config: EngineConfig
    profile: DeviceProfile
    cost_model: CostModel
    max_context_tokens: int
    num_replicas: int = 1
    routing: str = "affinity"
    seed: int = 0
    warm_up_s: float = 0.0
    window_s: float | None = None
    drain_s: float = 0.0
    decode_runs: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that cannot be simulated."""
        if self.num_replicas < 1:
            raise ConfigError("num_replicas", self.num_replicas, "at least 1")
        if self.routing not in ROUTERS:
            raise ConfigError("routing", self.routing, f"one of {', '.join(ROUTERS)}")
        if not 0 <= self.warm_up_s < math.inf:
            raise ConfigError("warm_up_s", self.warm_up_s, "a number of seconds from 0 on")
        if not 0 <= self.drain_s < math.inf:
            raise ConfigError("drain_s", self.drain_s, "a number of seconds from 0 on")
        if self.window_s is not None and not 0 < self.window_s < math.inf:
            raise ConfigError("window_s", self.window_s, "a number of seconds above 0, or None")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run within its window.

    Attributes:
      answers: completed answers.
      counters: changes of `Replica.counters`, summed over the replicas.
      steps: changes of `Replica.steps`, summed over the replicas.
      seconds: virtual time of the window.
      num_unfinished: unanswered turns at its end.
      num_refused: sessions that ended early because they had outgrown the context, warm-up included.
      learned_state: merged learned state of the replicas at its end; None for an order that does not learn.
    """

    answers: Sequence[Answer]
    counters: dict[str, float]
    steps: Steps
    seconds: float
    num_unfinished: int
    num_refused: int
    learned_state: LearnedState | None = None


def simulate(
    scenario: Scenario,
    sessions: Sequence[Session],
    on_answer: Callable[[Answer], None] | None = None,
    *,
    learned_state: LearnedState | None = None,
) -> Outcome:
    """Serve sessions; sessions from before the run find their history where it would be.

    `on_answer` sees every answer, including those of the warm-up and of the drain. A learning eviction order
    continues from `learned_state`.
    """
    router = ROUTERS[scenario.routing](scenario.seed)
    client = Client(sessions, scenario.max_context_tokens)
    mid_life = [session for session in sessions if session.first_turn] if scenario.config.stateful else []
    mid_life.sort(key=lambda session: session.last_active_s)
    start_s = min(mid_life[0].last_active_s, 0.0) if mid_life else 0.0
    replicas = [_replica(scenario, number, start_s, learned_state) for number in range(scenario.num_replicas)]
    for session in mid_life:
        _place(session, replicas, router)
    for replica in replicas:
        replica.clock.advance_to(0.0)

    def serve(until_s: float) -> list[Answer]:
        answers = []
        for answer in run(client, replicas, router, until_s=until_s):
            answers.append(answer)
            if on_answer is not None:
                on_answer(answer)
        return answers

    serve(scenario.warm_up_s)
    before, steps_before = _counters(replicas), _steps(replicas)
    end_s = math.inf if scenario.window_s is None else scenario.warm_up_s + scenario.window_s
    answers = serve(end_s)
    after = _counters(replicas)
    if scenario.window_s is None:
        end_s = max((answer.end_s for answer in answers), default=scenario.warm_up_s)
    outcome = Outcome(
        answers=answers,
        counters={name: after[name] - before[name] for name in after},
        steps=subtract_steps(_steps(replicas), steps_before),
        seconds=end_s - scenario.warm_up_s,
        num_unfinished=sum(replica.num_unfinished for replica in replicas),
        num_refused=client.num_refused,
        learned_state=_merged_learned_state(replicas, learned_state),
    )
    if scenario.drain_s:
        serve(end_s + scenario.drain_s)
    return outcome


def run(
    client: Client, servers: Sequence[Server], router: Router, *, until_s: float = math.inf
) -> Iterator[Answer]:
    """Serve until every turn is answered, or every clock has reached `until_s`; see `drive`."""

    def send(turn: UserTurn) -> int:
        index = router.choose(turn.conversation_id, servers)
        servers[index].submit(turn)
        return index

    return drive(client, servers, send, until_s=until_s)


def _replica(scenario: Scenario, number: int, start_s: float, learned_state: LearnedState | None) -> Replica:
    return Replica(
        scenario.config,
        scenario.profile,
        scenario.cost_model,
        number=number,
        start_s=start_s,
        decode_runs=scenario.decode_runs,
        learned_state=learned_state,
    )


def _merged_learned_state(replicas: Sequence[Replica], given: LearnedState | None) -> LearnedState | None:
    found = [replica.cache.turns.learned_state() for replica in replicas]
    known = [learned_state for learned_state in found if learned_state is not None]
    return LearnedState.merged(known, given) if known else None


def _place(session: Session, replicas: Sequence[Replica], router: Router) -> None:
    """Cache the history of a session from before the run, as of the end of its last answer."""
    conversation_id = session.conversation.conversation_id
    history = History(conversation_id, session.num_history_tokens, session.last_active_s)
    replicas[router.place(conversation_id, replicas)].remember([history])


def _counters(replicas: Sequence[Replica]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for replica in replicas:
        total.update(replica.counters())
    return dict(total)


def _steps(replicas: Sequence[Replica]) -> Steps:
    total: dict[int, StepTotals] = {}
    for replica in replicas:
        total = add_steps(total, replica.steps())
    return total
