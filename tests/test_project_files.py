"""Files that hosts of repositories read: citation, security policy, and templates of issues."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
FORMS = sorted(path for path in TEMPLATES.glob("*.yml") if path.name != "config.yml")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_names_the_papers() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["title"] == "pensieve-jax"
    found = {paper["title"].split()[-1].strip(): paper["year"] for paper in citation["references"]}
    assert found == {"Pensieve": 2025, "batching": 2018, "Re-batching": 2024, "Scheduling": 2024}
    assert all(paper["authors"] for paper in citation["references"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_github_requires(path: Path) -> None:
    form = load(path)
    assert form["name"] and form["description"] and form["labels"]
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert ids and len(ids) == len(set(ids))
    assert all(part["attributes"].get("label") for part in form["body"] if part["type"] != "markdown")


def test_links_of_the_security_policy_lead_to_files() -> None:
    page = ROOT / "SECURITY.md"
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert links and all((page.parent / link).exists() for link in links)
