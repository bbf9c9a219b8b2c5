"""JSON of long values, encoded a little at a time.

Owns: long lists that are encoded while they are made, and the pieces of a value that holds them.
Does not know: what the values mean.

The encoder holds the interpreter's lock until it returns, so other threads would wait for it as long as it
takes to encode 40 megabytes. A thread that encodes small pieces lets them run between two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

_NUM_AT_ONCE: Final = 64  # entries of a list
_encode = msgspec.json.Encoder().encode


class EncodedList:
    """A list as JSON, in pieces."""

    def __init__(self, entries: Iterable[Any]) -> None:
        """Encode the entries, a few at a time."""
        given = iter(entries)
        self.pieces = [b"["]
        while some := list(itertools.islice(given, _NUM_AT_ONCE)):
            if len(self.pieces) > 1:
                self.pieces.append(b",")
            self.pieces.append(_encode(some)[1:-1])
        self.pieces.append(b"]")


def as_raw(value: object) -> msgspec.Raw:
    """Return an `EncodedList` as an encoder takes it; raise TypeError for any other value."""
    if isinstance(value, EncodedList):
        return msgspec.Raw(b"".join(value.pieces))
    raise TypeError(f"{type(value).__name__} has no JSON")


def json_pieces(value: Any) -> list[bytes]:
    """Return the JSON of a value in pieces, which were encoded one at a time.

    Lists and objects that hold an `EncodedList` must be lists and dicts.
    """
    return list(_parts(value))


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, EncodedList):
        yield from value.pieces
    elif isinstance(value, dict):
        before = b"{"
        for key, inner in value.items():
            yield before + _encode(key) + b":"
            yield from _parts(inner)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        before = b"["
        for inner in value:
            yield before
            yield from _parts(inner)
            before = b","
        yield b"]" if value else b"[]"
    else:
        yield _encode(value)
