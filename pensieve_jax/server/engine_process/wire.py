"""Frames: how a message becomes bytes on a stream, and how what comes in pieces becomes messages again.

Owns: the header, the limit of a frame, and what is said of bytes that are none.
Does not know: what messages there are, sockets, or who listens.

A frame is `MAGIC`, the length of what follows in four bytes, big-endian, and so many bytes of msgpack. The
magic makes noise an error at once: a length alone would have the reader wait for gigabytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from pensieve_jax.core.errors import PensieveError

MAGIC: Final = b"PJX1"
HEADER_BYTES: Final = 8
MAX_FRAME_BYTES: Final = 1 << 28
"""A prompt of 10 million ids takes a fifth of it."""
_HEADER = struct.Struct(">4sI")
_LIMIT: Final = "but must have at most "


class WireError(PensieveError):
    """What came over the socket is no message of the other side."""


class UnreadableError(WireError):
    """A whole frame is no message; those behind it can be read.

    Attributes:
      payload: what the frame holds.
    """

    def __init__(self, message: str, payload: bytes) -> None:
        """The message says what is wrong."""
        self.payload = payload
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (str(self), self.payload)


class FrameWriter:
    """Makes frames, each in one buffer."""

    def __init__(self) -> None:
        """Of any values that msgspec can encode."""
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: Any) -> bytearray:
        """A message with its header; raises WireError for one that is too long or holds what cannot cross."""
        buffer = bytearray(HEADER_BYTES)
        try:
            self._encoder.encode_into(message, buffer, HEADER_BYTES)
        except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
            raise WireError(f"A value of this kind cannot cross to the engine's process: {error}.") from error
        length = len(buffer) - HEADER_BYTES
        if length > MAX_FRAME_BYTES:
            raise WireError(f"A message has {length:,} bytes, {_LIMIT}{MAX_FRAME_BYTES:,}.")
        _HEADER.pack_into(buffer, 0, MAGIC, length)
        return buffer


class FrameReader:
    """Cuts a stream into messages of given types."""

    def __init__(self, types: Any) -> None:
        """`types`: tagged structs, or a union of them."""
        self._decoder = msgspec.msgpack.Decoder(types)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes.

        Raises WireError for what is none: UnreadableError where the next call goes on behind it.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER_BYTES:
                magic, length = _HEADER.unpack_from(buffer, start)
                if magic != MAGIC:
                    raise WireError(f"A frame begins with {bytes(magic)!r}, but must begin with {MAGIC!r}.")
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"A frame has {length:,} bytes, {_LIMIT}{MAX_FRAME_BYTES:,}.")
                end = start + HEADER_BYTES + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + HEADER_BYTES : end])
                start = end
                yield self._decode(payload)
        finally:
            del buffer[:start]

    def finish(self) -> None:
        """The stream has ended; raises WireError if that was in the middle of a frame."""
        if self._buffer:
            raise WireError(f"The stream ended in the middle of a frame, after {len(self._buffer):,} bytes.")

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnreadableError(f"A frame holds what is no message: {error}.", payload) from error
