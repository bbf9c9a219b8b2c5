"""A page as its figures: which numbers it shows, and where.

Owns: what counts as a figure. Names do not (`H200`, `Llama-2-13B`, `float32`, `99th`), nor does what stands
in code, addresses and fenced blocks; everything else does, in headings too.
Does not know: where figures come from. Called by: `sources`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WRITTEN = ("paper_and_we.md", "traces.md", "simulator.md", "cells_figures.md", "balance.md")
"""Pages of `docs/` with tables that `refresh_pages.py` writes, and its test compares."""

_NUMBER = re.compile(
    r"(?<![\w.,#])(?<![A-Za-z][-.])(?P<sign>(?<![\w)])[-+\u2212])?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)*(?:e[-+]?\d+)?)(?!\w)"
)
_HEADING = re.compile(r"#{1,6} (.*)")
_HIDDEN = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|https?://\S+")
_TABLE_MARK = re.compile(r"<!-- (?:table (\S+)|end) -->")
_BULLET = re.compile(r"\s*([-*]|\d+\.) ")


@dataclass(slots=True)
class Figure:
    """A number as it is shown, and who answers for it.

    Attributes:
      shown: with its sign, without the commas of thousands.
      start, end: where it stands in its text.
      source: what it was computed from, or why it needs no document; None as long as nobody has said.
      value: what its source comes to.
      is_prose: it needs no document.
    """

    shown: str
    start: int
    end: int
    source: str | None = None
    value: float | None = None
    is_prose: bool = False


@dataclass(slots=True)
class Text:
    """A paragraph, a heading or a table's cell, with its figures.

    Attributes:
      heading: of its section.
      line: its first.
      text: with the digits of code and addresses as `#`.
      label: as it is written, but for the ticks of code.
    """

    heading: str
    line: int
    text: str
    label: str
    figures: list[Figure]


@dataclass(slots=True)
class Table:
    """A table: the texts of its cells by row, and the headers of its columns."""

    heading: str
    line: int
    headers: list[str]
    rows: list[list[Text]] = field(default_factory=list)


@dataclass(slots=True)
class Page:
    """All texts of a page in order, those of tables included, and the tables that no script writes."""

    name: str
    texts: list[Text] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def figures(self) -> Iterator[tuple[Text, Figure]]:
        """All figures, in order."""
        return ((text, figure) for text in self.texts for figure in text.figures)


def masked(text: str) -> str:
    """The text with the digits of code and addresses as `#`, on one line."""
    hidden = _HIDDEN.sub(lambda found: re.sub(r"\d", "#", found[0]), text)
    return " ".join(hidden.split())


def read_page(path: Path, name: str, *, is_written: bool = False) -> Page:
    """Texts and tables; `is_written`: those between marks are a script's, which answers for them."""
    return _Reader(name, is_written=is_written).read(path.read_text(encoding="utf-8"))


class _Reader:
    """Goes through a page line by line."""

    def __init__(self, name: str, *, is_written: bool) -> None:
        self._page = Page(name)
        self._is_written = is_written
        self._heading = ""
        self._paragraph: list[str] = []
        self._first_line = 0
        self._table: Table | None = None
        self._writer: str | None = None

    def read(self, source: str) -> Page:
        in_fence = False
        for number, line in enumerate(source.splitlines(), 1):
            stripped = line.strip()
            if stripped.startswith("```"):
                self._end_paragraph()
                in_fence = not in_fence
            elif self._is_written and (written := _TABLE_MARK.fullmatch(stripped)):
                self._end_paragraph()
                self._writer = written[1] and f"table {written[1]} of scripts/refresh_pages.py"
            elif in_fence or (line.startswith("    ") and not self._paragraph):
                continue
            elif stripped.startswith("|"):
                self._end_paragraph()
                self._row(stripped, number)
            else:
                self._prose(line, stripped, number)
        self._end_paragraph()
        return self._page

    def _prose(self, line: str, stripped: str, number: int) -> None:
        self._table = None
        heading = _HEADING.match(line)
        if not stripped or heading or _BULLET.match(line):
            self._end_paragraph()
        if heading:
            self._heading = heading[1]
            self._text(heading[1], number)
        elif stripped:
            if not self._paragraph:
                self._first_line = number
            self._paragraph.append(stripped)

    def _end_paragraph(self) -> None:
        if self._paragraph:
            self._text(" ".join(self._paragraph), self._first_line)
        self._paragraph = []

    def _text(self, text: str, line: int) -> Text:
        shown = masked(text)
        figures = [
            Figure(
                (found["sign"] or "").replace("\u2212", "-") + found["digits"].replace(",", ""),
                *found.span(),
                source=self._writer,
            )
            for found in _NUMBER.finditer(shown)
        ]
        self._page.texts.append(Text(self._heading, line, shown, text.replace("`", ""), figures))
        return self._page.texts[-1]

    def _row(self, line: str, number: int) -> None:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if self._table is None:
            self._table = Table(self._heading, number, [cell.replace("`", "") for cell in cells])
            if self._writer is None:
                self._page.tables.append(self._table)
            for cell in cells:
                self._text(cell, number)
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            self._table.rows.append([self._text(cell, number) for cell in cells])
