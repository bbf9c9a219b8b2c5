"""Synthetic conversations: turns and lengths of given means, for the paper's two datasets.

Owns: the shapes of ShareGPT and UltraChat after the paper's Table 2, and drawing conversations of a shape.
Does not know: arrivals, think times or texts.

The means are the paper's. It gives no spreads, so we chose them. All distributions are lognormal, rounded to
whole turns and tokens: wide for ShareGPT, whose users are people, and narrow for UltraChat, which models
wrote.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pensieve_lab.workload.checks import check_count, check_positive
from pensieve_lab.workload.errors import WorkloadError
from pensieve_lab.workload.trace import ConversationTrace, Trace, TurnTrace


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal distribution over whole numbers from 1.

    Attributes:
      mean: mean of the whole numbers, above 1.
      sigma: standard deviation of the logarithm before rounding, which sets the weight of the tail.
    """

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        """Raise WorkloadError for a mean of at most 1, or no spread."""
        check_positive("sigma", self.sigma)
        check_positive("mean", self.mean)
        if self.mean <= 1:
            raise WorkloadError("mean", self.mean, "above 1, the smallest length")

    def draw(self, rng: np.random.Generator, count: int, at_most: int) -> NDArray[np.int64]:
        """Draw `count` lengths from 1 to `at_most`; they have this mean if `at_most` is well above it."""
        logarithms = rng.normal(_fit_mu(self.mean, self.sigma, at_most), self.sigma, size=count)
        # The logarithm is limited first, so that a far tail cannot overflow.
        drawn = np.rint(np.exp(np.minimum(logarithms, math.log(at_most))))
        return np.maximum(drawn, 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class ConversationShape:
    """Distributions of a dataset's conversations.

    Attributes:
      name: name of the dataset.
      turns: turns of a conversation.
      prompt_tokens: new tokens of a turn.
      output_tokens: tokens of an answer.
    """

    name: str
    turns: Lengths
    prompt_tokens: Lengths
    output_tokens: Lengths


SHAREGPT: Final = ConversationShape(
    "sharegpt",
    turns=Lengths(mean=5.56, sigma=1.0),
    prompt_tokens=Lengths(mean=37.77, sigma=1.2),
    output_tokens=Lengths(mean=204.58, sigma=1.0),
)
ULTRACHAT: Final = ConversationShape(
    "ultrachat",
    turns=Lengths(mean=3.86, sigma=0.6),
    prompt_tokens=Lengths(mean=51.78, sigma=0.7),
    output_tokens=Lengths(mean=257.81, sigma=0.6),
)
SHAPES: Final = {shape.name: shape for shape in (SHAREGPT, ULTRACHAT)}


def generate_trace(
    shape: ConversationShape, *, num_conversations: int, seed: int, max_context_tokens: int = 16_384
) -> Trace:
    """Draw conversations of a shape of at most `max_context_tokens`; the default is the paper's limit.

    A conversation ends with the last turn that fits; a first turn that does not fit is shortened. The means
    are those of the shape as long as few conversations reach the limit. The same arguments give the same
    trace.

    Raises WorkloadError for invalid counts, or a seed below 0.
    """
    check_count("num_conversations", num_conversations)
    check_count("max_context_tokens", max_context_tokens, at_least=2)
    check_count("seed", seed, at_least=0)
    rng = np.random.default_rng(seed)
    mean_turn_tokens = shape.prompt_tokens.mean + shape.output_tokens.mean
    max_turns = max(int(max_context_tokens / mean_turn_tokens), 1)
    num_turns = shape.turns.draw(rng, num_conversations, max_turns)
    total = int(num_turns.sum())
    prompts = shape.prompt_tokens.draw(rng, total, max_context_tokens).tolist()
    outputs = shape.output_tokens.draw(rng, total, max_context_tokens).tolist()
    conversations: list[ConversationTrace] = []
    start = 0
    for index, count in enumerate(num_turns.tolist()):
        lengths = list(zip(prompts[start : start + count], outputs[start : start + count], strict=True))
        turns = _fitting_turns(lengths, max_context_tokens)
        conversations.append(ConversationTrace(f"{shape.name}-{index}", turns))
        start += count
    return Trace(f"{shape.name} (synthetic, seed {seed})", tuple(conversations))


def _fitting_turns(lengths: list[tuple[int, int]], max_context_tokens: int) -> tuple[TurnTrace, ...]:
    prompt_tokens, output_tokens = lengths[0]
    prompt_tokens = min(prompt_tokens, max_context_tokens - 1)
    turns = [TurnTrace(prompt_tokens, min(output_tokens, max_context_tokens - prompt_tokens))]
    context_tokens = turns[0].num_tokens
    for prompt_tokens, output_tokens in lengths[1:]:
        context_tokens += prompt_tokens + output_tokens
        if context_tokens > max_context_tokens:
            break
        turns.append(TurnTrace(prompt_tokens, output_tokens))
    return tuple(turns)


@lru_cache
def _fit_mu(mean: float, sigma: float, at_most: int) -> float:
    """Find the mean of the logarithm for which the rounded and limited lengths have about the given mean."""
    low, high = -10.0 * sigma, math.log(mean) + sigma
    for _ in range(40):
        middle = (low + high) / 2
        if _mean_length(middle, sigma, at_most) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _mean_length(mu: float, sigma: float, at_most: int) -> float:
    """Return E[min(max(round(exp(N(mu, sigma))), 1), at_most)], summed over P(length exceeded)."""
    scale = sigma * math.sqrt(2)
    exceeding = (math.erfc((math.log(length + 0.5) - mu) / scale) for length in range(1, at_most))
    return 1 + sum(itertools.takewhile(lambda chance: chance > 1e-9, exceeding)) / 2
