"""The page's files: copies of other projects are unchanged, and nothing comes from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from pensieve_jax.server import page
from tests.launching import ROOT
from tests.server.fakes import Harness, ask

PAGE = resources.files("pensieve_jax.server.page")
VENDORED = [ROOT / name / "server" / "page" / "vendor" for name in ("pensieve_jax", "tests")]


@pytest.mark.parametrize("folder", VENDORED, ids=lambda folder: folder.relative_to(ROOT).parts[0])
def test_copies_of_other_projects_are_unchanged_and_have_their_licences(folder: Path) -> None:
    record = json.loads((folder / "vendored.json").read_text(encoding="utf-8"))
    listed = {"vendored.json"}
    for project in record:
        assert (
            project["source"].endswith(f"/{project['name']}-{project['version']}.tgz") and project["license"]
        )
        assert any(file["name"].startswith("LICENSE") for file in project["files"])
        for file in project["files"]:
            listed.add(file["name"])
            digest = hashlib.sha256((folder / file["name"]).read_bytes()).hexdigest()
            assert digest == file["sha256"], (
                f"{file['name']} differs from {file['path']} of {project['source']}"
            )
    assert {path.name for path in folder.iterdir()} == listed


def test_the_wheel_has_every_file_and_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["pensieve_jax"]
    folder = ROOT / "pensieve_jax" / "server" / "page"
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert len(files) > 20
    for path in files:
        inside = path.relative_to(ROOT / "pensieve_jax")
        matching = [one for one in patterns if inside.parent == Path(one).parent and inside.match(one)]
        assert matching, f"{inside} is in no wheel"
    licences = {str(path.relative_to(ROOT)) for path in files if path.name.startswith("LICENSE")}
    assert len(licences) == 2 and licences <= set(project["project"]["license-files"])


def test_nothing_is_loaded_from_elsewhere_or_written_as_html() -> None:
    for file in PAGE.iterdir():
        if file.name.endswith((".html", ".css", ".js")):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text), (
                file.name
            )
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", text.partition("<body>")[2]), (
                file.name
            )


def test_every_file_that_the_page_names_is_served_under_a_strict_policy() -> None:
    harness = Harness(page.ROUTES)
    named = {"/"}
    for file in PAGE.iterdir():
        if file.name.endswith((".html", ".js")):
            text = file.read_text(encoding="utf-8")
            named |= {f"/page/{name}" for name in re.findall(r'(?:from|import) "\./([^"]+)"', text)}
            named |= {f"/{name}" for name in re.findall(r'(?:src|href)="(page/[^"]+)"', text)}
    assert {"/page/vendor/marked.esm.js", "/page/vendor/purify.min.js", "/page/page.js"} <= named
    for path in named:
        status, _ = ask(harness, "GET", path)
        assert status == 200, path
    for path in ("/page/vendor/vendored.json", "/page/vendor/nothing.js", "/page/nothing.js"):
        assert ask(harness, "GET", path)[0] == 404
    policy = str(page._HEADERS["content-security-policy"])
    assert "unsafe" not in policy and "default-src 'self'" in policy and "require-trusted-types-for" in policy
