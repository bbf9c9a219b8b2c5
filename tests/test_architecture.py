"""Rules of the architecture: layers, imports, and the size of files and functions."""

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
    *(
        f"lab/pensieve_lab/{family}"
        for family in ("client_matrix", "scripted", "simulator", "steps", "vllm_tests", "workload")
    ),
)
ROOMS_WITHOUT_JAX = (
    *(
        f"pensieve_jax/{room}"
        for room in ("engine", "scheduler", "cache", "core", "history", "text", "balance")
    ),
    *("lab/pensieve_lab/workload", "lab/pensieve_lab/simulator"),
)

architecture = load("scripts.dev.draw_architecture")
lives = load("scripts.dev.draw_lives")


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    """Return the name under which it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "lab" else parts).removesuffix(".__init__")


class Outline(NamedTuple):
    """The properties of a file that these tests use."""

    num_lines: int
    docstring: str
    short_docstrings: tuple[str, ...]
    function_lines: tuple[tuple[str, int], ...]


def short_docstrings(tree: ast.Module) -> list[str]:
    """Return line and text of each docstring that is too short to add anything to name and types."""
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
    """Return the import graph; it is built only when these tests run, not at collection."""
    return architecture.read_imports()


def test_the_diagram_matches_the_code():
    rooms = architecture.read_rooms()
    assert architecture.cycles(rooms) == []
    assert architecture.PICTURE.read_text("utf-8") == architecture.draw(rooms), (
        "run scripts/dev/draw_architecture.py, and see whether docs/architecture.md still says what it shows"
    )


def test_the_pictures_of_turn_and_chunk_match_the_code():
    assert [stage.path for stage in lives.STAGES.values() if not (ROOT / stage.path).exists()] == []
    for path, picture in ((lives.TURN, lives.draw_turn()), (lives.CHUNK, lives.draw_chunk())):
        assert path.read_text("utf-8") == picture, "run scripts/dev/draw_lives.py"


def test_mutual_imports_of_rooms_are_found():
    room = architecture.Room
    rooms = {"a": room("", {"b"}), "b": room("", {"c"}), "c": room("", {"a"}), "d": room("", {"a"})}
    assert architecture.cycles(rooms) == ["a", "b", "c"]


def test_no_import_cycle_exists():
    graph = imports()
    assert [module for module in graph.modules if module in graph.find_upstream_modules(module)] == []


def test_policy_code_runs_without_jax():
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


def test_packages_do_not_import_launchers():
    launchers = {path.stem for path in (ROOT / "scripts").iterdir() if path.suffix == ".py" or path.is_dir()}
    graph = grimp.build_graph("pensieve_lab", *PACKAGES, include_external_packages=True, cache_dir=None)
    assert not graph.modules & (launchers | {"scripts"})


BENCHMARKS = sorted(path.stem for path in (ROOT / "lab/pensieve_lab/programs").glob("benchmark_*.py"))


@pytest.mark.parametrize("program", BENCHMARKS)
def test_benchmarks_do_not_simulate(program):
    """Measurements must not depend on simulations."""
    found = imports().find_upstream_modules(f"pensieve_lab.programs.{program}")
    assert found and not [module for module in found if module.startswith("pensieve_lab.simulator")]


def missing_words(docstring: str) -> list[str]:
    """Return the words of the required docstring parts that are missing; lines may break between them."""
    text = " ".join(docstring.split())
    return [words for words in ("Owns:", "Does not know") if words not in text]


def test_module_docstrings_have_their_parts():
    """Programs are excluded: they say how they are started."""
    programs = {ROOT / "pensieve_jax" / "commands" / f"{command}.py" for command in COMMANDS}
    assert all(sources(folder) for folder in SAY_WHOSE_THEY_ARE)
    paths = {*sources(*SAY_WHOSE_THEY_ARE), *(ROOT / "pensieve_jax").glob("*.py")} - programs
    docstrings = {
        str(path.relative_to(ROOT)): outline(path).docstring for path in paths if path.name != "__init__.py"
    }
    assert {name: missing for name, text in docstrings.items() if (missing := missing_words(text))} == {}
    assert missing_words("Owns: a. Does not\nknow b.") == []
    assert missing_words("Owns: a.") == ["Does not know"]


def test_docstrings_have_more_than_three_words():
    """Ruff does not require one on a method: if the name and the types say it all, it has none."""
    found = {str(path.relative_to(ROOT)): outline(path).short_docstrings for path in sources(*PACKAGES)}
    assert {name: short for name, short in found.items() if short} == {}
    code = "'A module.'\nclass A:\n  'See `B`.'\n  async def f(self):\n    'Return what was sent.'\n"
    assert short_docstrings(ast.parse(code)) == ["1: A module.", "3: See `B`."]
    assert short_docstrings(ast.parse("def f():\n  def g():\n    'Nothing yet.'\n")) == ["3: Nothing yet."]
    assert short_docstrings(ast.parse("def f(): ...")) == []


def test_the_longest_files_and_functions_are_listed(record_property):
    """Length is advice for a review: a file holds one subject, whatever its length."""
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
