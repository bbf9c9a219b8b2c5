"""Random scenarios as plain values: an engine's configuration, and the operations on it, in order.

A scenario prints as the code that creates it, so pasting it into `run_scenario` reproduces a failure.
One generator serves both hypothesis (which shrinks) and `random.Random` (which is fast, and has a seed).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hypothesis import strategies as st

from pensieve_jax.config import POLICIES, CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from tests.engine.fake_transfers import IMMEDIATE, Delays

NUM_CONVERSATIONS = 6
PREFIX_LENS = (5, 16, 50, 85)  # of the prefixes that conversations may begin with
CALM_OPS = (*["submit"] * 12, *["step"] * 12, *["think"] * 2, "cancel", "truncate")
HASTY_OPS = (
    *CALM_OPS,
    *["cancel"] * 6,
    *["retract"] * 2,
)  # many are cancelled in the middle of their recomputation
OPS = (*CALM_OPS, "end", "fail", "interrupt", "restart")  # each of the last three empties every page
KINDS = (CALM_OPS, CALM_OPS, HASTY_OPS, OPS)
_FEW_OPS = 16
MODEL_TOKENS = (300, 400, 600, 600, 50)
LAZINESS = (0.0, 0.3, 0.7, 0.9)
UNFIT = (*[0.0] * 6, 0.1, 0.5, 1.0)  # share of chunks that host memory cannot keep
FAILING_PLACES = ("launch", "choose", "fetch", "commit", "completed", "swap_out", "swap_in")
INTERRUPTED_PLACES = (
    *("launch", "choose", "fetch", "commit", "committed", "completed", "completed done"),
    *("swap_out", "swap_out done", "swap_in", "swap_in done", "expedite", "expedite done", "wait"),
)


@dataclass(frozen=True)
class Draft:
    """A turn to send; the driver derives its ids and parameters.

    Attributes:
        conversation: which one, or -1 for a one-off request.
        ending: how the reply may end before its length: "none", "eos", or "stop" (an id that will come).
        seed: of the prompt's ids, and of sampling.
        prefix: which one a first turn begins with, or -1.
    """

    conversation: int
    prompt_len: int
    max_tokens: int
    min_tokens: int
    ending: str
    temperature: float
    seed: int
    prefix: int = -1


@dataclass(frozen=True)
class Op:
    """One operation; `number` is its amount, index or position, clipped to what exists."""

    kind: str
    number: int = 0
    drafts: tuple[Draft, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """An engine's configuration and operations.

    `durable` keeps the history in a file, for "restart". With `drafts`, an oracle of that seed makes drafts.
    """

    config: EngineConfig
    max_model_tokens: int
    durable: bool
    ops: tuple[Op, ...]
    delays: Delays = IMMEDIATE
    drafts: int | None = None


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
    """Choices drawn from hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def pick[T](self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))


