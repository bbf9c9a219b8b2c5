"""Random scenarios as plain values: how an engine is configured, and what is done to it, in order.

A scenario prints as the code that makes it, so a failure is reproduced by pasting it into `run_scenario`.
One generator serves both hypothesis (which shrinks) and `random.Random` (which is fast, and has a seed).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hypothesis import strategies as st

from pensieve_jax.config import POLICIES, CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig

NUM_CONVERSATIONS = 8
OPS = (
    *["submit"] * 18,
    *["step"] * 18,
    *["think"] * 3,
    *["cancel", "truncate"] * 2,
    *["end", "fail", "interrupt", "restart"],
)
FAULT_PLACES = ("dispatch", "fetch", "commit", "committed")


@dataclass(frozen=True)
class Draft:
    """A turn to send; the driver makes ids and parameters of it.

    Attributes:
      conversation: which one, or -1 for a one-off request.
      ending: how the reply may end before its length: "none", "eos", or "stop" (an id that will come).
      seed: of the prompt's ids, and of sampling.
    """

    conversation: int
    prompt_len: int
    max_tokens: int
    min_tokens: int
    ending: str
    temperature: float
    seed: int


@dataclass(frozen=True)
class Op:
    """One thing to do; `number` says how much, which or where, as far as that exists."""

    kind: str
    number: int = 0
    drafts: tuple[Draft, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """An engine's life. `durable` keeps the history in a file, so that "restart" means something."""

    config: EngineConfig
    max_model_tokens: int
    durable: bool
    ops: tuple[Op, ...]


class Chooser(Protocol):
    """A source of choices; low numbers and early options are the simple ones."""

    def integer(self, low: int, high: int) -> int: ...

    def pick[T](self, options: Sequence[T]) -> T: ...


class RandomChooser:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick[T](self, options: Sequence[T]) -> T:
        return self._random.choice(options)


class _DrawnChooser:
    """Choices of hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def pick[T](self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))


def make_config(choose: Chooser) -> EngineConfig:
    """A small engine, so that pages, rows and tokens are scarce."""
    chunk_tokens = choose.pick((16, 16, 32, 64))
    max_num_running = choose.integer(1, 8)
    max_num_batched_tokens = max_num_running + chunk_tokens + choose.pick((0, 1, 7, 40, 100))
    extra_rows = choose.pick((None, 0, 1, 5))
    return EngineConfig(
        stateful=choose.pick((True, True, True, True, False)),
        cache=CacheConfig(
            gpu_pages=choose.pick((5, 8, 12, 20, 2, 3, 40)),
            chunk_tokens=chunk_tokens,
            policy=choose.pick(POLICIES),
            reserve_fraction=choose.pick((0.1, 0.0, 0.0, 0.3)),
        ),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_rows=None if extra_rows is None else max_num_running + extra_rows,
            max_num_buckets=choose.integer(1, 3),
        ),
        runner=RunnerConfig(max_banned_ids=32, max_logprobs=4),
    )


def make_draft(choose: Chooser, max_len: int) -> Draft:
    """A turn; a few are long, most are short."""
    max_tokens = choose.pick((1, 4, 12, 30, 60))
    return Draft(
        conversation=choose.integer(-1, NUM_CONVERSATIONS - 1),
        prompt_len=choose.integer(1, choose.pick((4, 15, 15, max_len))),
        max_tokens=max_tokens,
        min_tokens=min(choose.pick((0, 0, 1, 3)), max_tokens),
        ending=choose.pick(("none", "eos", "stop")),
        temperature=choose.pick((0.0, 0.7, 1.5)),
        seed=choose.integer(0, 2**16),
    )


def make_op(choose: Chooser, max_len: int = 70) -> Op:
    """One operation."""
    kind = choose.pick(OPS)
    if kind == "submit":
        return Op(kind, 0, tuple(make_draft(choose, max_len) for _ in range(choose.pick((1, 1, 1, 2, 3)))))
    if kind == "step":
        return Op(kind, choose.integer(1, 12))
    return Op(kind, choose.integer(0, 100))


def random_scenario(seed: int) -> Scenario:
    """The scenario of a seed, about 60 operations long."""
    choose = RandomChooser(seed)
    return Scenario(
        config=make_config(choose),
        max_model_tokens=choose.pick((250, 100, 600, 40)),
        durable=choose.pick((False, False, False, True)),
        ops=tuple(make_op(choose) for _ in range(choose.integer(10, 100))),
    )


@st.composite
def _configs(draw: st.DrawFn) -> EngineConfig:
    return make_config(_DrawnChooser(draw))


@st.composite
def _ops(draw: st.DrawFn) -> Op:
    return make_op(_DrawnChooser(draw))


def scenarios() -> st.SearchStrategy[Scenario]:
    """Scenarios that shrink: fewer operations, then smaller ones."""
    return st.builds(
        Scenario,
        config=_configs(),
        max_model_tokens=st.sampled_from((250, 100, 600, 40)),
        durable=st.sampled_from((False, False, False, True)),
        ops=st.lists(_ops(), min_size=1, max_size=80).map(tuple),
    )
