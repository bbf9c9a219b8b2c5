"""`.github/workflows`: jobs run the make targets of `.ci/run`, installed in the same way."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RUN = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return workflow


CI = load(ROOT / ".github" / "workflows" / "ci.yml")


def steps(job: dict[str, Any], field: str) -> list[str]:
    return [step[field] for step in job["steps"] if field in step]


def test_the_targets_are_those_of_the_script() -> None:
    lines = re.findall(r"^make (?:--\S+ )*(.*) \|\| status", RUN, re.MULTILINE)
    assert CI["jobs"]["make"]["strategy"]["matrix"]["target"] == " ".join(lines).split()


def test_the_package_is_installed_as_by_the_script() -> None:
    installed = "\n".join(steps(CI["jobs"]["make"], "run"))
    (extras,) = re.findall(r"make setup (EXTRAS=\S+ LAB_EXTRAS=\S+)", RUN)
    assert extras in installed
    assert all("jax-cuda13-plugin==$jaxlib" in text for text in (RUN, installed))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_may_only_read_and_has_the_oldest_python_and_a_limit(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        (python,) = (one["python-version"] for one in steps(job, "with") if "python-version" in one)
        assert project["requires-python"] == f">={python}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_target_that_a_job_makes_exists(path: Path) -> None:
    commands = "\n".join(run for job in load(path)["jobs"].values() for run in steps(job, "run"))
    made = set(re.findall(r"^\s*make ([a-z-]+)", commands, re.MULTILINE))
    made |= set(CI["jobs"]["make"]["strategy"]["matrix"]["target"])
    assert made <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
