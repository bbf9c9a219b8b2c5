"""Frames, which encode messages as bytes of a stream, and their reader and writer.

Owns: the header, the size limit of a frame, and the errors for invalid bytes.
Does not know: the messages, sockets, or the receiver.

A frame is `MAGIC`, a big-endian length in four bytes, and that many bytes of msgpack. The magic detects
invalid data at once. With a length alone, a reader could wait for gigabytes.
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
"""Size limit of a frame. A prompt of 10 million ids takes a fifth of it."""
_HEADER = struct.Struct(">4sI")
_LIMIT: Final = "but must have at most "


class WireError(PensieveError):
    """The socket delivered invalid data, or a message cannot be sent over it."""


class UnreadableError(WireError):
    """A complete frame does not contain a valid message. The frames after it can still be read.

    Attributes:
      payload: the content of the frame.
    """

    def __init__(self, message: str, payload: bytes) -> None:
        """Keep `payload` beside the message, which says what is wrong."""
        self.payload = payload
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the constructor's arguments, since `args` holds the message only."""
        return type(self), (str(self), self.payload)


class FrameWriter:
    """Encoder that turns messages into frames."""

    def __init__(self) -> None:
        """Encode any value that msgspec can encode."""
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: Any) -> bytearray:
        """Return header and message in one buffer.

        Raises WireError for a message that is too long or contains a value that cannot be sent.
        """
        buffer = bytearray(HEADER_BYTES)
        try:
            self._encoder.encode_into(message, buffer, HEADER_BYTES)
        except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
            raise WireError(f"A value of this kind cannot be sent to the engine: {error}.") from error
        length = len(buffer) - HEADER_BYTES
        if length > MAX_FRAME_BYTES:
            raise WireError(f"A message has {length:,} bytes, {_LIMIT}{MAX_FRAME_BYTES:,}.")
        _HEADER.pack_into(buffer, 0, MAGIC, length)
        return buffer


class FrameReader:
    """Decoder that splits a stream into messages."""

    def __init__(self, types: Any) -> None:
        """Decode messages of `types`, a tagged struct or a union of them."""
        self._decoder = msgspec.msgpack.Decoder(types)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes.

        Raises WireError for invalid data. If it is UnreadableError, the next call continues after that frame.
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
        """Check the end of the stream; raises WireError if it is in the middle of a frame."""
        if self._buffer:
            raise WireError(f"The stream ended in the middle of a frame, after {len(self._buffer):,} bytes.")

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnreadableError(f"A frame does not contain a valid message: {error}.", payload) from error
