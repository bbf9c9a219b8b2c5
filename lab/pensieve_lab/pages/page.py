"""Parser of documentation pages: the figures (numbers) that a page shows, and where.

Owns: the definition of a figure. A number is one, also with a unit (`5ms`, `3x`). Numbers in words count if
the caller asks for them (`number_words`). Digits in names (`H200`, `Llama-2-13B`, `13B`, `float32`, `99th`,
`10b`), addresses and settings of commands do not count. In code, only output counts: comments and blocks
without a language, and within a sentence numbers after `=` or on their own.
Does not know: where figures come from.
Called by `pages.sources`, `programs.check_numbers` and `programs.refresh_pages`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pensieve_lab.pages import number_words

WordsIn = Literal["page", "lead", ""]  # where numbers in words count: see `read_page`
WRITTEN = ("paper_and_we.md", "recorded_traces.md", "simulator_errors.md", "cells_figures.md", "balance.md")
"""Pages of `lab/docs/` with tables that `refresh_pages.py` generates; a test compares them."""

_UNIT = r"[^\W\d_]"
_BEHIND_UNIT = "|".join(  # the start of a second number, as in `5ms-9 ms`: lookbehinds have fixed widths
    rf"(?<=\d{space}{first}{rest}-)"
    for space, first in (("", r"[^\W\d_a-dB]"), (" ", _UNIT))
    for rest in ("", _UNIT, _UNIT * 2)
)
_NUMBER = re.compile(
    rf"(?<![\w.,#])(?:(?<![A-Za-z][-.])|{_BEHIND_UNIT})(?P<sign>(?<![\w)%])[-+\u2212])?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d++)(?:\.\d+)*+(?:e[-+]?\d+)?)"
    r"(?:(?!\w)|(?!(?:st|nd|rd|th|[a-d]|B)\b)(?=[^\W\d_]+(?!\w)))"  # a unit may follow, but no name
)
_BULLET = re.compile(r"\s*([-*]|\d+\.) ")
_HEADING = re.compile(r"#{1,6} (.*)")
_CODE = re.compile(r"`[^`]*`")
_TITLE = r"\"[^\"]*\"|'[^']*'"
_ATTRIBUTE = rf"\s+[A-Za-z_:][\w.:-]*(?:\s*=\s*(?:{_TITLE}|[^\s\"'=<>`]+))?"
_HIDDEN = re.compile(  # addresses, comments and tags of Markdown, but not "< 5 ms and > 3"
    rf"\]\([^()\s]*(?:\s+(?:{_TITLE}))?\)|https?://[^\s<>]+"
    rf"|<!--.*?-->|</[A-Za-z][A-Za-z0-9-]*\s*>|<[A-Za-z][A-Za-z0-9-]*(?:{_ATTRIBUTE})*\s*/?>"
)
_SETTING = re.compile(r"--\w+(?:=\S+)?|\b[A-Z][A-Z_]+=\S+")
_PRINTED = re.compile(r"(?:(?<=[=:] )|(?<=[=` ]))[-+]?\d[\d,]*(?:\.\d+)?(?=[`\s%;]|[.,](?!\d))")
_TABLE_MARK = re.compile(r"<!-- table (\S+) -->|.*<!-- end -->.*")
_COMMENTS = {
    **dict.fromkeys(("sh", "python", "toml", "yaml", "nginx"), "#"),
    **dict.fromkeys(("js", "ts", "javascript", "typescript"), "//"),
    **dict.fromkeys(("json", "sql", "html", "mermaid"), None),
}
"""Comment prefix by a code block's language; None if no text counts. In other blocks, all text counts."""


@dataclass(slots=True)
class Figure:
    """A shown number and its source.

    Attributes:
      shown: the number with its sign and without thousands separators; words in lower case, with hyphens.
      start, end: position in its text.
      source: expression that computes it from a document, or why it needs no document; None if unknown.
      value: value of that expression.
      is_prose: whether it needs no document.
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
      heading: heading of its section.
      line: number of its first line.
      text: the text with `#` for the digits of names in code, settings and addresses.
      label: the text as written, without backticks.
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
    """All texts of a page in order, including table cells, and the tables that are not generated."""

    name: str
    texts: list[Text] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def figures(self) -> Iterator[tuple[Text, Figure]]:
        """All figures with their texts, in order."""
        return ((text, figure) for text in self.texts for figure in text.figures)


def masked(text: str) -> str:
    """Return the text on one line, with `#` for the digits of names in code, of settings and of addresses."""
    hidden = _HIDDEN.sub(_without_digits, _CODE.sub(_hide_names, text))
    return " ".join(hidden.split())


def _without_digits(match: re.Match[str]) -> str:
    return re.sub(r"\d", "#", match[0])


def _hide_names(code: re.Match[str]) -> str:
    """Replace all digits except those of printed numbers by `#`."""
    text = _SETTING.sub(_without_digits, code[0])
    printed = {place for found in _PRINTED.finditer(text) for place in range(*found.span())}
    return "".join("#" if c.isdigit() and place not in printed else c for place, c in enumerate(text))


def read_page(path: Path, name: str, *, is_written: bool = False, words: WordsIn = "") -> Page:
    """Read texts and tables.

    Args:
      is_written: whether tables between marks are generated; then the script is the source of their figures.
      words: where numbers in words are figures: "page", "lead" (before the second heading), or "" (nowhere).
    """
    return _Reader(name, is_written=is_written, words=words).read(path.read_text(encoding="utf-8"))


class _Reader:
    """Parser that reads a page line by line."""

    def __init__(self, name: str, *, is_written: bool, words: WordsIn) -> None:
        self._page = Page(name)
        self._words = words
        self._is_written = is_written
        self._heading = ""
        self._paragraph: list[str] = []
        self._first_line = 0
        self._table: Table | None = None
        self._writer: str | None = None

    def read(self, source: str) -> Page:
        language: str | None = None
        for number, line in enumerate(source.splitlines(), 1):
            stripped = line.strip()
            if stripped.startswith("```"):
                self._end_paragraph()
                language = stripped[3:] if language is None else None
            elif self._is_written and (written := _TABLE_MARK.fullmatch(line)):
                self._end_paragraph()
                self._writer = written[1] and f"table {written[1]} of pensieve_lab.programs.refresh_pages"
            elif language is not None or (line.startswith("    ") and not self._paragraph):
                self._code(line, language or "", number)
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
            if self._words == "lead" and not line.startswith("# "):
                self._words = ""
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

    def _code(self, line: str, language: str, number: int) -> None:
        """Add a line of a code block: its comment, or all of it if the block is output."""
        text = _SETTING.sub(_without_digits, line)
        if language in _COMMENTS:
            mark = _COMMENTS[language]
            comment = mark and re.search(rf"(?:^|\s){mark} ", text)
            text = text[comment.start() :] if comment else ""
        if any(c.isdigit() for c in text):
            self._text(text.replace("`", ""), number)

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
        if self._words:
            found_words = [Figure(*found, source=self._writer) for found in number_words.find(shown)]
            figures = sorted([*figures, *found_words], key=lambda figure: figure.start)
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
