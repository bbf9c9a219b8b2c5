"""The page of sampling options, compared with the table that it describes."""

from __future__ import annotations

from pensieve_jax.core.options import options_of
from pensieve_jax.core.sampling_params import RESPONSES, SamplingParams, sampling_table
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


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    expected = "\n".join(lines_of_the_table())
    assert expected in page, expected
