"""Recognition of repeated messages: a client that sends the whole transcript must not store it twice.

Owns: what counts as sending a conversation's messages again.
Does not know: templates, tokens, or where earlier turns are stored.

A message may be sent twice on purpose ("yes", and "yes" again), so equal messages alone prove nothing.
Messages count as a transcript if they begin with the last message or messages of the first turn and the next
one is the assistant's, which repeats the reply. The beginning of the first turn may be missing, since it may
be a shared prefix. System messages at the start may differ, since clients change them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from pensieve_jax.text.call_arguments import canonical_arguments
from pensieve_jax.text.chat import EarlierTurn
from pensieve_jax.text.messages import Message

_INSTRUCTIONS: Final = ("system", "developer")


def num_messages_held(earlier: Sequence[EarlierTurn], messages: Sequence[Message]) -> int:
    """Return how many messages at the beginning of `messages` the conversation already has; 0 if all are new.

    Args:
      earlier: the conversation's finished turns, in order.
      messages: messages of the new turn.
    """
    return _held_from_start(earlier, messages) or _held_in_suffix(earlier, messages)


def _held_in_suffix(earlier: Sequence[EarlierTurn], messages: Sequence[Message]) -> int:
    """Return the same number for a truncated transcript that begins with a later turn.

    Here the reply must equal the stored one except for surrounding blanks, because a question asked before
    may also introduce an example.
    """
    for number, turn in enumerate(earlier):
        end = _end_of_replay(turn.messages or (), messages, 0)
        if end is None or not _is_same_reply(turn, messages[end - 1]):
            continue
        return _end_of_replays(earlier[number + 1 :], messages, end)
    return 0


def _is_same_reply(turn: EarlierTurn, message: Message) -> bool:
    reply = turn.reply or {"content": turn.output_text}
    texts = [(one["content"] or "").strip() for one in (reply, message)]
    calls = [
        [
            (call["function"]["name"], canonical_arguments(call["function"]["arguments"]))
            for call in one.get("tool_calls") or ()
        ]
        for one in (reply, message)
    ]
    return texts[0] == texts[1] and calls[0] == calls[1]


def _held_from_start(earlier: Sequence[EarlierTurn], messages: Sequence[Message]) -> int:
    """Return the same number for `messages` that begin as the conversation did."""
    if not earlier or earlier[0].messages is None:
        return 0
    first = earlier[0].messages
    instructions = itertools.takewhile(lambda message: message["role"] in _INSTRUCTIONS, messages)
    # The longest match first: the first turn's messages may themselves contain exchanges.
    for start, num_left_out in itertools.product((0, len(list(instructions))), range(len(first))):
        end = _end_of_replay(first[num_left_out:], messages, start)
        if end is not None:
            break
    else:
        return 0
    return _end_of_replays(earlier[1:], messages, end)


def _end_of_replays(turns: Sequence[EarlierTurn], messages: Sequence[Message], end: int) -> int:
    """Return where the repetition of `turns` ends in `messages`, starting at `end`."""
    for turn in turns:
        next_end = _end_of_replay(turn.messages or (), messages, end)
        if next_end is None:
            break
        end = next_end
    return end


def _end_of_replay(sent: Sequence[Message], messages: Sequence[Message], start: int) -> int | None:
    """Return where a turn's messages and reply end in `messages` if they are repeated at `start`, else None.

    The client may have trimmed or edited the reply, so any message of the assistant counts.
    """
    end = start + len(sent)
    is_replayed = (
        len(sent) > 0
        and len(messages) > end
        and tuple(messages[start:end]) == tuple(sent)
        and messages[end]["role"] == "assistant"
    )
    return end + 1 if is_replayed else None
