"""Each Python and shell block of the product's pages is run by a test or script, or listed with a reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LISTS = tomllib.loads((ROOT / "lab" / "sources" / "code_blocks.toml").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
REASONS = {"network", "service", "gpu", "long", "server", "placeholder"}


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    """Return all blocks whose language is Python or a shell's."""
    return [
        Block(path.relative_to(ROOT).as_posix(), language, text)
        for path in PAGES
        for language, text in re.findall(
            r"^```(python|sh|bash|console)\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE
        )
    ]


def is_run(block: Block) -> bool:
    if block.language == "python":
        return block.page in LISTS["python"]
    if block.page == LISTS["script"]["page"]:
        return True
    return "curl " in block.text and LISTS["curl"]["address"] in block.text


def entries_of(block: Block) -> list[dict[str, str]]:
    return [
        one
        for one in LISTS["not_run"]
        if one["page"] == block.page and block.text.startswith(one["begins"]) and block.language != "python"
    ]


def test_each_block_is_run_or_listed_once() -> None:
    found = blocks()
    assert {block.language for block in found} == {"python", "sh"}
    wrong = [block for block in found if len(entries_of(block)) != (not is_run(block))]
    assert not wrong, "name a test that runs it, or a reason, in lab/sources/code_blocks.toml"


def test_each_entry_has_a_block_and_a_reason() -> None:
    found = [one for block in blocks() for one in entries_of(block)]
    assert len(found) == len(LISTS["not_run"]) and all(one["reason"] in REASONS for one in LISTS["not_run"])
    assert set(LISTS["python"]) == {block.page for block in blocks() if block.language == "python"}


def test_each_test_reads_its_page() -> None:
    for page, test in LISTS["python"].items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), test
    assert "curl" in (ROOT / LISTS["curl"]["test"]).read_text(encoding="utf-8")
    assert LISTS["script"]["page"] in (ROOT / LISTS["script"]["script"]).read_text(encoding="utf-8")
