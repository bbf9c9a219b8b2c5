"""The knowledge of a front end when it sends a turn: the turn, and the replicas' last reports.

Owns: these values, and the seconds that they amount to.
Does not know: rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class IncomingTurn(NamedTuple):
    """A turn to be sent.

    Attributes:
      root: root of its conversation, which forks and sub-agents of one session share; it is hashed.
      conversation: the conversation whose state it continues.
      prompt_tokens: number of tokens that it adds.
      history_tokens: number of tokens before it; 0 for a first turn, which has no state anywhere.
    """

    root: str
    conversation: str
    prompt_tokens: int
    history_tokens: int


class Load(NamedTuple):
    """The work of a replica.

    Attributes:
      num_turns: number of unanswered turns.
      compute_tokens: tokens to compute for the turns without a first token: prompts, and history that was
        lost.
      context_tokens: histories and prompts of all unanswered turns.
    """

    num_turns: int = 0
    compute_tokens: int = 0
    context_tokens: int = 0

    def with_turn(self, asked: IncomingTurn, compute_tokens: int) -> Load:
        """Return this load plus one turn that computes `compute_tokens` tokens."""
        context_tokens = asked.prompt_tokens + asked.history_tokens
        return Load(
            self.num_turns + 1, self.compute_tokens + compute_tokens, self.context_tokens + context_tokens
        )


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speed of the replicas, which are all alike; measured once, or taken from a profile of the device.

    Attributes:
      token_s: seconds to compute a token of a prompt, beside the decodes.
      step_s: seconds of a step with few decodes.
      context_token_s: additional seconds of a step for every token of context in it.
      output_tokens: tokens of an answer, on average.
      capacity_tokens: tokens of context that a replica serves at once; turns beyond it wait.
    """

    token_s: float
    step_s: float
    context_token_s: float
    output_tokens: float
    capacity_tokens: int

    def seconds(self, load: Load, compute_tokens: int) -> float:
        """Return seconds until a replica with this load has answered a turn that computes `compute_tokens`.

        Queued tokens are computed first, and decoding slows down with the contexts in the batch. A turn that
        finds the memory full waits until enough of it is free.
        """
        waiting = (load.compute_tokens + compute_tokens) * self.token_s
        step_s = self.step_s + self.context_token_s * min(load.context_tokens, self.capacity_tokens)
        excess = max(load.context_tokens - self.capacity_tokens, 0) / self.capacity_tokens
        return waiting + self.output_tokens * step_s * (1 + excess)

    def seconds_of_others(self, load: Load, asked: IncomingTurn, compute_tokens: int) -> float:
        """Return the delay that the turn causes for the turns of this load, summed over them.

        Each waits for the turn's tokens, and for the reads of its context in every step.
        """
        num_tokens = asked.history_tokens + asked.prompt_tokens
        later_s = compute_tokens * self.token_s + self.output_tokens * self.context_token_s * num_tokens
        return load.num_turns * later_s

    def cost_s(
        self, load: Load, asked: IncomingTurn, compute_tokens: int, others_weight: float = 1.0
    ) -> float:
        """Return the sum of both; a second of other turns counts `others_weight` seconds."""
        own_s = self.seconds(load, compute_tokens)
        return own_s + others_weight * self.seconds_of_others(load, asked, compute_tokens)
