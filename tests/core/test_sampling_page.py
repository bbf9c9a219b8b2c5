"""The page of sampling options, compared with the table that it describes."""

from __future__ import annotations

import re

from pensieve_jax.core.options import options_of
from pensieve_jax.core.sampling_params import (
    MESSAGES,
    RESPONSES,
    SamplingParams,
    sampling_table,
    taken_fields,
)
from tests.launching import ROOT

_WORDS = {"None": "none", "False": "false"}
PAGE = ROOT / "docs" / "sampling.md"


def lines_of_the_table() -> list[str]:
    """Return the rows of the page's table, from the fields that a choice or a text depends on."""
    found = []
    for option in options_of(SamplingParams):
        row = sampling_table()[option.name]
        if row.routes is None:
            continue
        default = {tuple: "none", dict: "none"}.get(option.default, option.default)
        taken = "yes" if RESPONSES in row.routes else "no"
        shown = _WORDS.get(str(default), default)
        found.append(f"| `{option.name}` | {shown} | {option.limit.words} | {taken} |")
    return found


def test_the_page_has_each_row_of_the_table_once() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = [line for line in page.split("\n") if line.startswith("| `")]
    assert sorted(found) == sorted(lines_of_the_table())


def test_the_page_names_the_fields_of_anthropics_route() -> None:
    page = PAGE.read_text(encoding="utf-8")
    (sentence,) = re.findall(r"Anthropic's Messages take\s(.*?)\.\n", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(taken_fields(MESSAGES))
