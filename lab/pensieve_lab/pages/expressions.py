"""Expressions over documents: small, safe Python in which `a.b` is `a["b"]`.

Owns: which syntax and functions an expression may use.
Does not know: pages.
Called by `pages.sources`, `pages.pictures` and `programs.check_numbers`.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pensieve_lab.common.crossing import crossing_at

_ALLOWED = (
    *(
        ast.Expression,
        ast.Constant,
        ast.Name,
        ast.Load,
        ast.Store,
        ast.Subscript,
        ast.Slice,
        ast.Call,
        ast.keyword,
    ),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.UnaryOp, ast.USub),
    *(
        ast.Compare,
        ast.Eq,
        ast.NotEq,
        ast.Lt,
        ast.LtE,
        ast.Gt,
        ast.GtE,
        ast.In,
        ast.NotIn,
        ast.BoolOp,
        ast.And,
    ),
    *(ast.Or, ast.Not, ast.IfExp, ast.List, ast.Tuple, ast.GeneratorExp, ast.ListComp, ast.comprehension),
)


class ExpressionError(ValueError):
    """An expression that is not allowed, or has no value."""


@functools.cache
def read_document(path: Path) -> Any:
    """Return a result document: JSON, JSON lines (a list), TOML, or plain text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix != ".json":
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


class Documents:
    """Evaluator of expressions over the documents of one default folder and further named folders."""

    def __init__(self, folder: Path, **others: Path) -> None:
        """Name documents by their path from `folder`, or by another folder's name and a path from it."""
        self._folder, self._others = folder, others
        # by name, because resolving a path takes longer than most expressions
        self._paths: dict[str, Path] = {}
        self._functions: dict[str, Any] = {
            **{f.__name__: f for f in (abs, float, int, len, max, min, round, sorted, str, sum)},
            **{"mean": statistics.fmean, "median": statistics.median, "floor": math.floor, "ceil": math.ceil},
            "document": self.read,
            "one": one,
            "total": total,
            "crossing_at": crossing_at,
            "at_latency": at_latency,
            "values": lambda mapping: list(mapping.values()),
            "number_after": number_after,
        }

    def read(self, name: str) -> Any:
        """Return a document by its path from the folder."""
        if name not in self._paths:
            self._paths[name] = self._path(name)
        return read_document(self._paths[name])

    def _path(self, name: str) -> Path:
        first, _, rest = name.partition("/")
        folder, name_in_it = (self._others[first], rest) if first in self._others else (self._folder, name)
        path = (folder / name_in_it).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.is_file():
            raise ExpressionError(f"{name}: no such document")
        return path

    def value(self, expression: str, names: Mapping[str, Any]) -> Any:
        """Return the value of an expression with these names; raises ExpressionError."""
        try:
            code = _compiled(expression)
            return eval(
                code, {"__builtins__": {}, **self._functions, **names}
            )  # only what `_Checked` lets by
        except ExpressionError:
            raise
        except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError, ValueError) as error:
            raise ExpressionError(f"{expression}: {type(error).__name__}: {error}") from error


def one(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Any:
    """Return the only row with these values."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if len(found) != 1:
        raise ExpressionError(f"{len(found)} rows have {wanted}")
    return found[0]


def at_latency(
    level_s: float, runs: Iterable[Mapping[str, Any]], figure: str = "requests_per_s"
) -> float | None:
    """Return the figure of load points at which mean normalized latency reaches `level_s`.

    Points must be sorted by load, and lines between them are straight. `runs` are points, or documents of the
    serving benchmark with points. Returns None if no line crosses the level.
    """
    points = [point for run in runs for point in (run["results"]["points"] if "results" in run else [run])]
    return crossing_at(level_s, [(p[figure], p["normalized_latency_s"]["mean"]) for p in points])


def total(values: Mapping[str, float], *words: str) -> float:
    """Return the sum of the values whose name has one of these words; raises ExpressionError without any."""
    found = [value for name, value in values.items() if any(word in name for word in words)]
    if not found:
        raise ExpressionError(f"no name has any of {words}")
    return sum(found)


def number_after(text: str, words: str) -> float:
    """Return the first number after these words in a text document."""
    found = re.search(re.escape(words) + r"[^\d\n]*?(-?\d[\d,]*(?:\.\d+)?)", text)
    if found is None:
        raise ExpressionError(f"no number after {words!r}")
    return float(found[1].replace(",", ""))


def names_of(expression: str) -> set[str]:
    """Return the names that an expression reads or calls."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ExpressionError(f"{expression}: {error}") from error
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


class _Checked(ast.NodeTransformer):
    """Transformer that allows only values, arithmetic and named functions, and makes attributes keys."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute):
            key = ast.Constant(node.attr)
            return ast.copy_location(ast.Subscript(self.visit(node.value), key, ast.Load()), node)
        is_call_of_value = isinstance(node, ast.Call) and not isinstance(node.func, ast.Name)
        if not isinstance(node, _ALLOWED) or is_call_of_value:
            raise ExpressionError(f"{type(node).__name__} is not allowed in an expression")
        return super().generic_visit(node)


@functools.cache
def _compiled(expression: str) -> Any:
    tree = _Checked().visit(ast.parse(expression.strip(), mode="eval"))
    return compile(ast.fix_missing_locations(tree), "<expression>", "eval")
