"""The order in which prompts take part in steps, and how much a step holds beside decodes.

Owns: who gets the tokens of a step first, how many requests may have tokens to compute at a time, and the
limit of a step. A *prompt* is a running request that misses more than its last token: a prompt proper,
recomputation, or a resumed turn.
Does not know: pages, copies, or how intervals are granted (`scheduler`).
Called by the scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Final

from pensieve_jax.cache import CostModel
from pensieve_jax.config import SchedulerConfig
from pensieve_jax.core.clock import Clock
from pensieve_jax.scheduler.buckets import step_limit, token_buckets
from pensieve_jax.scheduler.request import Request

AGE_SHARE: Final = 0.25
"""Seconds of work that a second of waiting outweighs, in the order by work left."""
MAX_NUM_PROMPTS: Final = 8
"""The most prompts before a request that joins, in the order by work left."""
_FAR_TOKENS = 16_384  # context at which the time of a pair is read from the cost model


class PromptWork:
    """The time of missing tokens: `token_s` for each, and `pair_s` for each query-key pair.

    Attributes:
      token_s: seconds per token.
      pair_s: seconds per pair of a query and a key.
    """

    def __init__(self, cost_model: CostModel, chunk_tokens: int) -> None:
        """Fit both to the first chunk of `cost_model` and to one far behind it."""
        first_s, far_s = cost_model.chunk_cost_s(chunk_tokens), cost_model.chunk_cost_s(_FAR_TOKENS)
        self.pair_s = (far_s - first_s) / (chunk_tokens * (_FAR_TOKENS - chunk_tokens))
        self.token_s = max(first_s / chunk_tokens - self.pair_s * chunk_tokens / 2, 0.0)

    def of_interval(self, start: int, end: int) -> float:
        """Return the seconds of tokens [start, end); each attends to all before it."""
        return (end - start) * (self.token_s + self.pair_s * (start + end) / 2)

    def left(self, request: Request) -> float:
        """Return the seconds of what a request misses; chunks on their way to a page are not missing."""
        seconds = self.of_interval(request.sequence.num_kv_tokens, len(request.token_ids))
        for start, end in request.holes:
            seconds += self.of_interval(start, end)
        return seconds


class PromptOrder(ABC):
    """A rule for prompts. Under every rule, requests are admitted by arrival, and the latest is suspended."""

    def __init__(self, config: SchedulerConfig, chunk_tokens: int) -> None:
        """Use the limits of `config`."""
        self._buckets = token_buckets(config)
        self._max_num_rows = config.row_limit
        self._prompt_steps = config.prompt_steps
        self._chunk_tokens = chunk_tokens

    def on_arrival(self, request: Request) -> None:  # noqa: B027 - most orders need no times
        """Note that a request arrives now."""

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

    def step_limit(self, num_decodes: int, prompts: Collection[Request]) -> int:
        """Return the most tokens of a step, decodes included; see `buckets.step_limit` for the least."""
        return step_limit(
            self._buckets,
            num_decodes,
            sum(request.num_missing(self._chunk_tokens)[0] for request in prompts),
            chunk_tokens=self._chunk_tokens,
            prompt_steps=self._prompt_steps,
        )


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

    def __init__(self, config: SchedulerConfig, chunk_tokens: int, work: PromptWork, clock: Clock) -> None:
        """Use the limits of `config`, and times of `clock`, which must never go back."""
        super().__init__(config, chunk_tokens)
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
    """Return the order that `config.prompt_order` names."""
    if config.prompt_order == "arrival":
        return ByArrival(config, chunk_tokens)
    return ByWorkLeft(config, chunk_tokens, PromptWork(cost_model, chunk_tokens), clock)
