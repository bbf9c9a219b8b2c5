"""Sources of a page's figures: a table of sources beside the page, and its check.

Owns: the format of `lab/sources/<page>.toml`, described in CONTRIBUTING.md, and the comparison: a figure is
right if the value of its expression, rounded to the shown digits, equals the shown number.
Does not know: how figures are found on a page (`page`) or expressions evaluated (`expressions`).
Called by `programs.check_numbers`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pensieve_lab.pages import kinds, number_words
from pensieve_lab.pages.expressions import Documents, ExpressionError, names_of
from pensieve_lab.pages.page import Figure, Page, Table, Text, masked

_HOLE = re.compile(r"\{([^{}]*)\}")
_SHOWN = rf"([-+\u2212]?[\d,]+(?:\.\d+)?(?:e[-+]?\d+)?|{number_words.PATTERN})"
FRONT_PAGE = "README.md"
_KEYS = {"documents", "table", "sentence", "prose"}


def check_page(page: Page, sources: Path, documents: Documents, root: Path | None = None) -> list[str]:
    """Give every figure its source; return the errors. Named tests are looked up in `root`."""
    try:
        entries = tomllib.loads(sources.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        return [f"{page.name}: {sources.name}: {error}"]
    if unknown := set(entries) - _KEYS:
        return [f"{page.name}: sources have unknown keys {sorted(unknown)}"]
    checker = _Checker(page, documents, entries.get("documents", {}), root)
    for entry in entries.get("table", []):
        checker.guarded(checker.table, entry)
    for entry in entries.get("sentence", []):
        checker.guarded(checker.sentence, entry)
    for entry in entries.get("prose", []):
        checker.guarded(checker.prose, entry)
    checker.find_unsourced()
    return checker.errors


def is_shown(value: Any, shown: str) -> bool:
    """Return whether the value is shown, rounded as Python does, or matches the words."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if number_words.worth(shown) is not None:
        return number_words.is_about(value, shown)
    mantissa, _, exponent = shown.lstrip("+").partition("e")
    num_decimals = len(mantissa.partition(".")[2])
    return f"{value:.{num_decimals}{'e' if exponent else 'f'}}" == shown.lstrip("+")


