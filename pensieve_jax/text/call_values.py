"""Arguments that a model does not write as JSON: texts between tags, and calls in Python.

Owns: their conversion to JSON values.
Does not know: formats of calls, or what surrounds these texts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, Final

from pensieve_jax.text.partial_json import SPACE


def value_of(text: str, schema: Any) -> Any:
    """Return an argument's value: the text, unless its schema has other types and the text is one of them."""
    types = _types_of(schema)
    if not types or types == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered == "true"
        return None if "null" in types and lowered in ("null", "none") else text
    # A text that only looks like a number stays one where strings are allowed and numbers are not.
    if "string" in types and _TYPE_NAMES[type(value)].isdisjoint(types):
        return text
    return value


_TYPE_NAMES: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def _types_of(schema: Any) -> set[str]:
    """Return the types that a schema allows, as far as its own words say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for word in ("anyOf", "oneOf"):
        alternatives = schema.get(word)
        for one in alternatives if isinstance(alternatives, list) else ():
            found |= _types_of(one)
    values = schema.get("enum")
    for value in values if not found and isinstance(values, list) else ():
        found |= _TYPE_NAMES.get(type(value), frozenset())
    return found


def end_of_python_call(text: str) -> int | None:
    """Return where the first call of a list ends, or the list itself; None before the end.

    The text begins with "[", or behind a call.
    """
    depth, quote, is_escaped = 0, "", False
    for at, character in enumerate(text):
        if quote:
            if is_escaped:
                is_escaped = False
            elif character == "\\":
                is_escaped = True
            elif character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character == "[" and not depth and not text[:at].strip(SPACE):
            continue  # the list's own bracket
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            if not depth:
                return at + 1
            depth -= 1
            if not depth and character == ")":
                return at + 1
    return None


def python_call(text: str) -> tuple[str, str] | None:
    """Return the name of a call and its arguments as JSON; None for any other text."""
    try:
        tree = ast.parse(text.lstrip(SPACE + ",["), mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        values = {one.arg or "": _literal(one.value) for one in tree.keywords}
        return ast.unparse(tree.func), json.dumps(values, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, with JSON's words for True, False and None allowed."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _literal(key): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)
