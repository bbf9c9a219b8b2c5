"""What a front knows when it sends a turn: the turn, and what replicas last reported.

Owns: these values, and what they come to in seconds.
Does not know: rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class IncomingTurn(NamedTuple):
    """A turn that is to be sent.

    Attributes:
      root: of its conversation: what forks and sub-agents of one session share, and what is hashed.
      conversation: whose state it goes on from.
      prompt_tokens: what it adds.
      history_tokens: what was said before it; 0 for a first turn, which has no state anywhere.
    """

    root: str
    conversation: str
    prompt_tokens: int
    history_tokens: int


class Load(NamedTuple):
    """What a replica has to do.

    Attributes:
      num_turns: unanswered.
      compute_tokens: to be computed for those without a first token: prompts, and history that was lost.
      context_tokens: histories and prompts of all unanswered turns.
    """

    num_turns: int = 0
    compute_tokens: int = 0
    context_tokens: int = 0

    def with_turn(self, asked: IncomingTurn, compute_tokens: int) -> Load:
        """And one more, of whose tokens so many must be computed."""
        context_tokens = asked.prompt_tokens + asked.history_tokens
        return Load(
            self.num_turns + 1, self.compute_tokens + compute_tokens, self.context_tokens + context_tokens
        )


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast replicas are, all alike; measured once, or by a profile of the device.

    Attributes:
      token_s: to compute a token of a prompt, beside what is decoded.
      step_s: of a step of a few decodes.
      context_token_s: what a step takes longer for every token of context in it.
      output_tokens: of an answer, on average.
      capacity_tokens: of context that a replica serves at once; what is beyond it waits.
    """

    token_s: float
    step_s: float
    context_token_s: float
    output_tokens: float
    capacity_tokens: int

    def seconds(self, load: Load, compute_tokens: int) -> float:
        """Until a replica of this load would have answered a turn of which so many tokens must be computed.

        What is to be computed comes first; decoding is as slow as the contexts beside it are long; who finds
        the memory taken waits until as much of it has come free.
        """
        waiting = (load.compute_tokens + compute_tokens) * self.token_s
        step_s = self.step_s + self.context_token_s * min(load.context_tokens, self.capacity_tokens)
        excess = max(load.context_tokens - self.capacity_tokens, 0) / self.capacity_tokens
        return waiting + self.output_tokens * step_s * (1 + excess)

    def seconds_of_others(self, load: Load, asked: IncomingTurn, compute_tokens: int) -> float:
        """What all turns of this load together would be answered later for it.

        Each waits for its tokens, and reads its context in every step.
        """
        num_tokens = asked.history_tokens + asked.prompt_tokens
        later_s = compute_tokens * self.token_s + self.output_tokens * self.context_token_s * num_tokens
        return load.num_turns * later_s

    def cost_s(self, load: Load, asked: IncomingTurn, compute_tokens: int, others: float = 1.0) -> float:
        """Both together; a second of other turns counts `others`."""
        own_s = self.seconds(load, compute_tokens)
        return own_s + others * self.seconds_of_others(load, asked, compute_tokens)
