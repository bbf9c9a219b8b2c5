"""The time that a prompt still takes, by the cost model of recomputation.

Owns: seconds per token and per query-key pair, and their sum for what a request misses.
Does not know: who goes first, or how long a step takes beside this.
Called by the order of prompts and the target of steps.
"""

from __future__ import annotations

from typing import Final

from pensieve_jax.cache import CostModel
from pensieve_jax.scheduler.request import Request

_FAR_TOKENS: Final = 16_384  # context at which the time of a pair is read from the cost model


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
