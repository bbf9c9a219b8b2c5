"""What the map promises: rooms that stand on one another, files and functions of a readable size."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from pensieve_jax.commands.main import COMMANDS
from tests.launching import load

ROOT = Path(__file__).parents[1]
PACKAGES = ("pensieve_jax", "model_defs", "pallas_kernels")
NUM_LONGEST, MAX_COMMON_FILES = 10, 12
SAY_WHOSE_THEY_ARE = (
    *("pensieve_jax/balance", "scripts/balance"),
    *(f"pensieve_jax/{room}" for room in ("commands", "core", "device", "history", "runtime", "simulator")),
    *("pensieve_jax/cellular", "pensieve_jax/rebatching", "pensieve_jax/text", "pensieve_jax/workload"),
    *("pallas_kernels", "model_defs/recurrent"),
    *(
        f"scripts/{family}"
        for family in ("cells", "clients", "common", "chat_training", "kernels", "pages", "serving")
    ),
    *("scripts/kv_quality", "scripts/parallel", "scripts/rebatching", "scripts/simulation"),
    *("scripts/mutation", "scripts/steps"),
)
ROOMS_WITHOUT_JAX = (
    *("engine", "scheduler", "cache", "core", "history", "text", "workload", "simulator"),
    "balance",
)

architecture = load("scripts.dev.draw_architecture")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    """As it is imported: launchers' parts without `scripts`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "scripts" else parts).removesuffix(".__init__")


SOURCES = {module_of(path): path for path in sources(*PACKAGES, "scripts")}


class Outline(NamedTuple):
    """What these tests ask of a file."""

    num_lines: int
    docstring: str
    function_lines: tuple[tuple[str, int], ...]


@functools.cache
def outline(path: Path) -> Outline:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    functions = [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in architecture.statements(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Outline(len(text.splitlines()), ast.get_docstring(tree) or "", tuple(functions))


@functools.cache
def imports() -> dict[str, set[str]]:
    """By module, what it imports; for whoever runs these tests, not for all who collect them."""
    return {module: architecture.imported_modules(path, SOURCES) for module, path in SOURCES.items()}


def reached(start: str) -> set[str]:
    """Modules of this repository that importing one brings along."""
    found, left = set(), [start]
    while left:
        for module in imports()[left.pop()] & imports().keys():
            if module not in found:
                found.add(module)
                left.append(module)
    return found


def test_the_picture_is_of_this_code():
    rooms = architecture.read_rooms()
    assert architecture.cycles(rooms) == []
    assert architecture.PICTURE.read_text("utf-8") == architecture.draw(rooms), (
        "run scripts/dev/draw_architecture.py, and see whether docs/architecture.md still says what it shows"
    )


def test_rooms_that_import_each_other_are_found():
    room = architecture.Room
    rooms = {"a": room("", {"b"}), "b": room("", {"c"}), "c": room("", {"a"}), "d": room("", {"a"})}
    assert architecture.cycles(rooms) == ["a", "b", "c"]


def test_no_module_imports_itself_however_far_round():
    assert [module for module in imports() if module in reached(module)] == []


def test_policy_runs_where_there_is_no_jax():
    modules = [module_of(path) for room in ROOMS_WITHOUT_JAX for path in sources(f"pensieve_jax/{room}")]
    modules += [
        module_of(path)
        for path in sources("pensieve_jax/cellular")
        if path.parent.name != "device" and path.stem != "engine"
    ]
    code = (
        "import importlib, sys\n"
        "sys.modules['jax'] = sys.modules['flax'] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_packages_do_not_know_launchers():
    launchers = {path.stem for path in (ROOT / "scripts").iterdir() if path.suffix == ".py" or path.is_dir()}
    for path in sources(*PACKAGES):
        tops = {module.partition(".")[0] for module in architecture.imported_modules(path)}
        assert not tops & (launchers | {"scripts"}), path


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("benchmark_*.py")), ids=lambda p: p.stem)
def test_benchmarks_do_not_simulate(path):
    """What is measured must not depend on what is simulated."""
    assert not [module for module in reached(path.stem) if module.startswith("pensieve_lab.simulator")]


def test_the_drawer_that_everybody_shares_is_small():
    assert len(sources("scripts/common")) <= MAX_COMMON_FILES


def missing_words(docstring: str) -> list[str]:
    """Of those that tell a module from its neighbours; lines may break between them."""
    text = " ".join(docstring.split())
    return [words for words in ("Owns:", "Does not know") if words not in text]


def test_a_module_says_what_it_owns_and_does_not_know():
    """But programs, which say how they are started."""
    programs = {ROOT / "pensieve_jax" / "commands" / f"{command}.py" for command in COMMANDS}
    paths = {*sources(*SAY_WHOSE_THEY_ARE), *(ROOT / "pensieve_jax").glob("*.py")} - programs
    docstrings = {
        str(path.relative_to(ROOT)): outline(path).docstring for path in paths if path.name != "__init__.py"
    }
    assert {name: missing for name, text in docstrings.items() if (missing := missing_words(text))} == {}
    assert missing_words("Owns: a. Does not\nknow b.") == []
    assert missing_words("Owns: a.") == ["Does not know"]


def test_the_longest_files_and_functions_are_shown(record_property):
    """Length is advice for a review: a file holds one subject, however long that takes."""
    paths = sources(*PACKAGES, "scripts")
    files = {str(path.relative_to(ROOT)): outline(path).num_lines for path in paths}
    functions = {
        f"{path.relative_to(ROOT)}:{name}": count
        for path in paths
        for name, count in outline(path).function_lines
    }
    for counts in (files, functions):
        longest = sorted(counts, key=counts.__getitem__, reverse=True)[:NUM_LONGEST]
        record_property("note", ", ".join(f"{name} {counts[name]}" for name in longest))
        assert len(longest) == NUM_LONGEST
