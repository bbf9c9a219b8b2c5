"""The simulator decides what the engine decides: both serve one trace on the same kind of clock."""

from __future__ import annotations

from typing import Any

import pytest

from lab.tests.simulator.workloads import (
    COSTS,
    MAX_CONTEXT_TOKENS,
    PROFILE,
    Seen,
    make_sessions,
    plain,
    serve,
    small_config,
)
from pensieve_jax.cache import LearnedState
from pensieve_jax.config import EngineConfig
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.decoding.turn_spec import ModelLimits, TurnSpec
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.turn import Turn
from pensieve_jax.history import SQLiteHistoryStore
from pensieve_jax.scheduler import StepPlan, StepResult, token_buckets
from pensieve_lab.simulator import run
from pensieve_lab.simulator.clock import Timeline
from pensieve_lab.simulator.device import SimulatedDevice
from pensieve_lab.simulator.routing import AffinityRouter
from pensieve_lab.simulator.step_time import StepLoad
from pensieve_lab.simulator.transfers import SimulatedTransfers
from pensieve_lab.workload import Answer, Client, Session, UserTurn
from tests.cache.helpers import learned_state_of
from tests.engine.fake_runner import NUM_LAYERS, VOCAB_SIZE, FakeRunner
from tests.engine.fake_transfers import IMMEDIATE, FakeTransfers

# Chunks of the fake are small, and its copies do not block; a simulated turn is not written anywhere.
UNLIKE = {"swapped_out_bytes", "swapped_in_bytes", "transfer_stall_s", "num_commits", "commit_s"}


class TimedTransfers(FakeTransfers):
    """Copies of the fake runner's pages that complete when simulated ones do."""

    def __init__(self, runner: FakeRunner, config: EngineConfig, timing: SimulatedTransfers) -> None:
        staged = config.runner.max_num_staged_pages
        super().__init__(runner, config.cache.num_cpu_pages, NUM_LAYERS, staged, IMMEDIATE)
        self._timing = timing

    def swap_out(self, copies):
        super().swap_out(copies)
        self._timing.swap_out(copies)

    def swap_in(self, copies):
        super().swap_in(copies)
        self._timing.swap_in(copies)

    def expedite(self, copy_ids):
        super().expedite(copy_ids)
        self._timing.expedite(copy_ids)

    def completed(self):
        ended = self._timing.completed()
        for copy_id in ended.arrived:
            self._complete(self._in_flight[copy_id])
        return ended

    def wait(self):
        self._timing.wait()


class TimedRunner(FakeRunner):
    """Fake runner whose steps take as long as simulated ones."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, MAX_CONTEXT_TOKENS)
        self.timeline = Timeline()
        self.end_s: dict[Any, float] = {}
        timing = SimulatedTransfers(
            PROFILE,
            self.timeline,
            chunk_bytes=config.cache.chunk_tokens * PROFILE.kv_token_bytes,
            max_num_staged=config.runner.max_num_staged_pages,
            retrieval_priority=config.cache.retrieval_priority,
        )
        self.device = SimulatedDevice(PROFILE, token_buckets(config.scheduler), self.timeline, timing)
        self.transfers = TimedTransfers(self, config, timing)

    def submit(self) -> None:
        self.device.submit()

    def launch(self, plan: StepPlan) -> Any:
        handle, load = super().launch(plan), StepLoad()
        ends = plan.cu_q_lens.tolist()
        for row in range(int(plan.num_rows[0])):
            load.add(ends[row + 1] - ends[row], int(plan.kv_lens[row]))
        self.end_s[handle] = self.device.dispatch(load)
        return handle

    def fetch(self, handle: Any) -> StepResult:
        self.device.fetch(self.end_s.pop(handle))
        return super().fetch(handle)


class EngineServer:
    """Real engine, driven like a simulated replica."""

    def __init__(self, config: EngineConfig, learned_state: LearnedState | None) -> None:
        self.seen = Seen()
        runner = TimedRunner(config)
        self.clock, self.runner = runner.timeline, runner
        self.engine = Engine(
            runner,
            config,
            ModelLimits(vocab_size=VOCAB_SIZE, max_context_tokens=MAX_CONTEXT_TOKENS),
            SQLiteHistoryStore(None, fingerprint="test"),
            cost_model=COSTS,
            clock=self.clock,
            observe=lambda output: self.seen.outputs.append(plain(output)),
        )
        self.engine.cache.turns.begin(learned_state)
        self._turns: dict[Turn, UserTurn] = {}
        self._first_token_s: dict[Turn, float] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._turns)

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished

    def submit(self, turn: UserTurn) -> None:
        if not self.has_unfinished:
            self.clock.advance_to(turn.arrival_s)
        params = SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True)
        spec = TurnSpec([0] * turn.prompt_tokens, params, turn.conversation_id)
        self._turns[self.engine.submit([spec])[0]] = turn
        self.runner.submit()

    def step(self, until_s: float) -> list[Answer]:
        ended, now_s = self.engine.step(), self.clock.now()
        for turn in self._turns:
            if turn.token_ids:
                self._first_token_s.setdefault(turn, now_s)
        return [
            Answer(self._turns.pop(turn), 0, self._first_token_s.pop(turn), now_s, turn.output.usage)
            for turn in ended
        ]

    def serve(self, sessions: list[Session]) -> Seen:
        self.seen.answers += run(Client(sessions, MAX_CONTEXT_TOKENS), [self], AffinityRouter(0))
        self.seen.stats = self.engine.stats()
        self.engine.close()
        return self.seen


CONFIGS = {
    "retention": small_config(),
    "learned": small_config(policy="learned"),
    "learned_before": small_config(policy="learned"),
    "trailing": small_config(policy="trailing"),
    "tight": small_config(gpu_pages=26, cpu_pages=12),
    "gpu": small_config(cpu_pages=0),
    "stateless": small_config(cpu_pages=0, stateful=False),
}
QUICK = "retention", "learned_before", "tight", "gpu", "stateless"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if name in QUICK and seed == 100 else pytest.mark.long)
        for name in CONFIGS
        for seed in (100, 101)
    ],
)
def test_same_decisions_answers_and_times(name, seed):
    """The fake runner also shows that no step read anything that had not arrived."""
    config, sessions = CONFIGS[name], make_sessions(seed)
    learned_state = learned_state_of(seed) if name == "learned_before" else None
    engine = EngineServer(config, learned_state).serve(sessions)
    simulated = serve(config, sessions, decode_runs=True, learned_state=learned_state)
    assert simulated.outputs == engine.outputs
    assert simulated.plain_answers() == engine.plain_answers() and len(engine.answers) > 24
    common = (simulated.stats.keys() & engine.stats.keys()) - UNLIKE
    assert {key: simulated.stats[key] for key in common} == {key: engine.stats[key] for key in common}
