"""Whether new messages are new: a client that sends the whole transcript would have it twice.

Owns: what counts as sending a conversation's messages again.
Does not know: templates, tokens, or where earlier turns are kept.

A message may well be sent twice ("yes", and "yes" again), so equal messages alone are no sign. Messages are
taken for a transcript where they begin with those that the first turn ended with, one or more, and the next
one is the assistant's: they tell the reply that the conversation has. The first turn's beginning may be left
out, since it may be a shared prefix, and system messages in front may be others, since clients change them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from pensieve_jax.text.chat import EarlierTurn
from pensieve_jax.text.messages import Message

_INSTRUCTIONS: Final = ("system", "developer")


def num_messages_held(earlier: Sequence[EarlierTurn], messages: Sequence[Message]) -> int:
    """How many messages at the beginning of `messages` a conversation has already; 0 for new ones.

    Args:
      earlier: the conversation's finished turns, in order.
      messages: those of the turn to come.
    """
    return _held_from_the_start(earlier, messages) or _held_in_a_window(earlier, messages)


def _held_in_a_window(earlier: Sequence[EarlierTurn], messages: Sequence[Message]) -> int:
    """The same where clients cut transcripts, so that they begin with a later turn.

    Here the reply must be the stored one, but for blanks around it: a question that was asked before may
    stand in front of an example.
    """
    for number, turn in enumerate(earlier):
        end = _end_of_replay(turn.messages or (), messages, 0)
        if end is None or str(messages[end - 1]["content"]).strip() != (turn.output_text or "").strip():
            continue
        return _end_of_replays(earlier[number + 1 :], messages, end)
    return 0


def _held_from_the_start(earlier: Sequence[EarlierTurn], messages: Sequence[Message]) -> int:
    """The same where `messages` begin as the conversation did."""
    if not earlier or earlier[0].messages is None:
        return 0
    first = earlier[0].messages
    instructions = itertools.takewhile(lambda message: message["role"] in _INSTRUCTIONS, messages)
    # The longest match first: a first turn may itself tell of exchanges.
    for start, num_left_out in itertools.product((0, len(list(instructions))), range(len(first))):
        end = _end_of_replay(first[num_left_out:], messages, start)
        if end is not None:
            break
    else:
        return 0
    return _end_of_replays(earlier[1:], messages, end)


def _end_of_replays(turns: Sequence[EarlierTurn], messages: Sequence[Message], end: int) -> int:
    """Where what follows of the conversation ends in `messages`, from `end` on."""
    for turn in turns:
        next_end = _end_of_replay(turn.messages or (), messages, end)
        if next_end is None:
            break
        end = next_end
    return end


def _end_of_replay(sent: Sequence[Message], messages: Sequence[Message], start: int) -> int | None:
    """Where a turn's messages and its reply end in `messages`, if they stand there from `start` on.

    A reply may have been trimmed or edited on its way through the client: that it is one counts.
    """
    end = start + len(sent)
    is_replayed = (
        len(sent) > 0
        and len(messages) > end
        and tuple(messages[start:end]) == tuple(sent)
        and messages[end]["role"] == "assistant"
    )
    return end + 1 if is_replayed else None
