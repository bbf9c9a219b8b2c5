"""Paths of this repository that pages and sources name: each is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import PurePosixPath

import pytest

import conftest
from tests.launching import ROOT

FOLDERS = ("docs", "lab", "scripts", "tests", "pensieve_jax", "pallas_kernels", "model_defs", "deploy")
PATH = re.compile(rf"(?<![\w/.:-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
READ = (".md", ".py", ".toml", ".sh", ".yaml", ".yml", "Makefile")
# Files that name paths of older commits or made-up ones: the log, commands in result documents, and tests.
EXEMPT = (
    *("CHANGELOG.md", "lab/docs/renames.md", "lab/log/", "lab/results/", "lab/tests/", "tests/"),
    *(
        "lab/sources/removed.toml",
        "lab/sources/summary_only.toml",
        "lab/pensieve_lab/pages/result_documents.py",
    ),
)
PATTERN = ("*", "{", "$", "<")  # what follows the constant part of one
# Names for which CONTRIBUTING.md says what to put there, and a page as Sphinx names it.
EXAMPLES = {"tests/file.py", "docs/PAGE.md", "docs/site/index"}


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.split("\0")[:-1]


def with_folders(files: list[str]) -> set[str]:
    """Return the files and all folders above them."""
    return {str(part) for file in files for part in (PurePosixPath(file), *PurePosixPath(file).parents)}


def missing(text: str, known: set[str]) -> list[str]:
    """Return the paths in `text` that are neither a tracked file nor a folder of one, but for patterns."""
    found = {
        match.group() for match in PATH.finditer(text) if text[match.end() : match.end() + 1] not in PATTERN
    }
    # Commands of pages begin the names of result documents in shell variables.
    begun = {
        path
        for path in found
        if path.startswith("lab/results/") and any(one.startswith(path) for one in known)
    }
    return sorted(found - EXAMPLES - known - begun)


def test_paths_that_are_named_exist():
    files = tracked()
    known = with_folders(files)
    named = [file for file in files if file.endswith(READ) and not file.startswith(EXEMPT)]
    # Commands behind `git switch --detach` run in an older commit.
    texts = {file: (ROOT / file).read_text("utf-8").partition("git switch --detach")[0] for file in named}
    assert {file: gone for file, text in texts.items() if (gone := missing(text, known))} == {}


def test_a_path_that_is_gone_is_found():
    text = "See `docs/gone.md`, `pensieve_jax/cache/`, and lab/docs/steps.md."
    known = with_folders(["pensieve_jax/cache/manager.py", "lab/docs/steps.md"])
    assert missing(text, known) == ["docs/gone.md"]
    assert missing("`docs/steps.md`", known) == ["docs/steps.md"], "it is the lab's"
    assert missing("`lab/results/h200_*.json`", known) == []


def test_long_files_that_begin_first_exist():
    stems = {PurePosixPath(file).stem for file in tracked()}
    assert set(conftest._LONGEST) <= stems