class _Checker:
    """Check of one page's figures against one table of sources."""

    def __init__(self, page: Page, documents: Documents, names: Mapping[str, str], root: Path | None) -> None:
        self.errors: list[str] = []
        self._root = root
        self._front_page_kinds: set[tuple[str, str]] = set()
        self._page = page
        self._documents = documents
        self._names: dict[str, Any] = {}
        for name, path in names.items():
            self.guarded(self._bind, {"name": name, "path": path})

    def guarded(self, check: Any, entry: dict[str, Any]) -> None:
        """Run `check`; report an unusable entry as an error of the page."""
        try:
            check(entry)
        except (ExpressionError, KeyError) as error:
            self.errors.append(f"{self._page.name}: {_brief(entry)}: {error}")

    def _bind(self, entry: dict[str, Any]) -> None:
        self._names[entry["name"]] = self._documents.read(entry["path"])

    def _claim(self, text: Text, figure: Figure, expression: str, names: Mapping[str, Any]) -> None:
        value = self._documents.value(expression, {**self._names, **names})
        if self._page.name == FRONT_PAGE and not names_of(expression) & {*self._names, "document"}:
            self._report(text, f"{figure.shown} is of {expression}, which reads no document")
        if figure.source is not None:
            self._report(text, f"{figure.shown} has two sources: {figure.source} and {expression}")
        figure.source, figure.value = expression, value
        if not is_shown(value, figure.shown):
            self._report(text, f"shows {figure.shown}, but {expression} is {value!r}")

    def _report(self, text: Text, what: str) -> None:
        self.errors.append(f"{self._page.name}:{text.line}: {what}")

    # Tables

    def table(self, entry: dict[str, Any]) -> None:
        """Check a table; expressions stand for columns (with `row`) or rows (with `column`)."""
        table = self._find_table(entry)
        headers = table.headers
        key = headers.index(entry["key"]) if "key" in entry else 0
        of_rows, of_columns = entry.get("rows", {}), entry.get("columns", {})
        labels = [cells[key].label for cells in table.rows]
        by_column, by_row = entry.get("each_column", {}), entry.get("each_row", {})
        self._check_known("columns", {*of_columns, *by_column}, headers)
        self._check_known("rows", {*of_rows, *by_row}, labels)
        for number, (label, cells) in enumerate(zip(labels, table.rows, strict=True)):
            for header, cell in zip(headers, cells, strict=True):
                found = by_row.get(label) if header in of_columns or not of_columns else None
                if header in by_column and (not of_rows or label in of_rows):
                    found = by_column[header]
                if found is not None and cell.figures and cell is not cells[key]:
                    names = {"label": label, "header": header, "number": number}
                    row = self._bound(of_rows.get(label, entry.get("row", label)), names)
                    column = self._bound(of_columns.get(header, entry.get("column", header)), names)
                    self._cell(cell, found, {**names, "row": row, "column": column})

    def _bound(self, binding: Any, names: Mapping[str, Any]) -> Any:
        """Return a binding's value: that of an expression if it begins with `=`, otherwise itself."""
        if isinstance(binding, str) and binding.startswith("="):
            return self._documents.value(binding[1:], {**self._names, **names})
        return binding

    def _cell(self, cell: Text, sources: str | list[str], names: Mapping[str, Any]) -> None:
        expressions = [sources] if isinstance(sources, str) else sources
        for figure, expression in zip(cell.figures, expressions, strict=False):
            if expression:
                self._claim(cell, figure, expression, names)

    def _find_table(self, entry: dict[str, Any]) -> Table:
        tables = [table for table in self._page.tables if table.heading == entry["heading"]]
        number = entry.get("number", 1)
        if not 1 <= number <= len(tables):
            raise ExpressionError(f"{len(tables)} tables stand under {entry['heading']!r}")
        return tables[number - 1]

    def _check_known(self, what: str, named: Iterable[str], known: list[str]) -> None:
        if missing := sorted(set(named) - set(known)):
            raise ExpressionError(f"the table has no {what} {missing}, but {known}")

    # Sentences

    def sentence(self, entry: dict[str, Any]) -> None:
        """Check a part of the page's text, with an expression in braces for each sourced figure."""
        piece = masked(_HOLE.sub("\0", entry["text"]))
        pattern = re.compile(_SHOWN.join(map(re.escape, piece.split("\0"))))
        found = [
            (text, match)
            for text in self._page.texts
            if entry.get("heading", text.heading) == text.heading
            for match in pattern.finditer(text.text)
        ]
        if len(found) != 1:
            raise ExpressionError(f"stands on the page {len(found)} times")
        text, match = found[0]
        for number, expression in enumerate(_HOLE.findall(entry["text"]), 1):
            figures = [f for f in text.figures if match.start(number) <= f.start < match.end(number)]
            if len(figures) != 1:
                raise ExpressionError(f"{match[number]!r} is not a figure")
            self._claim(text, figures[0], expression, {})

    # Prose

    def prose(self, entry: dict[str, Any]) -> None:
        """Accept a section's figures that need no document, in order, with the kind of the reason."""
        for problem in kinds.problems(entry, is_front_page=self._page.name == FRONT_PAGE):
            self.errors.append(f"{self._page.name}: {_brief(entry)}: {problem}")
        if self._page.name == FRONT_PAGE:
            self._check_once(entry)
        if "tested" in entry.get("kind", ""):
            self._check_test(entry["test"])
        if self._page.name == FRONT_PAGE and "setting" in entry.get("kind", ""):
            self._check_settings(entry["figures"].split())
        left = [
            figure
            for text, figure in self._page.figures
            if figure.source is None and text.heading == entry["heading"]
        ]
        remaining = iter(left)
        for shown in entry["figures"].split():
            figure = next((figure for figure in remaining if figure.shown == shown), None)
            if figure is None:
                without = " ".join(figure.shown for figure in left)
                raise ExpressionError(
                    f"the sources list {shown}, which is not there in this order: {without}"
                )
            figure.source, figure.is_prose = entry["reason"], True

    def _check_once(self, entry: dict[str, Any]) -> None:
        """Reject a second entry of a kind on the front page, which would allow the same figures twice."""
        key = (entry["heading"], str(entry.get("kind")))
        if key in self._front_page_kinds:
            raise ExpressionError(f"kind is {key[1]!r} a second time; join its figures into one entry")
        self._front_page_kinds.add(key)

    def _check_settings(self, figures: Iterable[str]) -> None:
        """Check that the settings on the front page are those of its documents."""
        known = {number for document in self._names.values() for number in kinds.settings_of(document)}
        if unknown := [shown for shown in figures if not shown.isalpha() and float(shown) not in known]:
            raise ExpressionError(f"{unknown[0]} is not a setting or flag of the page's documents")

    def _check_test(self, name: str) -> None:
        """Check that a test named by file and function, as in pytest, exists."""
        path, _, function = name.partition("::")
        file = self._root / path if self._root else None
        if file is None or not file.is_file() or f"def {function}(" not in file.read_text(encoding="utf-8"):
            raise ExpressionError(f"test is {name}; there is no such test")

    def find_unsourced(self) -> None:
        """Report each figure that no entry of the sources explains."""
        for text, figure in self._page.figures:
            if figure.source is None:
                self._report(text, f"{figure.shown} has no source: ...{_around(text, figure)}...")


def _around(text: Text, figure: Figure) -> str:
    return text.text[max(figure.start - 25, 0) : figure.end + 25]


def _brief(entry: Mapping[str, Any]) -> str:
    return str(entry.get("text") or entry.get("heading") or dict(entry))[:70]
