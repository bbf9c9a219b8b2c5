"""The order in which prompts take part in steps, and how much a step holds beside decodes.

Owns: who gets the tokens of a step first, how many requests may have tokens to compute at a time, and the
limit of a step, which `step_target` may lower. A *prompt* is a running request that misses more than its last
token: a prompt proper, recomputation, or a resumed turn.
Does not know: pages, copies, or how intervals are granted (`scheduler`).
Called by the scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

from pensieve_jax.cache import CostModel
from pensieve_jax.config import SchedulerConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.scheduler.buckets import step_limit, token_buckets
from pensieve_jax.scheduler.prompt_work import PromptWork
from pensieve_jax.scheduler.request import Request
from pensieve_jax.scheduler.step_target import StepTarget

AGE_SHARE: Final = 0.25
"""Seconds of work that a second of waiting outweighs, in the order by work left."""
MAX_NUM_PROMPTS: Final = 8
"""The most prompts before a request that joins, in the order by work left."""


class PromptOrder(ABC):
    """A rule for prompts. Under every rule, requests are admitted by arrival, and the latest is suspended."""

    def __init__(self, config: SchedulerConfig, chunk_tokens: int, target: StepTarget | None = None) -> None:
        """Use the limits of `config`, and the `target` of steps beside decodes, if there is one."""
        self._target = target
        self._buckets = token_buckets(config)
        self._max_num_rows = config.row_limit
        self._prompt_steps = config.prompt_steps
        self._chunk_tokens = chunk_tokens

    def on_arrival(self, request: Request) -> None:  # noqa: B027 - most orders need no times
        """Note that a request arrives now."""

    def on_decoding(self, request: Request) -> None:
        """Note that a request may decode from the step being scheduled on."""
        if self._target is not None:
            self._target.on_decoding(request)

    @abstractmethod
    def arrange(self, prompts: Sequence[Request]) -> Sequence[Request]:
        """Return prompts, given by arrival, in the order in which a step grants them tokens."""

    @abstractmethod
    def is_enough(self, num_prompts: int, num_tokens: int, num_rows: int) -> bool:
        """Return whether the running requests that arrived before another one keep it from joining.

        Args:
          num_prompts: number of prompts among them.
          num_tokens: tokens that they could compute in a step, decodes included.
          num_rows: rows of a step for these.
        """

    def step_limit(
        self,
        num_decodes: int,
        prompts: Sequence[Request],
        *,
        running: Iterable[Request],
        waiting: Iterable[Request],
    ) -> int:
        """Return the most tokens of a step, decodes included; see `buckets.step_limit` for the least.

        Args:
          num_decodes: rows of one token.
          prompts: prompts in the order of `arrange`.
          running: requests of the batch.
          waiting: requests of the queue.
        """
        limit = step_limit(
            self._buckets,
            num_decodes,
            sum(request.num_missing(self._chunk_tokens)[0] for request in prompts),
            chunk_tokens=self._chunk_tokens,
            prompt_steps=self._prompt_steps,
        )
        if self._target is None or not num_decodes:
            return limit
        buckets = [size for size in self._buckets if size <= limit]
        return self._target.limit(buckets, num_decodes, prompts, running=running, waiting=waiting)


class ByArrival(PromptOrder):
    """Prompts by arrival: a request joins while the requests before it do not fill a step."""

    def arrange(self, prompts: Sequence[Request]) -> Sequence[Request]:
        return prompts

    def is_enough(self, num_prompts: int, num_tokens: int, num_rows: int) -> bool:
        return num_tokens >= self._buckets[-1] or num_rows >= self._max_num_rows


class ByWorkLeft(PromptOrder):
    """Prompts by the work that is left of each, which waiting outweighs.

    The least sum of a prompt's work in seconds and `AGE_SHARE` of the time of its arrival goes first. So a
    prompt of `w` seconds is passed only by requests that arrive within `w / AGE_SHARE` seconds of it, however
    many arrive later. A request joins while fewer than `MAX_NUM_PROMPTS` prompts arrived before it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        chunk_tokens: int,
        work: PromptWork,
        clock: Clock,
        target: StepTarget | None = None,
    ) -> None:
        """Use the limits of `config`, and times of `clock`, which must never go back."""
        super().__init__(config, chunk_tokens, target)
        self._work = work
        self._clock = clock
        self._start_s = clock.now()  # sums of small numbers are precise

    def on_arrival(self, request: Request) -> None:
        request.arrival_s = self._clock.now() - self._start_s

    def arrange(self, prompts: Sequence[Request]) -> Sequence[Request]:
        return sorted(prompts, key=self._rank) if len(prompts) > 1 else prompts

    def is_enough(self, num_prompts: int, num_tokens: int, num_rows: int) -> bool:
        return num_prompts >= MAX_NUM_PROMPTS

    def _rank(self, request: Request) -> float:
        return self._work.left(request) + AGE_SHARE * request.arrival_s


def make_prompt_order(
    config: SchedulerConfig, chunk_tokens: int, cost_model: CostModel, clock: Clock
) -> PromptOrder:
    """Return the order that `config.prompt_order` names, with the target of `config.target_tpot_ms`."""
    work = PromptWork(cost_model, chunk_tokens)
    target = None
    if config.target_tpot_ms is not None:
        target = StepTarget(config.target_tpot_ms, work, clock, chunk_tokens)
    if config.prompt_order == "arrival":
        return ByArrival(config, chunk_tokens, target)
    return ByWorkLeft(config, chunk_tokens, work, clock, target)
