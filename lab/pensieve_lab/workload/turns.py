"""A turn during a run, and its answer.

Owns: `UserTurn`, which the client makes and a server serves; `Answer`, its outcome.
Does not know: queues, devices, or sessions as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pensieve_jax.core.outputs import Usage


@dataclass(eq=False, slots=True)
class UserTurn:
    """Turn of a conversation, as it is sent.

    Attributes:
      conversation_id: id of the conversation.
      turn_index: index in the conversation, from 0.
      arrival_s: when it is sent.
      num_history_tokens: length of the conversation before it.
      prompt_tokens: tokens that it adds.
      output_tokens: length of the answer; the scheduler does not know it.
      is_last: whether it is the last turn of its conversation.
      token_ids: ids of the prompt, `prompt_tokens` of them; empty for simulated servers.
      root_id: id of the conversation's session; empty if the conversation is a whole session.
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
    """Answer to a turn.

    Attributes:
      turn: the turn as it was sent.
      replica: replica that answered it.
      first_token_s, end_s: when its first and its last token reached the host.
      usage: where its tokens came from.
    """

    turn: UserTurn
    replica: int
    first_token_s: float
    end_s: float
    usage: Usage
