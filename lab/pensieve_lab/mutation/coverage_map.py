"""Which tests execute a line of the product, and how long they take.

Owns: the map: one file for each test file, made again when that file changes.
Does not know: mutants.
Called by `programs.run_mutants`, `mutation.selection` and `mutation.trial`.

The map may be older than the product. If a source file has changed since, every test that executes the
function counts, rather than the line.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pensieve_lab.mutation.line_monitor import code_objects
from pensieve_lab.mutation.mutants import digest
from pensieve_lab.mutation.pool import Pool, Worker

_VERSION = 3


class Place(NamedTuple):
    """Names of the lines of one statement, and whether it is executed when its module is imported."""

    file: str
    source_digest: str
    lines: frozenset[tuple[str, int]]
    is_imported: bool


class CoveringTest(NamedTuple):
    """A test that executes a statement."""

    file: str
    test: str
    seconds: float


def find_place(file: str, text: str, line: int) -> Place:
    """Return the statement around a line of a file."""
    tree = ast.parse(text)
    first, last, is_imported = line, line, True
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and line >= node.body[0].lineno:
            is_imported = False
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        if body is None:
            first, last = node.lineno, node.end_lineno or node.lineno
        elif node.lineno <= line < body[0].lineno if hasattr(body[0], "lineno") else False:
            first, last = node.lineno, body[0].lineno - 1
    names = set()
    for code in code_objects(compile(text, file, "exec", dont_inherit=True)):
        for _, _, code_line in code.co_lines():
            if code_line is not None and first <= code_line <= max(last, line):
                names.add((code.co_qualname, code_line - code.co_firstlineno))
    return Place(file, digest(text), frozenset(names), is_imported)


class CoverageMap:
    """Recorded coverage of some test files."""

    def __init__(self, records: dict[str, dict[str, Any]]) -> None:
        """Take records by test file."""
        self._records = records
        self._lines = {file: [tuple(line) for line in record["lines"]] for file, record in records.items()}
        self._masks = {
            file: {test: int(entry["lines"], 16) for test, entry in record["tests"].items()}
            for file, record in records.items()
        }

    @property
    def failures(self) -> dict[str, str]:
        """Tests that are left out, because they fail or are skipped without a mutant, and why."""
        return {test: why for record in self._records.values() for test, why in record["failures"].items()}

    @property
    def num_tests(self) -> int:
        """Number of tests that may be run."""
        return sum(map(len, self._masks.values()))

    def covering(self, place: Place) -> Iterator[CoveringTest]:
        """Yield tests that execute a statement, or for one of a module any line of its file."""
        for file, record in self._records.items():
            wanted = self._wanted(file, record["sources"].get(place.file), place)
            if wanted:
                for test, mask in self._masks[file].items():
                    if mask & wanted:
                        yield CoveringTest(file, test, record["tests"][test]["seconds"])

    def tests_below(self, folder: str) -> Iterator[CoveringTest]:
        """Yield all tests below a folder, or of one file."""
        for file, record in self._records.items():
            if file == folder or file.startswith(f"{folder}/"):
                for test, entry in record["tests"].items():
                    yield CoveringTest(file, test, entry["seconds"])

    def knows(self, place: Place) -> bool:
        """Return whether all records are of the present text of a file."""
        return all(
            record["sources"].get(place.file, place.source_digest) == place.source_digest
            for record in self._records.values()
        )

    def _wanted(self, file: str, source_digest: str | None, place: Place) -> int:
        if source_digest is None:
            return 0
        codes = {code for code, _ in place.lines}
        is_exact = source_digest == place.source_digest
        mask = 0
        for number, (source, code, offset) in enumerate(self._lines[file]):
            if source == place.file and (
                place.is_imported or ((code, offset) in place.lines if is_exact else code in codes)
            ):
                mask |= 1 << number
        return mask


def find_test_files(root: Path, folders: Iterable[str]) -> list[str]:
    """Return the test files below some folders."""
    found = set()
    for folder in folders:
        path = root / folder
        paths = [path] if path.suffix == ".py" else path.rglob("test_*.py")
        found |= {str(one.relative_to(root)) for one in paths}
    return sorted(found)


def load_map(folder: Path, files: Sequence[str]) -> CoverageMap:
    """Return the map of some test files, which must have been recorded."""
    return CoverageMap({file: json.loads(_path(folder, file).read_text("utf-8")) for file in files})


def outdated(root: Path, folder: Path, files: Sequence[str]) -> list[str]:
    """Return test files that have no record, or one of another text."""
    found = []
    for file in files:
        path = _path(folder, file)
        record = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        if (record.get("version"), record.get("digest")) != (
            _VERSION,
            digest((root / file).read_text("utf-8")),
        ):
            found.append(file)
    return found


def record(
    pool: Pool, folder: Path, files: Sequence[str], packages: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run test files and write their records; yield each file with its record."""
    folder.mkdir(parents=True, exist_ok=True)

    def work(worker: Worker, file: str) -> tuple[str, dict[str, Any]]:
        root = worker.tree.path
        reply = worker.run(files=[file], packages=list(packages))
        recorded: dict[str, Any] = reply.pop("recorded", {"lines": [], "tests": {}, "failures": {}})
        if reply["status"] not in (0, 1, 5):
            recorded["failures"][file] = f"status {reply['status']}, {reply['outcome']} at {reply['test']}"
        names = {line[0] for line in recorded["lines"]}
        recorded |= {
            "version": _VERSION,
            "digest": digest((root / file).read_text("utf-8")),
            "sources": {name: digest((root / name).read_text("utf-8")) for name in sorted(names)},
            "seconds": reply["seconds"],
        }
        path = _path(folder, file)
        path.with_suffix(".new").write_text(json.dumps(recorded), "utf-8")
        path.with_suffix(".new").replace(path)
        return file, recorded

    yield from pool.map(work, files)


def _path(folder: Path, file: str) -> Path:
    return folder / (file.replace("/", "__") + ".json")
