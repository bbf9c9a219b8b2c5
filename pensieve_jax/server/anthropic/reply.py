"""A reply in Anthropic's form: the message, and the events of a stream.

Owns: content blocks, stop reasons, usage, and the order of events.
Does not know: requests, or how turns run. Called by `anthropic.messages`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pensieve_jax.core.outputs import Output, Usage
from pensieve_jax.server.http.replies import encode_json, event
from pensieve_jax.server.turns.sampling import num_cached_tokens, num_context_tokens, token_sources

PING: Final = event(b'{"type":"ping"}', "ping")
"""What a silent stream sends."""
MESSAGE_STOP: Final = event(b'{"type":"message_stop"}', "message_stop")


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


def ending_of(output: Output, max_tokens: int) -> dict[str, Any]:
    """Return how a reply ended; `max_tokens` is the limit of its request."""
    if output.finish_reason == "length":
        is_full = output.usage.output_tokens < max_tokens  # the context ended it
        return NOT_ENDED | {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens"}
    if output.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_string}
    return NOT_ENDED | {"stop_reason": "end_turn"}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the usage object of a finished turn."""
    num_cached = num_cached_tokens(usage)
    return {
        **token_counts(num_context_tokens(usage) - num_cached, num_cached),
        "output_tokens": usage.output_tokens,
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


def content_of(text: str) -> list[dict[str, Any]]:
    """Return the content blocks of a whole reply; none for an empty one."""
    return [{"type": "text", "text": text}] if text else []


class BlockEvents:
    """The events of the content blocks of one streamed reply."""

    def __init__(self) -> None:
        """Start without a block."""
        self._index = -1

    def feed(self, text: str) -> Iterator[bytes]:
        """Yield the events of the next piece of text."""
        if not text:
            return
        if self._index < 0:
            self._index = 0
            yield named_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        yield event(
            b'{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}'
            % (self._index, encode_json(text)),
            "content_block_delta",
        )

    def end(self) -> Iterator[bytes]:
        """Yield the events of the reply's end."""
        if self._index >= 0:
            yield named_event("content_block_stop", index=self._index)


def named_event(kind: str, **fields: Any) -> bytes:
    """Return an event of this type."""
    return event(encode_json({"type": kind, **fields}), kind)
