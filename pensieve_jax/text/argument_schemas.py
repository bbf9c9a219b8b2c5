"""What a tool's schema says of single arguments, for formats of calls that write each argument by itself.

Owns: references within a schema, and whether an argument is text, one of some values, or JSON. Grammars write
arguments by this, and the reader of replies reads them by it.
Does not know: formats of calls, or grammars. The schemas are not checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

TYPE_NAMES: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
"""Names of a JSON value's types, by its type in Python."""
MAX_TEXT_LENGTH: Final = 2000
"""Limit of `maxLength` of a text that is not written as JSON, since masks of longer ones take long."""
_ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    }
)
"""Keywords that do not narrow what a schema allows."""
_UNIONS: Final = ("anyOf", "oneOf", "allOf")
_MAX_REFERENCES: Final = 100
_MAX_INDEX_DIGITS: Final = 9


class Text(NamedTuple):
    """An argument that is a text of at most `max_length` characters; it may be null if its schema says so."""

    max_length: int | None = None


class Choices(NamedTuple):
    """An argument that is one of some values; `values` has each by `key_of` it."""

    values: Mapping[str, Any]


def key_of(value: Any) -> str:
    """Return a text that equal JSON values share, and others do not."""
    return json.dumps(value, sort_keys=True)


def argument_form(schema: Any, root: Any) -> Text | Choices | None:
    """Return how an argument between tags is written, or None if it is written as JSON.

    Args:
      schema: the argument's schema.
      root: the schema of all arguments, where references begin.
    """
    parts, is_exclusive = _alternatives(schema, root)
    if len(parts) == 1 and (text := _text(parts[0])) is not None:
        return text
    values: dict[str, Any] = {}
    num_values = num_texts = 0
    for part in parts:
        own = _values(part)
        if own is None:
            if _text(part) != Text():
                return None
            num_texts += 1
            continue
        num_values += len(own)
        values |= {key_of(value): value for value in own}
    if is_exclusive and (num_texts or len(values) < num_values):
        return None
    if num_texts:
        has_others = any(not isinstance(value, str | None) for value in values.values())
        return None if has_others else Text()
    return Choices(values) if values else None


def root_of_arguments(parameters: Any) -> Any:
    """Return the schema that says which arguments there are: `parameters`, or what it refers to."""
    if not isinstance(parameters, Mapping):
        return parameters
    own = {key: parameters[key] for key in parameters if (key, parameters[key]) != ("type", "object")}
    return _resolved(own, parameters)


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the types that a schema allows, as far as it and what it refers to say."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        own = _own_types(one)
        if not own:
            values = one.get("enum")
            values = values if isinstance(values, list) else [one["const"]] if "const" in one else []
            own.update(*(TYPE_NAMES.get(type(value), ()) for value in values))
        found |= own
        for word in _UNIONS:
            parts = one.get(word)
            waiting += parts if isinstance(parts, list) else ()
        waiting.append(_referred(one.get("$ref"), root))
    return found


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    return {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}


def _alternatives(schema: Any, root: Any) -> tuple[list[Any], bool]:
    """Return the alternatives of a schema, without annotations, and whether no two of them may hold."""
    found: list[Any] = []
    seen: set[int] = set()
    is_exclusive = False
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping) and id(one) in seen:
            continue
        seen.add(id(one))
        own = _resolved(one, root)
        unions = [word for word in ("anyOf", "oneOf") if isinstance(own, Mapping) and list(own) == [word]]
        parts = own[unions[0]] if unions else None
        if isinstance(parts, list) and parts:
            is_exclusive |= unions == ["oneOf"]
            waiting += reversed(parts)
        else:
            found.append(own)
    return found, is_exclusive


def _resolved(schema: Any, root: Any) -> Any:
    """Return a schema without annotations, or what it refers to if it says nothing else."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return schema
        schema = {key: schema[key] for key in schema if key not in _ANNOTATIONS}
        if len(schema) != 1:
            return schema
        ((key, part),) = schema.items()
        if key == "$ref":
            target = _referred(part, root)
        elif key in _UNIONS and isinstance(part, list) and len(part) == 1:
            (target,) = part
        else:
            return schema
        if not isinstance(target, Mapping | bool):
            return schema
        schema = target
    return True  # references in a circle


def _text(schema: Any) -> Text | None:
    """Return the text that a schema describes, with null beside it or not; None if it is another schema."""
    if not isinstance(schema, Mapping):
        return None if schema is False else Text()
    if not schema.keys() <= {"type", "maxLength"}:
        return None
    types = _own_types(schema)
    if types - {"string", "null"} or types == {"null"} or ("type" in schema and not types):
        return None
    if "maxLength" not in schema:
        return Text()
    limit = schema["maxLength"]
    if "null" in types or type(limit) is not int:
        return None
    return Text(limit) if 0 <= limit <= MAX_TEXT_LENGTH else None


def _values(schema: Any) -> list[Any] | None:
    """Return the values that a schema lists; None if it is another schema."""
    if not isinstance(schema, Mapping):
        return None
    if schema == {"type": "null"}:
        return [None]
    if not schema.keys() <= {"type", "enum", "const"} or ("enum" in schema) == ("const" in schema):
        return None
    values, types = schema.get("enum", [schema.get("const")]), _own_types(schema)
    if not isinstance(values, list):
        return None
    return [one for one in values if not types or not types.isdisjoint(TYPE_NAMES.get(type(one), ()))]


def _referred(reference: Any, root: Any) -> Any:
    """Return what a reference within a schema points to; None if there is nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for word in unquote(reference[1:]).split("/")[1:]:
        key = word.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and key.isascii() and len(key) < _MAX_INDEX_DIGITS:
            found = found[int(key)] if int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found
