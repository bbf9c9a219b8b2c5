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
PROGRAMS = "toy/programs.py"
CONSTANTS = "toy/nested/constants.py"
FILES = {
    "toy/__init__.py": "",
    SOURCE: LIMITS,
    PROGRAMS: """\
def stored():
    return 6


def jitted():
    return 7
""",
    "toy/nested/__init__.py": "",
    CONSTANTS: "MOST = 3\n",
    "tests/toy/test_constants.py": """\
from toy.nested.constants import MOST


def test_most():
    assert MOST == 3
""",
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
    "tests/toy/test_programs.py": """\
import os
from pathlib import Path

import jax

from toy.programs import jitted, stored


def load_or_trace():
    program = Path(os.environ["TESTS_COMPILATION_CACHE"], "executables", "program")
    if not program.exists():
        program.parent.mkdir(exist_ok=True)
        program.write_text(str(stored()))
    return int(program.read_text())


def test_programs():
    assert load_or_trace() == 6
    assert jax.jit(jitted)() == 7


def test_programs_again():
    assert load_or_trace() == 6
    assert jax.jit(jitted)() == 7
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
    """Write the project and commit it to a git repository."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    return root


def mutant(before: str, after: str, function: str = "", file: str = SOURCE) -> Mutant:
    """Make a mutant that replaces a line of a source file by another."""
    text = FILES[file]
    line = text.splitlines().index(before) + 1
    changed = text.replace(f"{before}\n", f"{after}\n")
    return Mutant(Candidate(file, "ByHand", line, line, 0), digest(text), function, before, after, changed)
