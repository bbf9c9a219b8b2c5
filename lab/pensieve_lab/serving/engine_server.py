"""This project's engine as a benchmark server: with both tiers, with one, and without state.

Owns: the labels of ablations, when tokens are seen, and how conversations enter an engine before a run.
Does not know: users, rates or figures, or what the systems are (`systems`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pensieve_jax import EngineConfig, SamplingParams
from pensieve_jax.commands.report import device_name
from pensieve_jax.decoding.turn_spec import TurnSpec
from pensieve_jax.device.model_runner import ModelRunner
from pensieve_jax.engine.engine import Engine
from pensieve_jax.engine.runner import Runner
from pensieve_jax.engine.turn import Turn
from pensieve_jax.history import HistoryStore, SQLiteHistoryStore, TurnRecord
from pensieve_jax.scheduler import StepPlan
from pensieve_lab.common.engines import EngineFactory, costs_document
from pensieve_lab.common.systems import system_config
from pensieve_lab.serving.clock import RunClock
from pensieve_lab.serving.host_parts import IDLE
from pensieve_lab.serving.timed_runner import TimedRunner
from pensieve_lab.workload import Answer, History, Steps, UserTurn


def label(name: str, config: EngineConfig) -> str:
    """Return a system's name with its changed settings."""
    cache, has_host_tier = config.cache, config.asks_for_host_tier
    changes = {
        f"{cache.policy} eviction": config.stateful and cache.policy != "retention",
        "not unified": not config.scheduler.unified,
        "no prefetch": has_host_tier and not cache.prefetch,
        "no retrieval priority": has_host_tier and not cache.retrieval_priority,
    }
    return ", ".join([name, *(text for text, is_changed in changes.items() if is_changed)])


class EngineServer:
    """`Server` on an engine of this process; `clock` is the run's clock."""

    def __init__(
        self, engine: Engine, runner: TimedRunner, store: HistoryStore, config: EngineConfig, clock: RunClock
    ) -> None:
        """Take the engine, and the `runner`, `store` and `clock` that it uses."""
        self._engine = engine
        self._runner = runner
        self._store = store
        self._config = config
        self.clock = clock
        self._turns: dict[Turn, UserTurn] = {}
        self._silent: set[Turn] = set()  # no token yet
        self._first_token_s: dict[Turn, float] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._turns)

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished

    def remember(self, histories: Iterable[History]) -> None:
        """Compute each history as a turn with a reply of one token, in bulk like other turns.

        If memory is too small, the cache evicts as usual. A stateless engine only needs the ids.
        """
        if not self._config.stateful:
            self._store.commit([_record(history) for history in histories])
            return
        running: dict[Turn, History] = {}
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        for history in histories:
            spec = TurnSpec(history.token_ids[:-1], params, history.conversation_id)
            running[self._engine.submit([spec])[0]] = history
            while len(running) >= self._config.scheduler.running_limit:
                self._step_in_the_past(running)
        while self._engine.has_unfinished:
            self._step_in_the_past(running)

    def submit(self, turn: UserTurn) -> None:
        params = SamplingParams(max_tokens=turn.output_tokens, ignore_eos=True)
        (submitted,) = self._engine.submit([TurnSpec(turn.token_ids, params, turn.conversation_id)])
        self._runner.parts.work["submitted"] += 1
        self._turns[submitted] = turn
        self._silent.add(submitted)

    def step(self, until_s: float) -> list[Answer]:
        parts = self._runner.parts
        parts.lap("users" if self._runner.in_flight else IDLE)
        ended = self._engine.step()
        parts.work["answered"] += len(ended)
        parts.lap("finish")
        now_s = self.clock.now()
        for turn in [turn for turn in self._silent if turn.token_ids or turn.done]:
            self._silent.remove(turn)
            self._first_token_s[turn] = now_s
        return [self._answer(turn, now_s) for turn in ended]

    def counters(self) -> Mapping[str, float]:
        runner = self._runner
        return {
            **self._engine.stats(),
            "host_s": runner.host_s,
            "num_host_steps": runner.num_host_steps,
            "dispatch_s": runner.dispatch_s,
            "device_wait_s": runner.device_wait_s,
            "num_late_steps": runner.num_late_steps,
            **runner.parts.counters(),
            "host_cpu_s": time.thread_time(),
        }

    def steps(self) -> Steps:
        return self._runner.totals

    def save_steps(self, path: Path) -> None:
        """Write a row for every step since the start; see `HostParts.save`."""
        self._runner.parts.save(path)

    def recording(self, plans: list[StepPlan]) -> contextlib.AbstractContextManager[None]:
        """Append every plan that is launched within the context to `plans`."""
        return self._runner.recording(plans)

    def give_up(self) -> tuple[ModelRunner, EngineConfig, int]:
        """Close the engine; return its runner with empty pools, its configuration and its vocabulary size."""
        vocab_size = self._engine.limits.vocab_size
        self._engine.close()
        runner = self._runner.inner
        assert isinstance(runner, ModelRunner)
        runner.reset()
        return runner, self._config, vocab_size

    def _step_in_the_past(self, running: dict[Turn, History]) -> None:
        """Step at the time when the next history ended; histories end in order of arrival."""
        if running:
            self.clock.go_to(next(iter(running.values())).last_active_s)
        for turn in self._engine.step():
            _check(turn)
            del running[turn]

    def _answer(self, turn: Turn, now_s: float) -> Answer:
        _check(turn)
        assert turn.output is not None
        sent, usage = self._turns.pop(turn), turn.output.usage
        assert usage.output_tokens == sent.output_tokens
        read = (
            *(usage.reused_gpu_tokens, usage.swapped_in_tokens),
            *(usage.recomputed_tokens, usage.prefilled_tokens),
        )
        assert sum(read) == sent.num_history_tokens + sent.prompt_tokens, "the history is not the trace's"
        return Answer(sent, 0, self._first_token_s.pop(turn), now_s, usage)


