"""Fake servers and engines, which take only the time that a test sets."""

from __future__ import annotations

from collections.abc import Iterable

from pensieve_jax import EngineConfig, Usage
from pensieve_jax.cache import AnalyticCostModel
from pensieve_jax.cost_choice import CostChoice
from pensieve_jax.decoding.turn_spec import ModelLimits
from pensieve_jax.engine.engine import Engine
from pensieve_lab.workload import Answer, Client, ConversationTrace, Session, StepTotals, TurnTrace, UserTurn
from tests.launching import load

MODEL_TOKENS = 2048


class Ticker:
    """Timer that a test moves: readings for a `RunClock`, and its `sleep`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def session(name: str, arrival_s: float, *turns: tuple[int, int], think_s=(), first_turn: int = 0) -> Session:
    """Make a session from (prompt, answer) lengths."""
    conversation = ConversationTrace(name, tuple(TurnTrace(*turn) for turn in turns))
    return Session(conversation, arrival_s, tuple(think_s), first_turn)


def users(*sessions: Session, max_context_tokens: int = 1000) -> Client:
    return Client(sessions, max_context_tokens)


class TickServer:
    """Server whose steps take a second and give a token to every turn that was there at their beginning."""

    def __init__(self, ticker: Ticker, clock) -> None:
        self.ticker, self.clock = ticker, clock
        self.running: dict[UserTurn, list[float]] = {}
        self.submitted: list[tuple[UserTurn, list[int]]] = []
        self.num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def remember(self, histories: Iterable) -> None:
        assert not list(histories)

    def submit(self, turn: UserTurn) -> None:
        self.submitted.append((turn, list(turn.token_ids)))
        self.running[turn] = []

    def step(self, until_s: float) -> list[Answer]:
        self.ticker.now_s += 1.0
        self.num_steps += 1
        now_s, answers = self.clock.now(), []
        for turn, times in list(self.running.items()):
            times.append(now_s)
            if len(times) == turn.output_tokens:
                del self.running[turn]
                history = turn.num_history_tokens
                usage = Usage(turn.prompt_tokens, history, 0, 0, turn.prompt_tokens, turn.output_tokens)
                answers.append(Answer(turn, 0, times[0], now_s, usage))
        return answers

    def counters(self) -> dict[str, float]:
        return {"num_steps": self.num_steps, "num_step_tokens": 3 * self.num_steps, "swapped_in_bytes": 0}

    def steps(self) -> dict[int, object]:
        return {64: StepTotals(self.num_steps, 1.0 * self.num_steps, 3 * self.num_steps)}


class NullFactory:
    """`EngineFactory` of engines that compute nothing and take no time."""

    def __init__(self, config: EngineConfig) -> None:
        flags = load("pensieve_jax.commands.engine_flags")
        self.model, _ = flags.model_limits()
        config = config.with_cpu_pages(10_000)
        self.context_tokens = config.resolve_context_tokens(MODEL_TOKENS)
        self.config = config
        self._costs = CostChoice(
            AnalyticCostModel(config.cache.chunk_tokens, num_weights=0, attention_width=1),
            "analytic",
            None,
            "a fake",
        )
        self.engine: Engine | None = None

    def costs_of(self, config) -> CostChoice:
        return self._costs

    def start(self, config, *, clock, store, wrap) -> Engine:
        self.close()
        runner = load("pensieve_lab.steps.null_runner").NullRunner(
            config, self.model, self.context_tokens, "xla"
        )
        self.engine = Engine(
            wrap(runner),
            config,
            ModelLimits(self.model.vocab_size, self.context_tokens),
            store,
            cost_model=self._costs.model,
            clock=clock,
        )
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
