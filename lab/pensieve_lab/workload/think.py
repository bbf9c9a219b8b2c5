"""Think times of users: from the end of an answer to the user's next turn.

Owns: the distributions of think times, and the use of recorded ones.
Does not know: arrivals, or how long answers take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pensieve_lab.workload.checks import check_positive, check_time, is_number
from pensieve_lab.workload.errors import WorkloadError
from pensieve_lab.workload.trace import ConversationTrace


class ThinkTime(Protocol):
    """Distribution of a conversation's think times. Its only source of randomness is the `rng` of `draw`."""

    def draw(self, conversation: ConversationTrace, rng: np.random.Generator) -> tuple[float, ...]:
        """Draw the seconds before every turn except the first: `len(conversation.turns) - 1` values >= 0."""
        ...


@dataclass(frozen=True, slots=True)
class ExponentialThink:
    """Independent exponential think times, the paper's default; its Figure 15 sweeps the mean."""

    mean_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise WorkloadError for a negative mean; with a mean of 0, users reply at once."""
        check_time("mean_s", self.mean_s)

    def draw(self, conversation: ConversationTrace, rng: np.random.Generator) -> tuple[float, ...]:
        return tuple(rng.exponential(self.mean_s, size=len(conversation.turns) - 1).tolist())


@dataclass(frozen=True, slots=True)
class LognormalThink:
    """Independent lognormal think times: exp(N(mu, sigma**2)) seconds, with median exp(mu).

    The gaps in BurstGPT's real chats are near mu=5.21, sigma=1.75. Their tail is far heavier than that of an
    exponential distribution.
    """

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        """Raise WorkloadError unless sigma is positive and mu is a finite number."""
        if not is_number(self.mu):
            raise WorkloadError("mu", self.mu, "a finite number: the logarithm of the median in seconds")
        check_positive("sigma", self.sigma)

    def draw(self, conversation: ConversationTrace, rng: np.random.Generator) -> tuple[float, ...]:
        return tuple(rng.lognormal(self.mu, self.sigma, size=len(conversation.turns) - 1).tolist())


@dataclass(frozen=True, slots=True)
class RecordedThink:
    """Recorded think times: `think_s` of the turn, else its `gap_s`, else drawn from `otherwise`.

    A gap runs from one arrival to the next, so it includes the recorded service's answer. The duration of
    that answer is unknown, so the gap is used unchanged, as a think time that is too long by one answer.

    Attributes:
      otherwise: distribution for turns that have neither; with None, such a turn is an error.
    """

    otherwise: ThinkTime | None = None

    def draw(self, conversation: ConversationTrace, rng: np.random.Generator) -> tuple[float, ...]:
        """Return the recorded times; raises WorkloadError for a missing time without `otherwise`."""
        recorded = [turn.gap_s if turn.think_s is None else turn.think_s for turn in conversation.turns[1:]]
        drawn: tuple[float, ...] | None = None
        think: list[float] = []
        for index, value in enumerate(recorded):
            if value is None:
                if self.otherwise is None:
                    field = f"think_s of turn {index + 1} of conversation {conversation.conversation_id!r}"
                    raise WorkloadError(
                        field, None, "recorded", "draw think times from a distribution instead"
                    )
                drawn = drawn or self.otherwise.draw(conversation, rng)
                value = drawn[index]
            think.append(float(value))
        return tuple(think)
