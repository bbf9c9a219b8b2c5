"""The documented table of errors has exactly the statuses and codes that the server's source can return."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pensieve_jax.server
from pensieve_jax.server.http.errors import _MEANINGS, ApiError
from pensieve_jax.server.openai.responses.events import failure_object
from tests.launching import ROOT

PACKAGE = Path(pensieve_jax.server.__file__).parent
PAGE = ROOT / "docs" / "api.md"
# Functions whose errors have codes that are not constants.
ELSEWHERE = Counter({"as_api_error": 1, "_last_events": 1})

type Code = tuple[int, str]
"""A status and its code."""


def made_errors() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of ApiError with the name of its function."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = {
            inner: function.name
            for function in ast.walk(tree)  # outer ones first, so that the innermost name stays
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(function)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ApiError":
                yield where.get(node, path.name), node


def codes_of_the_source() -> set[Code]:
    found: set[Code] = set()
    elsewhere: Counter[str] = Counter()
    for function, call in made_errors():
        match call.args[:2]:
            case [ast.Constant(int(status)), ast.Constant(str(code))]:
                found.add((status, code))
            case _:
                elsewhere[function] += 1
    assert elsewhere == ELSEWHERE, "a code that is no constant"
    found |= {(status, code) for status, code, _ in _MEANINGS.values()}
    # `_last_events` repeats the failure of a stored response: one of two, which the table has.
    told = {failure_object(ApiError(status, "", ""))["code"] for status in (400, 429, 500, 503)}
    assert told == {"server_error", "rate_limit_exceeded"} <= {code for _, code in found}
    return found


def codes_of_the_page() -> list[Code]:
    table = PAGE.read_text(encoding="utf-8").partition("\n## Errors\n")[2]
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", table, re.M)
    return [(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)]


def test_the_table_of_errors_matches_the_source() -> None:
    of_the_source = codes_of_the_source()
    assert len(of_the_source) > 20
    of_the_page = codes_of_the_page()
    assert sorted(of_the_page) == sorted(of_the_source)
    assert [status for status, _ in of_the_page] == sorted(status for status, _ in of_the_page)