def make_config(choose: Chooser) -> EngineConfig:
    """Draw a small engine, so that pages, rows and tokens are scarce."""
    chunk_tokens = choose.pick((16, 16, 16, 16, 32, 64))
    max_num_running = choose.integer(1, 8)
    extra_tokens, extra_rows = choose.pick((0, 1, 7, 40, 100)), choose.pick((None, 0, 1, 5))
    gpu_pages = choose.pick((12, 8, 16, 20, 24, 30, 4, 2))
    return EngineConfig(
        stateful=choose.pick((*[True] * 7, False)),
        cache=CacheConfig(
            gpu_pages=gpu_pages,
            cpu_pages=choose.pick((0, gpu_pages, gpu_pages // 2, 3, 1, 200, gpu_pages // 2)),
            chunk_tokens=chunk_tokens,
            policy=choose.pick(("retention", "retention", *POLICIES)),
            reserve_fraction=choose.pick((0.1, 0.0, 0.0, 0.3)),
            swap_out_fraction=choose.pick((0.25, 0.25, 0.0, 0.6, 0.99)),
            retrieval_priority=choose.pick((True, False)),
            prefetch=choose.pick((True, True, False)),
        ),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_running + chunk_tokens + extra_tokens,
            max_num_rows=None if extra_rows is None else max_num_running + extra_rows,
            max_num_buckets=choose.integer(1, 3),
        ),
        runner=make_runner_config(choose),
    )


def make_runner_config(choose: Chooser) -> RunnerConfig:
    """Draw room for few copies at once, or many."""
    return RunnerConfig(
        max_banned_ids=32, max_logprobs=4, max_num_staged_pages=choose.pick((64, 64, 64, 8, 3, 1))
    )


def make_delays(choose: Chooser) -> Delays:
    """Draw how long copies take, and how many are lost."""
    return Delays(choose.integer(0, 2**16), choose.pick(LAZINESS), unfit=choose.pick(UNFIT))


def make_draft(choose: Chooser, max_len: int) -> Draft:
    """Draw a turn; a few are long, most are short."""
    max_tokens = choose.pick((1, 3, 6, 15, 50))
    return Draft(
        conversation=choose.integer(-1, NUM_CONVERSATIONS - 1),
        prompt_len=choose.integer(1, choose.pick((4, 20, 60, max_len))),
        max_tokens=max_tokens,
        min_tokens=min(choose.pick((0, 0, 1, 3)), max_tokens),
        ending=choose.pick(("none", "eos", "stop")),
        temperature=choose.pick((0.0, 0.7, 1.5)),
        seed=choose.integer(0, 2**16),
        prefix=choose.pick((-1, -1, -1, *range(len(PREFIX_LENS)))),
    )


def make_op(choose: Chooser, kinds: Sequence[str], max_len: int = 150) -> Op:
    """Draw one operation of one of these kinds."""
    kind = choose.pick(kinds)
    if kind == "submit":
        return Op(kind, 0, tuple(make_draft(choose, max_len) for _ in range(choose.pick((1, 1, 1, 2, 3)))))
    if kind == "step":
        return Op(kind, choose.pick((1, 1, 4, 20)))
    return Op(kind, choose.integer(0, 100))


def random_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed: half of them aim at holes or both tiers, the others are unrestricted."""
    choose = RandomChooser(seed)
    if seed % 4 == 3:
        return hole_scenario(choose)
    if seed % 4 == 1:
        return tier_scenario(choose)
    kinds = choose.pick(KINDS)
    return Scenario(
        config=make_config(choose),
        max_model_tokens=choose.pick(MODEL_TOKENS),
        durable=kinds is OPS and choose.pick((True, False)),
        ops=tuple(make_op(choose, kinds) for _ in range(choose.integer(10, 100))),
        delays=make_delays(choose),
    )


def with_order(config: EngineConfig, prompt_order: str) -> EngineConfig:
    """Return the configuration with this order of prompts."""
    return replace(config, scheduler=replace(config.scheduler, prompt_order=prompt_order))


def in_order(scenario: Scenario, prompt_order: str) -> Scenario:
    """Return the scenario with an engine whose prompts have this order."""
    return replace(scenario, config=with_order(scenario.config, prompt_order))


def drafting_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed in which running turns have drafts that hold in part; most are short."""
    scenario = random_scenario(seed)
    ops = scenario.ops[: None if seed % 10 == 0 else _FEW_OPS]
    return with_drafts(replace(scenario, ops=ops), seed)


def with_drafts(scenario: Scenario, seed: int) -> Scenario:
    """Return a scenario in which running turns have drafts that hold in part."""
    return replace(scenario, config=with_speculation(scenario.config, seed), drafts=seed)


def with_speculation(config: EngineConfig, seed: int) -> EngineConfig:
    """Return a configuration with drafts of some length."""
    limit = RandomChooser(seed + 1).pick((1, 3, 8, 8, 20))
    scheduler = replace(config.scheduler, speculation="history", max_draft_tokens=limit)
    return replace(config, scheduler=scheduler)


def hole_scenario(choose: Chooser) -> Scenario:
    """Draw long histories that alternate in a pool for half of them, with turns often cancelled half-way."""
    max_num_running = choose.integer(1, 3)
    config = EngineConfig(
        cache=CacheConfig(
            gpu_pages=choose.pick((16, 20, 24)), cpu_pages=choose.pick((0, 4, 8)), chunk_tokens=16
        ),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_running + 16 + choose.pick((0, 3, 15)),
        ),
        runner=make_runner_config(choose),
    )
    ops: list[Op] = []
    for _ in range(choose.integer(6, 20)):
        draft = Draft(
            choose.integer(0, 3), choose.integer(20, 90), 3, 0, "none", 0.0, choose.integer(0, 2**16)
        )
        if choose.pick((True, False)):
            ops += (Op("submit", 0, (draft,)), Op("step", choose.integer(1, 4)), Op("cancel", 0))
        ops += (Op("think", 5), Op("submit", 0, (draft,)), Op("step", choose.pick((2, 40, 40))))
    return Scenario(config, 300, False, tuple(ops), make_delays(choose))


