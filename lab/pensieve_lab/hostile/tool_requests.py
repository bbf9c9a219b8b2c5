"""Hostile tools: many, large and slow schemas, long names, marks of calls where they are text.

Owns: these requests.
Does not know: how they are sent, or how a model writes calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from pensieve_lab.hostile.request import CHAT, MODEL, HostileRequest, chat, raw, request

_DEEP: Final = 100_000
_SLOW: Final = "^(.|\\n){0,2000}a(.|\\n){0,2000}$"
_MARKS: Final = ("</tool_call>", "<tool_call>", "}</tool_call>\n<tool_call>{", "<think>", '"}}', "\\")


def tool_requests() -> Iterator[HostileRequest]:
    """Yield all requests; those of one attack follow each other."""
    yield from _many()
    yield from _schemas()
    yield from _names()
    yield from _deep()
    yield from _rows()
    yield from _choices()


def _tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _called(name: str, parameters: Any, **fields: Any) -> HostileRequest:
    """Return a request that must call one tool with these parameters."""
    return chat(name, tools=[_tool("f", parameters)], tool_choice="required", **fields)


def _many() -> Iterator[HostileRequest]:
    schema = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(20)}}
    for number in (20, 500):
        tools = [_tool(f"tool_{at}", schema) for at in range(number)]
        yield chat(f"{number} tools, required", tools=tools, tool_choice="required")
        yield chat(f"{number} tools, auto", tools=tools)
    small = [_tool(f"t{at}", _object(a={"type": "string"})) for at in range(200)]
    for _ in range(4):
        yield chat("200 tools, required", tools=small, tool_choice="required", max_tokens=64)
        strict = [_tool(f"t{at}", _object(a={"type": "string"}), strict=True) for at in range(200)]
        yield chat("200 tools, strict", tools=strict, max_tokens=64)
    for number in range(200):
        names = {f"p{number}_{at}": {"type": "string", "maxLength": 9} for at in range(8)}
        yield _called("200 schemas of tools at once", _object(**names), max_tokens=4)
    for size in (100_000, 1_000_000, 9_000_000):
        long = _tool("f", _object(a={"type": "string", "description": "x" * size}))
        yield chat(f"tool of {size:,} characters", tools=[long], tool_choice="required")
        wide = _tool("f", _object(a={"enum": [f"{at:06}" for at in range(size // 10)]}))
        yield chat(f"tool of {size:,} characters", tools=[wide], tool_choice="required")
    largest = [_tool(f"t{at}", _object(a={"type": "string"})) for at in range(4_096)]
    yield chat("4,096 tools", tools=largest, tool_choice="required")
    yield request(
        "Responses, 4,096 tools",
        "/v1/responses",
        input="a",
        tools=[{"type": "function", **tool["function"]} for tool in largest],
        tool_choice="required",
    )
    yield request(
        "Anthropic, 4,096 tools",
        "/v1/messages",
        max_tokens=8,
        messages=[{"role": "user", "content": "a"}],
        tools=[{"name": f"t{at}", "input_schema": _object(a={"type": "string"})} for at in range(4_096)],
        tool_choice={"type": "any"},
    )


def _schemas() -> Iterator[HostileRequest]:
    recursion = {"$ref": "#/$defs/a"}
    yield _called("tool, $ref to itself", {**recursion, "$defs": {"a": recursion}})
    branch = {"anyOf": [recursion, recursion]}
    endless = _called("tool, $ref recursion", {**_object(a=recursion), "$defs": {"a": branch}})
    yield endless._replace(may_fail=True)  # no value has this schema, so a reply that begins one has no end
    tree = _object(left=recursion, right=recursion)
    yield _called("tool, endless $ref", {**_object(a=recursion), "$defs": {"a": tree}}, max_tokens=200)
    defs: dict[str, Any] = {"d0": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    for at in range(1, 30):
        part = {"$ref": f"#/$defs/d{at - 1}"}
        defs[f"d{at}"] = {"allOf": [part, {"anyOf": [part, part]}]}
    yield _called("tool, allOf explosion", {**_object(a={"$ref": "#/$defs/d29"}), "$defs": defs})
    yield _called("tool, enum of 1,000", _object(a={"enum": [f"value {at}" for at in range(1_000)]}))
    yield _called("tool, maxLength 1,000,000", _object(a={"type": "string", "maxLength": 1_000_000}))
    yield _called("tool, minLength 1,000,000", _object(a={"type": "string", "minLength": 1_000_000}))
    for count in (100_000, 1_000_000):
        many = {"type": "array", "items": {"type": "integer"}, "minItems": count}
        yield _called(f"tool, minItems {count:,}", _object(a=many))
    for pattern in ("^(a{1,1000}){1,1000}$", "^(.*a){20}$", "^(a|b)*a(a|b){25}$", "^(x+x+)+y$", _SLOW):
        slow = _object(a={"type": "string", "pattern": pattern})
        yield _called(f"tool, pattern {pattern[:20]}", slow)._replace(may_fail=True)
    objects = [{"type": "object", "properties": {f"k{at}": {"type": "string"}}} for at in range(200)]
    yield _called("tool, anyOf of 200 objects", _object(a={"anyOf": objects}))._replace(may_fail=True)
    yield _called(
        "tool, 1,000 properties", _object(**{f"name{at}": {"type": "string"} for at in range(1_000)})
    )


def _names() -> Iterator[HostileRequest]:
    yield chat(
        "tool, long name", tools=[_tool("n" * 128, _object(a={"type": "string"}))], tool_choice="required"
    )
    yield _called("tool, long property", _object(**{"p" * 50_000: {"type": "string"}}), max_tokens=200)
    yield _called("tool, long const", _object(a={"const": "c" * 20_000}), max_tokens=200)
    yield _called("tool, marks in strings", _object(a={"enum": list(_MARKS)}), max_tokens=200)
    yield _called("tool, marks in names", _object(**{mark: {"type": "string"} for mark in _MARKS}))
    text = "".join(_MARKS) * 500
    yield chat("tool, marks in a description", tools=[_tool("f", _object(), description=text)])
    lists = {"type": "array", "minItems": 40, "items": {"enum": list(_MARKS)}}
    yield _called("tool, list of marks", _object(a=lists), max_tokens=600, stream=True)


def _deep() -> Iterator[HostileRequest]:
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = _object(a=deep)
    yield _called("tool, 200 objects deep", deep, max_tokens=900, stream=True)
    for depth in (1_000, 3_000, _DEEP):
        nested = '{"a":' * depth + "1" + "}" * depth
        body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "a"}]}
        text = json.dumps(body)[:-1]
        call = f'{text},"tools":[{{"type":"function","function":{{"name":"f","parameters":{nested}}}}}]}}'
        yield raw(f"tool schema {depth} deep", CHAT, call.encode())
        strict = call.replace('"name":"f",', '"name":"f","strict":true,')
        yield raw(f"tool schema {depth} deep", CHAT, strict.encode())


def _rows() -> Iterator[HostileRequest]:
    for number in range(64):
        slow = _object(a={"type": "string", "pattern": f"^{number}{_SLOW[1:]}"})
        yield _called("64 slow rows of tools", slow, max_tokens=32)._replace(may_fail=True)


def _choices() -> Iterator[HostileRequest]:
    yield _called(
        "n of 8 with penalties and bias",
        _object(a={"type": "string"}),
        n=8,
        frequency_penalty=2,
        presence_penalty=2,
        repetition_penalty=1.5,
        logit_bias={str(at): 5 for at in range(300)},
        logprobs=True,
        top_logprobs=20,
        max_tokens=200,
    )
