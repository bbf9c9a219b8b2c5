"""Speed with and without kept KV cache, for the demonstration: first tokens, and tokens per second.

Owns: the long conversations, the timed turns, and their summary.
Does not know: how engines start, or the output.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pensieve_jax import SamplingParams
from pensieve_jax.commands.demo_conversations import CONVERSATIONS

if TYPE_CHECKING:  # it imports JAX
    from pensieve_jax import LLM

NUM_USERS: Final = 8
_NUM_ROUNDS: Final = 5
_ROOM_TOKENS: Final = 96  # of the context, for a question and its reply
_REPLY_TOKENS: Final = 16
_QUESTION: Final = [{"role": "user", "content": "Thanks! By the way, what is my name?"}]
_PROMPT_ONLY: Final = SamplingParams(max_tokens=0)
_REPLY: Final = SamplingParams(max_tokens=_REPLY_TOKENS, ignore_eos=True)


class Speed(NamedTuple):
    """Speed of one engine.

    Attributes:
      history_tokens: length of the conversation before the timed question.
      first_token_s: median time from a question to its first token.
      tokens_per_s: tokens of replies per second, when `NUM_USERS` such users ask at once.
    """

    history_tokens: int
    first_token_s: float
    tokens_per_s: float


def measure(llm: LLM) -> Speed:
    """Measure an engine that has room for `NUM_USERS` conversations of the longest context.

    Each conversation begins with other ids, so that none shares KV cache. A timed turn is cancelled after its
    first token, and so leaves no trace in the conversation.
    """
    tokenizer = llm.tokenizer
    assert tokenizer is not None  # `serve` refuses models without one
    text = tokenizer.encode(_text(), add_bos=False)
    length = min(llm.engine.limits.max_context_tokens, 4096) - _ROOM_TOKENS
    history = (text * -(-2 * length // len(text)))[: 2 * length]
    names = [f"user {number}" for number in range(NUM_USERS)]
    prompts = [history[7 * number :][:length] for number in range(NUM_USERS)]
    llm.generate(prompts, _PROMPT_ONLY, conversation_ids=names)
    first_token_s = statistics.median(_first_token_s(llm, names[0]) for _ in range(_NUM_ROUNDS))
    start_s = time.perf_counter()
    outputs = llm.chat([_QUESTION] * NUM_USERS, _REPLY, conversation_ids=names)
    seconds = time.perf_counter() - start_s
    return Speed(length, first_token_s, sum(len(one.token_ids) for one in outputs) / seconds)


def _first_token_s(llm: LLM, name: str) -> float:
    start_s = time.perf_counter()
    with llm.stream_chat(_QUESTION, _REPLY, conversation_id=name) as stream:
        next(stream)
        return time.perf_counter() - start_s


def _text() -> str:
    """Return text for a long conversation: all messages of the demonstration's users."""
    messages: Sequence[str] = [text for script in CONVERSATIONS.values() for text in script.messages]
    return " ".join(messages)
