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

from pensieve_jax.config import SchedulerConfig
from pensieve_jax.scheduler.buckets import step_limit, token_buckets
from pensieve_jax.scheduler.request import Request


class PromptOrder(ABC):
    """A rule for prompts. Under every rule, requests are admitted by arrival, and the latest is suspended."""

    def __init__(self, config: SchedulerConfig, chunk_tokens: int) -> None:
        """Use the limits of `config`."""
        self._buckets = token_buckets(config)
        self._max_num_rows = config.row_limit
        self._prompt_steps = config.prompt_steps
        self._chunk_tokens = chunk_tokens

    @abstractmethod
    def arrange(self, prompts: Sequence[Request]) -> Sequence[Request]:
        """Return prompts, given by arrival, in the order in which a step grants them tokens."""

    @abstractmethod
    def is_enough(self, num_tokens: int, num_rows: int) -> bool:
        """Return whether the running requests that arrived before another one keep it from joining.

        Args:
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

    def is_enough(self, num_tokens: int, num_rows: int) -> bool:
        return num_tokens >= self._buckets[-1] or num_rows >= self._max_num_rows
