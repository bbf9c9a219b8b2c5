"""A small project with a git repository, and mutants of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pensieve_lab.mutation.mutants import Candidate, Mutant, digest

LIMITS = '''\
"""Limits."""

import subprocess
import sys


def clip(value, most):
    return min(value, most)


def is_full(count, most):
    return count >= most


def count_down(count):
    steps = 0
    while count > 0:
        count -= 1
        steps += 1
    return steps


def double(value):
    return 2 * value


def shared():
    return 3


def never_called():
    return 4
'''
SOURCE = "toy/limits.py"
FILES = {
    "toy/__init__.py": "",
    SOURCE: LIMITS,
    "tests/toy/test_limits.py": """\
import subprocess
import sys

import pytest

from toy.limits import clip, count_down, is_full, shared


@pytest.fixture(scope="module")
def made_once():
    return shared()


def test_clip():
    assert clip(5, 3) == 3


def test_is_full():
    assert is_full(5, 3) and not is_full(2, 3)


def test_count_down():
    assert count_down(3) == 3


def test_fixture(made_once):
    assert made_once == 3


def test_fixture_again(made_once):
    assert made_once == 3


def test_that_fails():
    assert clip(5, 3) == 4


def test_that_is_skipped():
    pytest.skip("always")
""",
    "tests/other/test_process.py": """\
import subprocess
import sys


def test_double():
    code = "from toy.limits import double; print(double(4))"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"8\\n"
""",
}


def make(root: Path) -> Path:
    """Write the project and have git know it."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    return root


def mutant(before: str, after: str, function: str = "", text: str = LIMITS) -> Mutant:
    """Replace a line of the source by another."""
    line = text.splitlines().index(before) + 1
    changed = text.replace(f"{before}\n", f"{after}\n")
    return Mutant(Candidate(SOURCE, "ByHand", line, line, 0), digest(text), function, before, after, changed)
