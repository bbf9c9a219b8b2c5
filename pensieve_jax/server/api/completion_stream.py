"""Chunks of streamed completions, written without an encoder's way through objects.

Owns: the form of chunks that Chat Completions and Completions share.
Does not know: what a choice is made of; each API writes its own.
Called by: `chat`, `completions`.

A delta is a few bytes of text in a frame that is the same for all chunks of a stream, so the frame is encoded
once.
"""

from __future__ import annotations

from typing import Any

from pensieve_jax.server.http.replies import encode_json
from pensieve_jax.server.http.sse import event


class ChunkFrame:
    """The frame of one stream's chunks."""

    def __init__(self, fields: dict[str, Any], *, includes_usage: bool) -> None:
        """`fields` are those of every chunk beside its choices and its usage, at least one."""
        self._before = encode_json(fields)[:-1] + b',"choices":['
        self._after = b'],"usage":null}' if includes_usage else b"]}"

    def chunk(self, choice: bytes) -> bytes:
        """The event of one choice, which is JSON already."""
        return event(self._before + choice + self._after)

    def last(self, usage: dict[str, Any]) -> bytes:
        """The event without choices that says what was used."""
        return event(self._before + b'],"usage":' + encode_json(usage) + b"}")
