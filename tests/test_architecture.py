"""What the map promises: rooms that stand on one another, files and functions of a readable size."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import grimp
import pytest

from pensieve_jax.commands.main import COMMANDS
from tests.launching import load

ROOT = Path(__file__).parents[1]
PACKAGES = ("pensieve_jax", "model_defs", "pallas_kernels")
NUM_LONGEST = 10
MIN_DOCSTRING_WORDS = 4
SAY_WHOSE_THEY_ARE = (
    *(f"pensieve_jax/{room}" for room in ("balance", "commands", "core", "device", "history", "runtime")),
    *("pensieve_jax/cellular", "pensieve_jax/decoding", "pensieve_jax/rebatching", "pensieve_jax/text"),
    *("pallas_kernels", "model_defs/recurrent"),
    *(
        f"lab/pensieve_lab/{family}"
        for family in ("balance", "balance_study", "cells", "clients", "common", "chat_training", "kernels")
    ),
    *(
        f"lab/pensieve_lab/{family}"
        for family in ("kv_quality", "mutation", "pages", "parallel", "rebatching", "serving", "simulation")
    ),
    *(f"lab/pensieve_lab/{family}" for family in ("simulator", "steps", "workload")),
)
ROOMS_WITHOUT_JAX = (
    *(
        f"pensieve_jax/{room}"
        for room in ("engine", "scheduler", "cache", "core", "history", "text", "balance")
    ),
    *("lab/pensieve_lab/workload", "lab/pensieve_lab/simulator"),
)

architecture = load("scripts.dev.draw_architecture")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    """As it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "lab" else parts).removesuffix(".__init__")


class Outline(NamedTuple):
    """What these tests ask of a file."""

    num_lines: int
    docstring: str
    short_docstrings: tuple[str, ...]
    function_lines: tuple[tuple[str, int], ...]


def short_docstrings(tree: ast.Module) -> list[str]:
    """Line and text of each docstring that is too short to say more than a name and its types do."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [(node, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [
        f"{node.body[0].lineno}: {text}"
        for node, text in found
        if text is not None and len(text.split()) < MIN_DOCSTRING_WORDS
    ]


@functools.cache
def outline(path: Path) -> Outline:
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    functions = [
        (node.name, node.end_lineno - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return Outline(
        len(text.splitlines()), ast.get_docstring(tree) or "", tuple(short_docstrings(tree)), tuple(functions)
    )


@functools.cache
def imports() -> grimp.ImportGraph:
    """Who imports whom; for whoever runs these tests, not for all who collect them."""
    return architecture.read_imports()


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
    graph = imports()
    assert [module for module in graph.modules if module in graph.find_upstream_modules(module)] == []


def test_policy_runs_where_there_is_no_jax():
    modules = [module_of(path) for room in ROOMS_WITHOUT_JAX for path in sources(room)]
    modules += [
        module_of(path)
        for path in sources("pensieve_jax/cellular", "pensieve_jax/decoding")
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
    graph = grimp.build_graph("pensieve_lab", *PACKAGES, include_external_packages=True, cache_dir=None)
    assert not graph.modules & (launchers | {"scripts"})


BENCHMARKS = sorted(path.stem for path in (ROOT / "lab/pensieve_lab/programs").glob("benchmark_*.py"))


@pytest.mark.parametrize("program", BENCHMARKS)
def test_benchmarks_do_not_simulate(program):
    """What is measured must not depend on what is simulated."""
    found = imports().find_upstream_modules(f"pensieve_lab.programs.{program}")
    assert found and not [module for module in found if module.startswith("pensieve_lab.simulator")]


def missing_words(docstring: str) -> list[str]:
    """Of those that tell a module from its neighbours; lines may break between them."""
    text = " ".join(docstring.split())
    return [words for words in ("Owns:", "Does not know") if words not in text]


def test_a_module_says_what_it_owns_and_does_not_know():
    """But programs, which say how they are started."""
    programs = {ROOT / "pensieve_jax" / "commands" / f"{command}.py" for command in COMMANDS}
    assert all(sources(folder) for folder in SAY_WHOSE_THEY_ARE)
    paths = {*sources(*SAY_WHOSE_THEY_ARE), *(ROOT / "pensieve_jax").glob("*.py")} - programs
    docstrings = {
        str(path.relative_to(ROOT)): outline(path).docstring for path in paths if path.name != "__init__.py"
    }
    assert {name: missing for name, text in docstrings.items() if (missing := missing_words(text))} == {}
    assert missing_words("Owns: a. Does not\nknow b.") == []
    assert missing_words("Owns: a.") == ["Does not know"]


def test_no_docstring_is_of_three_words_or_fewer():
    """Ruff does not ask for one on a method: where the name and the types say it all, there is none."""
    found = {str(path.relative_to(ROOT)): outline(path).short_docstrings for path in sources(*PACKAGES)}
    assert {name: short for name, short in found.items() if short} == {}
    code = "'A module.'\nclass A:\n  'See `B`.'\n  async def f(self):\n    'Return what was sent.'\n"
    assert short_docstrings(ast.parse(code)) == ["1: A module.", "3: See `B`."]
    assert short_docstrings(ast.parse("def f():\n  def g():\n    'Nothing yet.'\n")) == ["3: Nothing yet."]
    assert short_docstrings(ast.parse("def f(): ...")) == []


def test_the_longest_files_and_functions_are_shown(record_property):
    """Length is advice for a review: a file holds one subject, however long that takes."""
    paths = sources(*PACKAGES, "lab/pensieve_lab", "scripts")
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
