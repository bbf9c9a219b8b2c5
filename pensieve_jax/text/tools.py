"""Function tools: their form, and the check that user input has this form.

Owns: `Tool`, and what a well-formed list of them is.
Does not know: templates, tool calls, or how a model writes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.json_values import json_copy

type Tool = dict[str, Any]
"""A function tool as templates read it: {"type": "function", "function": {"name", "description",
"parameters"}}."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}


def check_tools(tools: object, field: str = "tools") -> tuple[Tool, ...]:
    """Return well-formed function tools, each with the same keys in the same order.

    So the same tools are written as the same text, whichever API they came from. `strict` is left out,
    since it concerns the server. A function without `parameters` takes none.

    Raises InvalidRequestError naming `field`, `field[i].type`, `field[i].function.name` and so on.
    """
    if not isinstance(tools, list | tuple):
        raise InvalidRequestError(field, tools, "a list of function tools")
    checked = tuple(_check_tool(tool, f"{field}[{index}]") for index, tool in enumerate(tools))
    check_distinct(checked, field, "function.name")
    return checked


def check_distinct(tools: Sequence[Tool], field: str, name_field: str) -> None:
    """Raise InvalidRequestError naming `field[i].name_field` for a tool with the name of an earlier one."""
    known: set[str] = set()
    for index, name in enumerate(tool_names(tools)):
        if name in known:
            raise InvalidRequestError(f"{field}[{index}].{name_field}", name, "a name that no other tool has")
        known.add(name)


def _check_tool(tool: object, field: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError(field, tool, 'a dict such as {"type": "function", "function": {...}}')
    if tool.get("type", "function") != "function":
        raise InvalidRequestError(f"{field}.type", tool["type"], '"function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", function, "a dict with name, description, parameters")
    return function_tool(
        function.get("name"), function.get("description"), function.get("parameters"), f"{field}.function"
    )


def function_tool(name: object, description: object, parameters: object, field: str) -> Tool:
    """Return a function tool of these parts; raise InvalidRequestError naming `field.name` and so on."""
    if not isinstance(name, str) or not _NAME.match(name):
        limit = "1 to 128 letters, digits and characters of _ . : -"
        raise InvalidRequestError(f"{field}.name", name, limit)
    function: dict[str, Any] = {"name": name}
    if description is not None:
        if not isinstance(description, str):
            raise InvalidRequestError(f"{field}.description", description, "a string")
        function["description"] = description
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"{field}.parameters", parameters, "a JSON schema of an object")
    _check_parameters(parameters or {}, f"{field}.parameters")
    if parameters and not isinstance(parameters.get("type", ""), str):
        parameters = {**parameters, "type": "object"}  # the only type of arguments, among others
    # Templates read `parameters.properties`, and fail without it.
    function["parameters"] = parameters or _NO_PARAMETERS
    return {"type": "function", "function": json_copy(function, field)}


def _check_parameters(schema: Mapping[str, Any], field: str) -> None:
    """Check what templates, the reader of calls and grammars rely on; the library checks the rest."""
    for key in ("properties", "$defs", "definitions"):
        parts = schema.get(key, {})
        if not isinstance(parts, Mapping):
            raise InvalidRequestError(f"{field}.{key}", parts, "an object of JSON schemas")
        for name, part in parts.items():
            if not isinstance(part, Mapping | bool):
                raise InvalidRequestError(f"{field}.{key}.{name}", part, "a JSON schema")
            _check_type(part, f"{field}.{key}.{name}")
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise InvalidRequestError(f"{field}.required", required, "a list of names")
    _check_type(schema, field)
    kind = schema.get("type", "object")
    if kind != "object" and (isinstance(kind, str) or "object" not in kind):
        raise InvalidRequestError(f"{field}.type", kind, '"object", as the arguments of a call are')


def _check_type(schema: Mapping[str, Any] | bool, field: str) -> None:
    kind = schema.get("type", "object") if isinstance(schema, Mapping) else "object"
    kinds = kind if isinstance(kind, list | tuple) else [kind]
    if not kinds or not all(isinstance(one, str) for one in kinds):
        raise InvalidRequestError(f"{field}.type", kind, "the name of a type, or a list of names")


def num_tool_characters(tools: Sequence[Tool]) -> int:
    """Return the approximate length of tools as text."""
    return sum(len(str(tool)) for tool in tools)


def tool_names(tools: Sequence[Tool]) -> list[str]:
    """Return the names of function tools, in order."""
    return [tool["function"]["name"] for tool in tools]
