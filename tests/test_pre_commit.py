"""`.pre-commit-config.yaml`: hooks run tools that exist, and subjects are refused by the rules."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CONFIG = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
HOOKS: dict[str, dict[str, Any]] = {hook["id"]: hook for hook in CONFIG["repos"][0]["hooks"]}


def test_hooks_are_local_and_use_the_tools_of_make_lint() -> None:
    assert [repository["repo"] for repository in CONFIG["repos"]] == ["local"], "others need a network"
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    for name in ("ruff", "ruff-format", "prose"):
        program, *arguments = HOOKS[name]["entry"].split()
        assert f"$(BIN)/{program.removeprefix('.venv/bin/')} {arguments[0]}" in lint
        assert all((ROOT / one).is_file() for one in arguments if one.startswith("scripts/"))


def test_the_development_tools_have_pre_commit() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any(one.startswith("pre-commit") for one in project["optional-dependencies"]["dev"])


@pytest.mark.parametrize(
    ("message", "is_refused"),
    [
        ("cache: treat a fork source as active\n\nThe body: any words.\n", False),
        ("pensieve_jax/cache: move a file\n", False),
        ("Merge branch 'docs'\n", False),
        ("cache: " + "x" * 65, False),
        ("cache: " + "x" * 66, True),
        ("Treat a fork source as active\n", True),
        ("Treat a fork source as active\n\ncache: it was not\n", True),
    ],
)
def test_subjects(message: str, is_refused: bool) -> None:
    hook = HOOKS["subject"]
    assert hook["language"] == "pygrep" and hook["args"] == ["--multiline"]
    # As pre-commit compiles it.
    assert bool(re.search(hook["entry"].encode(), message.encode(), re.MULTILINE | re.DOTALL)) == is_refused
