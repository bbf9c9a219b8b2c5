"""Files of rows: JSON lines, JSON arrays and CSV, plain or compressed. Each row knows its line.

Owns: opening by name (`.gz`), decoding, and typed access to a row's fields, whose errors name the file, the
line, the field and its limit.
Does not know: any trace format.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from pensieve_lab.workload.checks import is_count, is_number
from pensieve_lab.workload.errors import TraceError

_WHITESPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Row:
    """JSON object or CSV row of a file.

    Attributes:
      path: the file.
      line: line where the row begins, from 1.
      values: fields by name; fields that are not asked for are ignored.
      prefix: prefix of names in errors, for example "turns[2]." in a nested row.
      texts: fields of a CSV row as written in the file; empty for JSON, which has types.
    """

    path: Path
    line: int
    values: Mapping[str, object]
    prefix: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)

    def error(self, name: str, limit: str) -> TraceError:
        """Make the error for field `name`; `limit` completes "must be"."""
        named = self.prefix + name
        if name not in self.values:
            return TraceError(self.path, self.line, f"{named} is missing, but must be {limit}")
        shown = repr(self.values[name])
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return TraceError(self.path, self.line, f"{named} is {shown}, but must be {limit}")

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.values.get(name) is not None

    def name_of(self, *names: str) -> str:
        """Return the first of several spellings of a field that the row has, or the first spelling."""
        return next((name for name in names if name in self.values), names[0])

    def count(self, name: str, at_least: int = 1) -> int:
        """Return a field that must be an int of at least `at_least`."""
        value = self.values.get(name)
        if not is_count(value, at_least):
            raise self.error(name, f"an int of at least {at_least}")
        return value

    def time(self, name: str) -> float:
        """Return a field that must be a finite number, 0 or more, in the format's unit."""
        value = self.values.get(name)
        if not is_number(value) or value < 0:
            raise self.error(name, "a finite number, 0 or more")
        return float(value)

    def optional_time(self, name: str) -> float | None:
        """Return a time field that may be absent or null."""
        return self.time(name) if self.has(name) else None

    def text(self, name: str) -> str:
        """Return a field that must be a string, which may be empty."""
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def identifier(self, name: str) -> str:
        """Return an id, a non-empty string or an int, as a string; a CSV field as written."""
        # An id that looks like a number is not one: 007 and 7 are different, and 12e5 may be hexadecimal.
        value = self.texts.get(name, self.values.get(name))
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
        raise self.error(name, "a non-empty string or an int")

    def items(self, name: str, at_least: int = 0) -> list[object]:
        """Return a field that must be a list of at least `at_least` items."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) < at_least:
            raise self.error(name, f"a list of at least {at_least} items" if at_least else "a list")
        return value

    def rows(self, name: str, at_least: int = 0) -> Iterator[Row]:
        """Yield the objects of a field, which must be a list of objects, as rows."""
        for index, value in enumerate(self.items(name, at_least)):
            if not isinstance(value, dict):
                raise self.error(name, f"a list of objects; item {index} is not an object")
            yield Row(self.path, self.line, value, f"{self.prefix}{name}[{index}].")


class UniqueIds:
    """Ids found in a file so far, each with its line."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}

    def has(self, identifier: str) -> bool:
        """Return whether the id was found before."""
        return identifier in self._lines

    def add(self, row: Row, name: str) -> str:
        """Return the id in a field; raises TraceError if it was found before."""
        identifier = row.identifier(name)
        if identifier in self._lines:
            raise row.error(name, f"unique in the file; line {self._lines[identifier]} has it too")
        self._lines[identifier] = row.line
        return identifier


def write_text(path: Path, text: str) -> None:
    """Write a file, compressed if its name ends in `.gz`; equal texts make equal files."""
    data = text.encode()
    # By default an archive contains its creation time.
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def first_line(path: Path) -> str:
    """Return the first line that is not blank, stripped; empty if there is no such line."""
    return next(filter(None, (line.strip() for line in text_lines(path))), "")


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file without loading it whole; TraceError names a line that is not UTF-8."""
    with _open(path) as file:
        yield from (_decode(path, data, line) for line, data in enumerate(file, start=1))


def read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a file: one array, one object per line, or one object over several lines."""
    first = first_line(path)
    if first.startswith("["):
        return read_json_array(path)
    if first == "{":  # the first line of an indented object
        return _read_json_object(path)
    return read_json_lines(path)


def read_json_lines(path: Path) -> Iterator[Row]:
    """Yield the JSON object of every line that is not blank, without loading the file whole."""
    for line, text in enumerate(text_lines(path), start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _not_json(path, line, error) from error
        yield _object_row(path, line, value)


def read_json_array(path: Path) -> Iterator[Row]:
    """Yield the objects of one JSON array, decoded one by one: such files have hundreds of megabytes."""
    text = _read_text(path)
    decoder = json.JSONDecoder()
    position = _skip_whitespace(text, 0)
    if text[position : position + 1] != "[":
        raise TraceError(path, 1, "must be a JSON array of conversations")
    line, counted = 1, 0
    end = _skip_whitespace(text, position + 1)
    while text[end : end + 1] != "]":
        position = _skip_whitespace(text, position + 1)
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            line = error.lineno if isinstance(error, json.JSONDecodeError) else line
            raise _not_json(path, line, error) from error
        yield _object_row(path, line, value)
        position = end = _skip_whitespace(text, end)
        if text[end : end + 1] not in ("]", ","):
            line += text.count("\n", counted, end)
            raise TraceError(path, line, 'is not JSON (expected "," or "]" after a conversation)')
    rest = _skip_whitespace(text, end + 1)
    if rest != len(text):
        raise TraceError(path, text.count("\n", 0, rest) + 1, "has more after the end of its JSON array")


def read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows under a header line without loading the file whole: such files have millions of rows.

    Values that parse as numbers become numbers, empty values None, all others strings; ids stay as written.
    """
    reader = csv.reader(text_lines(path))
    try:
        header = next(filter(None, reader), [])
        for values in reader:
            if not values:
                continue
            if len(values) != len(header):
                reason = f"has {len(values)} values, but must have {len(header)}, as the header"
                raise TraceError(path, reader.line_num, reason)
            texts = dict(zip(header, values, strict=True))
            fields = {name: _parse_value(text) for name, text in texts.items()}
            yield Row(path, reader.line_num, fields, texts=texts)
    except csv.Error as error:
        raise TraceError(path, reader.line_num, f"is not CSV ({error})") from error


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress it if needed; iteration ends lines only at line feeds."""
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as archive:
            yield cast(BinaryIO, archive)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(path, None, f"is not a whole gzip archive ({error})") from error


def _read_json_object(path: Path) -> Iterator[Row]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise _not_json(path, line, error) from error
    yield _object_row(path, 1, value)


def _read_text(path: Path) -> str:
    with _open(path) as file:
        return _decode(path, file.read(), 1)


def _decode(path: Path, data: bytes, line: int) -> str:
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise TraceError(path, line, f"is not UTF-8 ({error.reason})") from error


def _not_json(path: Path, line: int, error: Exception) -> TraceError:
    # The error's own text is not used, because it counts lines differently.
    where = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else f"{error}"
    return TraceError(path, line, f"is not JSON ({where})")


def _object_row(path: Path, line: int, value: object) -> Row:
    if not isinstance(value, dict):
        raise TraceError(path, line, f"holds a {type(value).__name__}, but must hold a JSON object")
    return Row(path, line, value)


def _skip_whitespace(text: str, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    return match.end() if match else position


def _parse_value(text: str) -> object:
    if not text:
        return None
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text