class EngineSystem:
    """One model and its compiled steps, for successive load points.

    Attributes:
      label: label of reports.
      config: configuration, with both tiers' sizes in pages.
    """

    def __init__(self, name: str, config: EngineConfig, factory: EngineFactory | None = None) -> None:
        """Load and compile, or reuse another system's `factory`; raises PensieveError or ModelError."""
        self._factory = factory or EngineFactory(config)
        self.config = config if factory else self._factory.config
        self._costs = self._factory.costs_of(self.config)
        self.label = label(name, config)

    def sibling(self, name: str) -> EngineSystem:
        """Make another of the paper's systems on the same model and pages; one of them serves at a time."""
        return EngineSystem(name, system_config(name, self.config), self._factory)

    def start(self, clock: RunClock) -> EngineServer:
        """Start an engine without conversations; the previous one is closed and its turns are cancelled."""
        store = SQLiteHistoryStore(None, fingerprint="a benchmark")
        runners: list[TimedRunner] = []

        def wrap(runner: Runner) -> Runner:
            runners.append(TimedRunner(runner))
            return runners[0]

        engine = self._factory.start(self.config, clock=clock, store=store, wrap=wrap)
        return EngineServer(engine, runners[0], store, self.config, clock)

    def describe(self) -> dict[str, Any]:
        """Return the configuration and costs for a report."""
        return {"config": dataclasses.asdict(self.config), "costs": costs_document(self._costs)}

    def device_name(self) -> str:
        return device_name()

    def close(self) -> None:
        self._factory.close()


def _check(turn: Turn) -> None:
    if turn.error is not None:
        raise turn.error


def _record(history: History) -> TurnRecord:
    return TurnRecord(
        conversation_id=history.conversation_id,
        turn_index=0,
        prompt_token_ids=tuple(history.token_ids[:-1]),
        output_token_ids=tuple(history.token_ids[-1:]),
        seed=0,
        finish_reason="length",
        created_at_s=history.last_active_s,
    )
