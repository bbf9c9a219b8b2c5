"""Mutants of one source file: where each operator applies, and the resulting text of the file.

Owns: the positions of operators, and the places where a change means nothing.
Does not know: which mutants are drawn, or how tests are run.
Called by `mutation.drawing`.
"""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from pensieve_lab.mutation.mutants import Candidate, Mutant, digest
from pensieve_lab.mutation.operators import OPERATORS

_CHECKERS: Final = "integrity.py"
"""Files whose purpose is assertions; elsewhere an assertion only states what cannot happen."""
_LOGGERS: Final = frozenset({"_log", "log", "logger", "logging"})
type Point = tuple[int, int]


def find_candidates(file: str, text: str) -> list[Candidate]:
    """Return where each operator applies in a file, in the order of the text."""
    excluded = list(_excluded_ranges(text, keeps_assertions=PurePosixPath(file).name == _CHECKERS))
    counts: Counter[str] = Counter()
    found = []
    for node in ast_nodes(get_ast(text)):
        for name, operator in OPERATORS.items():
            for (line, column), _ in operator.mutation_positions(node):
                occurrence = counts[name]
                counts[name] += 1
                if not any(start <= (line, column) < end for start, end in excluded) and not (
                    name == "AddNot" and _repeats_a_comparison(node)
                ):
                    found.append(Candidate(file, name, occurrence, line, column))
    return sorted(found, key=lambda c: (c.line, c.column, c.operator, c.occurrence))


def make_mutant(candidate: Candidate, text: str) -> Mutant | None:
    """Return the mutant, or None if it does not compile or is the same program."""
    changed = mutate_code(text, OPERATORS[candidate.operator], candidate.occurrence)
    if changed is None:
        return None
    try:
        tree = ast.parse(changed)
        compile(changed, candidate.file, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    original = ast.parse(text)
    if ast.dump(tree) == ast.dump(original):
        return None
    before, after = _changed_lines(text, changed)
    function = _enclosing(original, candidate.line)
    return Mutant(candidate, digest(text), function, before, after, changed)


def _repeats_a_comparison(node: Any) -> bool:
    """Return whether other operators make the same mutant, as `not a < b` is `a >= b`."""
    return node.children[1].type in ("comparison", "not_test")


def _changed_lines(text: str, changed: str) -> tuple[str, str]:
    lines, new = text.splitlines(), changed.splitlines()
    matcher = difflib.SequenceMatcher(None, lines, new, autojunk=False)
    opcodes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    first, last = opcodes[0], opcodes[-1]
    return "\n".join(lines[first[1] : last[2]]), "\n".join(new[first[3] : last[4]])


def _enclosing(tree: ast.Module, line: int) -> str:
    """Return the qualified name of the innermost definition around a line."""
    names: list[str] = []
    body: list[ast.stmt] = tree.body
    while True:
        inner = [
            node
            for statement in body
            for node in ast.walk(statement)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.lineno <= line <= (node.end_lineno or 0)
        ]
        if not inner:
            return ".".join(names)
        outermost = min(inner, key=lambda node: node.lineno)
        names.append(outermost.name)
        body = outermost.body


def _excluded_ranges(text: str, *, keeps_assertions: bool) -> Iterator[tuple[Point, Point]]:
    """Yield the ranges of code without tested behavior: annotations, assertions, decorators and logging."""
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        parts: list[Any] = _excluded_parts(node)
        if keeps_assertions and isinstance(node, ast.Assert):
            parts = [node.msg]
        for part in parts:
            if part is not None:
                yield (
                    _point(lines, part.lineno, part.col_offset),
                    _point(lines, part.end_lineno, part.end_col_offset),
                )


def _point(lines: list[str], line: int, byte_offset: int) -> Point:
    """Convert a position of `ast`, which counts bytes of a line, to one of parso, which counts characters."""
    return line, len(lines[line - 1].encode()[:byte_offset].decode())


def _excluded_parts(node: ast.AST) -> list[Any]:
    match node:
        case ast.arg():
            return [node.annotation]
        case ast.AnnAssign():
            return [node.annotation]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.returns, *node.decorator_list]
        case ast.ClassDef():
            return [*node.decorator_list, *node.bases]
        case ast.TypeAlias() | ast.Assert():
            return [node]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return [node]
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return [node]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in _LOGGERS:
            return [node]
        case ast.Call(func=ast.Name(id="cast")):
            return node.args[:1]
        case ast.keyword(arg="strict"):  # of `zip`: an assertion
            return [node]
    return []
