"""requirements/dev.txt locks what pyproject.toml asks for, with hashes and without a machine's own paths."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WANTED = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]


def locked(text: str) -> dict[str, str]:
    """Return the version of each package; each stands at the start of a line."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^ ;\\\n]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize("wanted", WANTED)
def test_a_requirement_is_locked(wanted: str) -> None:
    """After a change of a requirement, `make lock` renews the file."""
    requirement = Requirement(wanted)
    version = locked(LOCK).get(canonicalize_name(requirement.name))
    assert version is not None and requirement.specifier.contains(version), f"{wanted}: {version}"


def test_each_package_has_hashes_and_no_path_of_a_machine() -> None:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    packages = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    assert len(packages) == len(locked(LOCK)) > len(WANTED)
    assert all(lines[number + 1].startswith("    --hash=sha256:") for number in packages)
    assert not re.search(r"file:|://|/tmp|/opt|--(?:extra-)?index|--find-links", LOCK)
