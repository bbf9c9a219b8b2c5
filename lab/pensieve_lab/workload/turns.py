"""A turn on its way through a run, and what is known of it when it has been answered.

Owns: `UserTurn`, which the client makes and a server serves; `Answer`, its outcome.
Does not know: queues, devices, or sessions as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve_jax.core.outputs import Usage


@dataclass(eq=False, slots=True)
class UserTurn:
    """One turn of one conversation, as it is sent.

    Attributes:
      conversation_id: whose.
      turn_index: of the conversation, from 0.
      arrival_s: when it is sent.
      num_history_tokens: what was said before it.
      prompt_tokens: what it adds.
      output_tokens: length of the answer, which no scheduler is told.
      is_last: nothing follows it.
      token_ids: what it says, as long as `prompt_tokens`; empty for servers that take time only.
      root_id: of the conversation's session; empty for one that is the whole of its own.
    """

    conversation_id: str
    turn_index: int
    arrival_s: float
    num_history_tokens: int
    prompt_tokens: int
    output_tokens: int
    is_last: bool
    token_ids: Sequence[int] = ()
    root_id: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn that was answered.

    Attributes:
      turn: as it was sent.
      replica: who answered it.
      first_token_s, end_s: when its first and its last token were on the host.
      usage: where its tokens came from.
    """

    turn: UserTurn
    replica: int
    first_token_s: float
    end_s: float
    usage: Usage
