"""Frames, which encode messages as bytes of a stream, and their reader and writer.

Owns: the header, the size limit of a frame, and the errors for invalid bytes.
Does not know: the messages, sockets, or the receiver.

A frame is `MAGIC`, a big-endian length in four bytes, and that many bytes of msgpack. The magic detects
invalid data at once. With a length alone, a reader could wait for gigabytes. A long message can be sent in
parts, frames with other magics, and whole frames may stand between two parts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from pensieve_jax.core.errors import PensieveError

MAGIC: Final = b"PJX1"
_PART, _LAST_PART = b"PJXP", b"PJXE"
PART_BYTES: Final = 1 << 17
"""Size of a part of a message. A socket takes that many bytes at once."""
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

    def parts(self, message: Any) -> list[bytes | bytearray]:
        """Return the frames of a message's parts in order, or its only frame if it is short; see `frame`."""
        whole = self.frame(message)
        if len(whole) <= HEADER_BYTES + PART_BYTES:
            return [whole]
        payload = memoryview(whole)[HEADER_BYTES:]
        frames: list[bytes | bytearray] = []
        for begin in range(0, len(payload), PART_BYTES):
            part = payload[begin : begin + PART_BYTES]
            magic = _PART if begin + PART_BYTES < len(payload) else _LAST_PART
            frames.append(_HEADER.pack(magic, len(part)) + part)
        return frames


class FrameReader:
    """Decoder that splits a stream into messages."""

    def __init__(self, types: Any) -> None:
        """Decode messages of `types`, a tagged struct or a union of them."""
        self._decoder = msgspec.msgpack.Decoder(types)
        self._buffer = bytearray()
        self._parts = bytearray()  # of a message whose last part is missing

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
                if magic not in (MAGIC, _PART, _LAST_PART):
                    raise WireError(f"A frame begins with {bytes(magic)!r}, but must begin with {MAGIC!r}.")
                num_bytes = length if magic == MAGIC else length + len(self._parts)
                if num_bytes > MAX_FRAME_BYTES:
                    raise WireError(f"A frame has {num_bytes:,} bytes, {_LIMIT}{MAX_FRAME_BYTES:,}.")
                end = start + HEADER_BYTES + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + HEADER_BYTES : end])
                start = end
                if magic != MAGIC:
                    self._parts += payload
                    if magic == _PART:
                        continue
                    payload, self._parts = bytes(self._parts), bytearray()
                yield self._decode(payload)
        finally:
            del buffer[:start]

    def finish(self) -> None:
        """Check the end of the stream; raises WireError if it is in the middle of a frame or a message."""
        if self._buffer:
            raise WireError(f"The stream ended in the middle of a frame, after {len(self._buffer):,} bytes.")
        if self._parts:
            raise WireError(f"The stream ended in the middle of a message, after {len(self._parts):,} bytes.")

    def _decode(self, payload: bytes) -> Any:
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UnreadableError(f"A frame does not contain a valid message: {error}.", payload) from error
