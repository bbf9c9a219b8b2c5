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

NUM_CONVERSATIONS = 6
CALM_OPS = (*["submit"] * 12, *["step"] * 12, *["think"] * 2, "cancel", "truncate")
HASTY_OPS = (*CALM_OPS, *["cancel"] * 8)  # many are cancelled in the middle of their recompute
OPS = (*CALM_OPS, "end", "fail", "interrupt", "restart")  # each of the last three empties every page
KINDS = (CALM_OPS, CALM_OPS, HASTY_OPS, OPS)
MODEL_TOKENS = (300, 400, 600, 600, 50)
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
    chunk_tokens = choose.pick((16, 16, 16, 16, 32, 64))
    max_num_running = choose.integer(1, 8)
    extra_tokens, extra_rows = choose.pick((0, 1, 7, 40, 100)), choose.pick((None, 0, 1, 5))
    return EngineConfig(
        stateful=choose.pick((*[True] * 7, False)),
        cache=CacheConfig(
            gpu_pages=choose.pick((12, 8, 16, 20, 24, 30, 4, 2)),
            chunk_tokens=chunk_tokens,
            policy=choose.pick(("retention", "retention", *POLICIES)),
            reserve_fraction=choose.pick((0.1, 0.0, 0.0, 0.3)),
        ),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_running + chunk_tokens + extra_tokens,
            max_num_rows=None if extra_rows is None else max_num_running + extra_rows,
            max_num_buckets=choose.integer(1, 3),
        ),
        runner=RunnerConfig(max_banned_ids=32, max_logprobs=4),
    )


def make_draft(choose: Chooser, max_len: int) -> Draft:
    """A turn; a few are long, most are short."""
    max_tokens = choose.pick((1, 3, 6, 15, 50))
    return Draft(
        conversation=choose.integer(-1, NUM_CONVERSATIONS - 1),
        prompt_len=choose.integer(1, choose.pick((4, 20, 60, max_len))),
        max_tokens=max_tokens,
        min_tokens=min(choose.pick((0, 0, 1, 3)), max_tokens),
        ending=choose.pick(("none", "eos", "stop")),
        temperature=choose.pick((0.0, 0.7, 1.5)),
        seed=choose.integer(0, 2**16),
    )


def make_op(choose: Chooser, kinds: Sequence[str], max_len: int = 150) -> Op:
    """One operation of one of these kinds."""
    kind = choose.pick(kinds)
    if kind == "submit":
        return Op(kind, 0, tuple(make_draft(choose, max_len) for _ in range(choose.pick((1, 1, 1, 2, 3)))))
    if kind == "step":
        return Op(kind, choose.pick((1, 1, 4, 20)))
    return Op(kind, choose.integer(0, 100))


def random_scenario(seed: int) -> Scenario:
    """The scenario of a seed: every fourth is a `hole_scenario`, the others are anything at all."""
    choose = RandomChooser(seed)
    if seed % 4 == 3:
        return hole_scenario(choose)
    kinds = choose.pick(KINDS)
    return Scenario(
        config=make_config(choose),
        max_model_tokens=choose.pick(MODEL_TOKENS),
        durable=kinds is OPS and choose.pick((True, False)),
        ops=tuple(make_op(choose, kinds) for _ in range(choose.integer(10, 120))),
    )


def hole_scenario(choose: Chooser) -> Scenario:
    """Long histories that come back in turn to a pool that holds half of them, often cancelled half-way."""
    max_num_running = choose.integer(1, 3)
    config = EngineConfig(
        cache=CacheConfig(gpu_pages=choose.pick((16, 20, 24)), chunk_tokens=16),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_running + 16 + choose.pick((0, 3, 15)),
        ),
        runner=RunnerConfig(max_banned_ids=32, max_logprobs=4),
    )
    ops: list[Op] = []
    for _ in range(choose.integer(6, 20)):
        draft = Draft(
            choose.integer(0, 3), choose.integer(20, 90), 3, 0, "none", 0.0, choose.integer(0, 2**16)
        )
        if choose.pick((True, False)):
            ops += (Op("submit", 0, (draft,)), Op("step", choose.integer(1, 4)), Op("cancel", 0))
        ops += (Op("think", 5), Op("submit", 0, (draft,)), Op("step", choose.pick((2, 40, 40))))
    return Scenario(config, 300, False, tuple(ops))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Scenarios that shrink: fewer operations, then smaller ones."""
    choose = _DrawnChooser(draw)
    kinds = choose.pick(KINDS)
    one_op = st.composite(lambda draw_op: make_op(_DrawnChooser(draw_op), kinds))
    return Scenario(
        config=make_config(choose),
        max_model_tokens=choose.pick(MODEL_TOKENS),
        durable=kinds is OPS and choose.pick((True, False)),
        ops=tuple(draw(st.lists(one_op(), min_size=1, max_size=80))),
    )
