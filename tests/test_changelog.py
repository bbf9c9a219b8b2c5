"""`CHANGELOG.md`: releases are dated and in order, and the newest is the package's version."""

from __future__ import annotations

import datetime
import itertools
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASES: list[tuple[str, str]] = re.findall(r"^## (\S+) - (\S+)$", TEXT, re.MULTILINE)


def version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("."))


def test_every_section_is_a_dated_release_but_the_first() -> None:
    assert len(RELEASES) == len(re.findall(r"^## ", TEXT, re.MULTILINE)) >= 2
    dates = [datetime.date.fromisoformat(date) for _, date in RELEASES if date != "unreleased"]
    assert len(dates) >= len(RELEASES) - 1 and dates == sorted(dates, reverse=True)
    assert all(version(new) > version(old) for (new, _), (old, _) in itertools.pairwise(RELEASES))


def test_entries_stand_under_the_kinds_of_keep_a_changelog() -> None:
    kinds = re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        assert "\n- " not in section.partition("\n### ")[0]


def test_the_version_is_that_of_the_newest_section() -> None:
    name, date = RELEASES[0]
    expected = f"{name}.dev0" if date == "unreleased" else name
    for folder in (ROOT, ROOT / "lab"):
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["version"] == expected


def test_the_citation_is_of_the_newest_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    name, date = next((name, date) for name, date in RELEASES if date != "unreleased")
    assert (citation["version"], citation["date-released"]) == (name, datetime.date.fromisoformat(date))
