"""A reply in Anthropic's form: the message, and the events of a stream.

Owns: content blocks, stop reasons, usage, and the order of events.
Does not know: requests, or how turns run. Called by `anthropic.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from pensieve_jax.core.outputs import Output, Usage
from pensieve_jax.server.http.replies import encode_json, event
from pensieve_jax.server.turns.sampling import num_cached_tokens, num_context_tokens, token_sources
from pensieve_jax.text.call_arguments import parse_arguments
from pensieve_jax.text.reply_events import (
    ArgumentText,
    CallBegun,
    CallEnded,
    ContentText,
    ReasoningText,
    ReplyEvent,
)

PING: Final = event(b'{"type":"ping"}', "ping")
"""What a silent stream sends."""
MESSAGE_STOP: Final = event(b'{"type":"message_stop"}', "message_stop")
SIGNATURE: Final = "pensieve"
"""Signature of every block of reasoning. Some clients send back only blocks with one; it is not checked."""


def message_object(
    message_id: str, model: str, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
) -> dict[str, Any]:
    """Return a message; `ending` is the value of `ending_of`, or `NOT_ENDED`."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **ending,
        "usage": usage,
    }


NOT_ENDED: Final[dict[str, Any]] = {"stop_reason": None, "stop_sequence": None}


def ending_of(
    output: Output, max_tokens: int, stop_sequences: Sequence[str] = (), *, calls_tools: bool
) -> dict[str, Any]:
    """Return how a reply ended.

    Args:
      output: the finished turn.
      max_tokens, stop_sequences: the fields of its request. A reply of one call ends with another string.
      calls_tools: whether the reply has a call.
    """
    if output.finish_reason == "length":
        is_full = output.usage.output_tokens < max_tokens  # the context ended it
        return NOT_ENDED | {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens"}
    if output.stop_string in stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_string}
    return NOT_ENDED | {"stop_reason": "tool_use" if calls_tools else "end_turn"}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the usage object of a finished turn."""
    num_cached = num_cached_tokens(usage)
    return {
        **token_counts(num_context_tokens(usage) - num_cached, num_cached),
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "pensieve": token_sources([usage]),
    }


def token_counts(num_computed: int, num_cached: int) -> dict[str, Any]:
    """Return the input tokens of a usage object.

    `cache_creation_input_tokens` counts tokens that a marker asked to keep, for another price. It is 0, since
    this server keeps all tokens.
    """
    return {
        "input_tokens": num_computed,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
    }


type CallIdOf = Callable[[int, str], str]
"""Returns the id of a call, given its position in the reply and its header."""


def content_of(
    events: Iterable[ReplyEvent], call_id_of: CallIdOf, *, shows_thinking: bool = True
) -> list[Any]:
    """Return the content blocks of a whole reply; none for an empty one.

    Args:
      events: all events of the reply.
      call_id_of: see `CallIdOf`.
      shows_thinking: whether blocks of reasoning have their text.
    """
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for one in events:
        match one:
            case ReasoningText(text):
                _last_of("thinking", blocks)["thinking"] += text if shows_thinking else ""
            case ContentText(text):
                _last_of("text", blocks)["text"] += text
            case CallBegun(call, name, header):
                arguments[len(blocks)] = ""
                blocks.append(_tool_use(call_id_of(call, header), name))
            case ArgumentText(_, text):
                arguments[len(blocks) - 1] += text
    for index, text in arguments.items():
        blocks[index]["input"] = _input(text)
    return blocks


def _last_of(kind: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last block if it is of this type, else a new one."""
    if not blocks or blocks[-1]["type"] != kind:
        signature = {"signature": SIGNATURE} if kind == "thinking" else {}
        blocks.append({"type": kind, kind: "", **signature})
    return blocks[-1]


def _tool_use(call_id: str, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {}}


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; a text that is not a JSON object is put into one, as Anthropic does."""
    try:
        return parse_arguments(text)
    except ValueError:
        return {"INVALID_JSON": text}


class BlockEvents:
    """The events of the content blocks of one streamed reply."""

    def __init__(self, call_id_of: CallIdOf, *, shows_thinking: bool = True) -> None:
        """Start without a block; see `content_of` for the arguments."""
        self._call_id_of = call_id_of
        self._shows_thinking = shows_thinking
        self._index = -1
        self._kind = ""  # of the open block; "" if none is open

    def feed(self, events: Iterable[ReplyEvent]) -> Iterator[bytes]:
        """Yield the events of the next pieces of the reply."""
        for one in events:
            match one:
                case ReasoningText(text):
                    yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    if self._shows_thinking:
                        yield self._delta(b"thinking_delta", b"thinking", text)
                case ContentText(text):
                    yield from self._open("text", {"type": "text", "text": ""})
                    yield self._delta(b"text_delta", b"text", text)
                case CallBegun(call, name, header):
                    yield from self.close()
                    yield from self._open("tool_use", _tool_use(self._call_id_of(call, header), name))
                case ArgumentText(_, text):
                    yield self._delta(b"input_json_delta", b"partial_json", text)
                case CallEnded():
                    yield from self.close()

    def close(self) -> Iterator[bytes]:
        """Yield the events that end the open block, if there is one."""
        if self._kind == "thinking":
            yield self._delta(b"signature_delta", b"signature", SIGNATURE)
        if self._kind:
            yield named_event("content_block_stop", index=self._index)
        self._kind = ""

    def _open(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events that begin a block of this type, unless one is open."""
        if self._kind == kind:
            return
        yield from self.close()
        self._index += 1
        self._kind = kind
        yield named_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: bytes, field: bytes, text: str) -> bytes:
        """Return the event of a piece of text; each token has one, so that only its text is encoded."""
        return event(
            b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}'
            % (self._index, kind, field, encode_json(text)),
            "content_block_delta",
        )


def named_event(kind: str, **fields: Any) -> bytes:
    """Return an event of this type."""
    return event(encode_json({"type": kind, **fields}), kind)