def tier_scenario(choose: Chooser) -> Scenario:
    """Draw conversations that return after a while, several at a time, to pools that hold some of them.

    Their histories are on the GPU, on the CPU, dropped, and in transit, all at once; the batch grows beyond
    the pool, so that some are suspended.
    """
    gpu_pages, max_num_running = choose.pick((12, 16, 20, 24, 30)), choose.integer(1, 5)
    config = EngineConfig(
        cache=CacheConfig(
            gpu_pages=gpu_pages,
            cpu_pages=choose.pick((gpu_pages // 4, gpu_pages // 2, gpu_pages, 3 * gpu_pages)),
            chunk_tokens=16,
            policy=choose.pick(("retention", "retention", *POLICIES)),
            reserve_fraction=choose.pick((0.1, 0.0, 0.3)),
            swap_out_fraction=choose.pick((0.25, 0.5, 0.9)),
            retrieval_priority=choose.pick((True, False)),
            prefetch=choose.pick((True, True, False)),
        ),
        scheduler=SchedulerConfig(
            max_num_running=max_num_running,
            max_num_batched_tokens=max_num_running + 16 + choose.pick((0, 20, 60)),
        ),
        runner=make_runner_config(choose),
    )
    return Scenario(config, 400, False, tier_ops(choose, choose.integer(6, 22)), make_delays(choose))


def tier_ops(choose: Chooser, num_rounds: int, max_len: int = 120) -> tuple[Op, ...]:
    """Draw a few turns per round, operations on some of them, and a pause."""
    events = choose.pick(
        (("end", "retract"), ("cancel", "truncate", "retract"), ("retract",), ("fail", "interrupt"))
    )
    ops: list[Op] = []
    for _ in range(num_rounds):
        for conversation in {choose.integer(-1, NUM_CONVERSATIONS - 1) for _ in range(choose.integer(1, 3))}:
            draft = Draft(
                conversation=conversation,
                prompt_len=choose.integer(5, choose.pick((20, 60, max_len))),
                max_tokens=choose.pick((2, 6, 25, 70)),
                min_tokens=0,
                ending=choose.pick(("none", "none", "stop")),
                temperature=choose.pick((0.0, 1.0)),
                seed=choose.integer(0, 2**16),
                prefix=choose.pick((-1, -1, 2, 3)),
            )
            ops.append(Op("submit", 0, (draft,)))
        if choose.pick((True, False)):
            ops += (Op("step", choose.integer(0, 3)), Op(choose.pick(events), choose.integer(0, 99)))
        ops += (Op("step", choose.pick((2, 10, 50))), Op("think", choose.integer(1, 40)))
    return tuple(ops)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Draw scenarios that shrink: fewer operations, then smaller ones."""
    choose = _DrawnChooser(draw)
    kinds = choose.pick(KINDS)
    one_op = st.composite(lambda draw_op: make_op(_DrawnChooser(draw_op), kinds))
    return Scenario(
        config=make_config(choose),
        max_model_tokens=choose.pick(MODEL_TOKENS),
        durable=kinds is OPS and choose.pick((True, False)),
        ops=tuple(draw(st.lists(one_op(), min_size=1, max_size=80))),
        delays=make_delays(choose),
    )
