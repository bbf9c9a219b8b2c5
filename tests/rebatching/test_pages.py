"""The Python of docs/rebatching.md runs, and prints what the comments say."""

from __future__ import annotations

import re

import pytest

from tests.launching import ROOT

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = [
    block
    for block in _BLOCK.findall((ROOT / "docs" / "rebatching.md").read_text(encoding="utf-8"))
    if "rebatching" in block
]


@pytest.mark.long
@pytest.mark.parametrize("block", BLOCKS)
def test_python_of_the_pages(block, capsys):
    """The comment after a print is its output."""
    exec(compile(block, "page", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    expected = re.findall(r"print\(.*\)  # (.+)$", block, re.MULTILINE)
    assert printed[: len(expected)] == expected or not expected
