"""Product pages stay within the limits of length and of tables that CONTRIBUTING.md gives."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAX_WORDS, MAX_README_WORDS, MAX_ROWS, MAX_COLUMNS = 2500, 700, 12, 6


def findings(text: str, max_words: int) -> list[str]:
    """Return what is over a limit: the words of a page, or rows and columns of a table by its first line."""
    found = [f"{num} words" for num in [len(text.split())] if num > max_words]
    table: list[str] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if line.startswith("|"):
            table.append(line)
        elif table:
            num_rows, num_columns = len(table) - 2, table[1].count("|") - 1
            if num_rows > MAX_ROWS or num_columns > MAX_COLUMNS:
                found.append(f"line {number - len(table)}: {num_rows} rows, {num_columns} columns")
            table = []
    return found


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.name if page.parent == ROOT else f"docs/{page.name}"
)
def test_a_page_is_short(page: Path) -> None:
    max_words = MAX_README_WORDS if page.parent == ROOT else MAX_WORDS
    assert not findings(page.read_text(encoding="utf-8"), max_words)


def test_more_words_rows_and_columns_are_found() -> None:
    rows = "| 1 | 2 |\n| - | - |\n" + "| a | b |\n" * 12
    assert not findings(rows, 200) and findings("one two three", 2) == ["3 words"]
    assert findings(f"text\n{rows}| a | b |\n", 200) == ["line 2: 13 rows, 2 columns"]
    assert findings("|" + "a|" * 7 + "\n|" + "-|" * 7 + "\n", 200) == ["line 1: 0 rows, 7 columns"]
