"""Requests that are made to slow a server down or to end it.

Owns: their names, routes and bodies.
Does not know: how they are sent, or what they do to a server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pensieve_lab.hostile.request import (
    CHAT,
    COMPLETIONS,
    HostileRequest,
    asked,
    chat,
    raw,
    request,
)
from pensieve_lab.hostile.tool_requests import tool_requests

_DEEP: Final = 100_000


def hostile_requests() -> Mapping[str, list[HostileRequest]]:
    """Return all requests by their group; those of one attack follow each other and have one name."""
    return {
        "forms": list(_forms()),
        "options": list(_options()),
        "tools": list(tool_requests()),
        "messages": list(_messages()),
        "bodies": list(_bodies()),
        "scores": list(_scores()),
        "replies": list(_replies()),
    }


def _forms() -> Iterator[HostileRequest]:
    """Yield forms of replies that take long to compile or to follow."""
    yield asked("enum of 20,000", "json", {"enum": [f"{number:x}" for number in range(20_000)]})
    yield asked("enum of 5,000", "json", {"enum": [f"value {number}" for number in range(4_000)]})
    yield asked("choice of 5,000", "choice", [f"choice {number}" for number in range(4_000)])
    objects = [
        {
            "type": "object",
            "properties": {f"k{inner}": {"type": "string"} for inner in range(at % 7, at % 7 + 5)},
        }
        for at in range(300)
    ]
    yield asked("anyOf of 300 objects", "json", {"anyOf": objects})
    few = [{"type": "object", "properties": {f"k{at}": {"type": "string"}}} for at in range(60)]
    yield asked("anyOf of 60 objects", "json", {"anyOf": few})
    for pattern in (
        "(a{1,1000}){1,1000}",
        "(.*a){20}",
        "(a|b)*a(a|b){25}",
        "(a|b)*a(a|b){12}",
        "(x+x+)+y",
        r"(\w{1,200} ){1,200}",
        "a" * 60_000,
        "(" * 30_000 + ")" * 30_000,
        "(a?){20000}a{20000}",
        "[^a]" * 16_000,
        "|".join(f"{at:x}" for at in range(11_000)),
        r"\p{L}{1,5000}",
        "((a{0,99}){0,99}){0,99}",
    ):
        yield asked(f"regex {pattern[:24]}", "regex", pattern)._replace(may_fail=True)
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    yield asked("300 objects deep", "json", deep)
    lists: Any = {"type": "integer"}
    for _ in range(900):
        lists = {"items": lists}
    yield asked("900 lists deep", "json", lists)
    text = '{"items":' * 7_000 + "true" + "}" * 7_000
    yield asked("schema text 7,000 deep", "json", text)
    body = b'{"model":"chat","messages":[{"role":"user","content":"a"}],"structured_outputs":{"json":'
    nested = b'{"a":' * _DEEP + b"1" + b"}" * _DEEP
    yield raw("schema 100,000 deep", CHAT, body + nested + b"}}")
    yield asked("$ref to itself", "json", {"$ref": "#"})
    yield asked(
        "$ref recursion",
        "json",
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    )
    defs: dict[str, Any] = {"d0": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    for at in range(1, 30):
        part = {"$ref": f"#/$defs/d{at - 1}"}
        defs[f"d{at}"] = {"allOf": [part, {"anyOf": [part, part]}]}
    yield asked("allOf explosion", "json", {"$defs": defs, "$ref": "#/$defs/d29"})
    both: list[dict[str, Any]] = [
        {"anyOf": [{"properties": {f"{at}{kind}": {}}} for kind in "abc"]} for at in range(14)
    ]
    yield asked("allOf of anyOf", "json", {"type": "object", "allOf": both})
    yield asked(
        "pattern in a schema", "json", {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}
    )._replace(may_fail=True)
    counts = {"type": "array", "items": {"type": "integer"}, "minItems": 100_000, "maxItems": 100_000}
    yield asked("maxItems 100,000", "json", counts)
    yield asked("maxLength 1,000,000", "json", {"type": "string", "maxLength": 1_000_000})
    yield asked("minLength 1,000,000", "json", {"type": "string", "minLength": 1_000_000})
    wide = {f"name{at}": {"type": "string"} for at in range(2_000)}
    yield asked("2,000 properties", "json", {"type": "object", "properties": wide})
    yield asked("2,000 required", "json", {"type": "object", "properties": wide, "required": [*wide][:1_500]})
    yield asked(
        "number of limits",
        "json",
        {"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-9},
    )
    yield asked("GBNF behind empty lines", "grammar", 'root ::= "a"' + "\n" * 60_000)
    yield asked("large multipleOf", "json", {"type": "integer", "multipleOf": 999_999_937})
    yield asked(
        "integer of limits",
        "json",
        {"type": "integer", "minimum": -(10**18), "maximum": 10**18, "multipleOf": 9999991},
    )
    for rules in (
        'start: s\ns: s s | "a" | "b" | ""',
        'start: s\ns: s s s | s s | /./ | ""',
        "start: start start | /[a-z ]+/",
        'start: (a|b|c)*\na: "x"*\nb: "x"*\nc: "x"*',
        "start: " + " ".join("A" for _ in range(8_000)) + "\nA: /a?/",
        "start: r0\n" + "\n".join(f"r{at}: r{at + 1} r{at + 1}" for at in range(40)) + '\nr40: "a"?',
        "start: a0\n" + "\n".join(f'a{at}: a{at + 1} | "x{at}"' for at in range(2_500)) + '\na2500: "y"',
        "start: T\nT: /(.|\\n){0,30000}a(.|\\n){0,30000}/",
        "start: x\nx: y\ny: x",
        "start: @a",
        "start: %json " + json.dumps({"enum": [str(at) for at in range(6_000)]}),
        "root ::= root root | [a-z] | root",
        'root ::= "(" root ")" | root "+" root | [0-9]*',
        "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000,
        "root ::= [a-z]{1,100000}",
        "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
    ):
        yield asked(f"grammar {' '.join(rules.split())[:24]}", "grammar", rules)._replace(may_fail=True)
    for number in range(200):
        names = {f"p{number}_{at}": {"type": "string", "maxLength": 9} for at in range(60)}
        yield asked("200 schemas at once", "json", {"type": "object", "properties": names}, max_tokens=4)
    for number in range(64):
        slow = asked("64 slow grammars", "grammar", f'start: s\ns: s s | "a" | "b" | "" | "{number}"')
        yield slow._replace(may_fail=True)


def _options() -> Iterator[HostileRequest]:
    """Yield long lists of sampling options."""
    yield chat("logit_bias of 100,000", logit_bias={str(at): 1 for at in range(100_000)})
    yield chat("logit_bias of 300", logit_bias={str(at): 1 for at in range(300)})
    yield chat("logit_bias of big keys", logit_bias={"9" * 5_000: 1})
    yield chat("bad_words of 10,000", bad_words=[f"word {at}" for at in range(10_000)])
    yield chat("bad_words, long", bad_words=["a" * 20_000 + str(at) for at in range(64)])
    yield chat("stop of 10,000", stop=[f"stop {at}" for at in range(10_000)])
    yield chat("stop, long", stop=["a" * 100_000 + str(at) for at in range(4)])
    yield chat("stop_token_ids", stop_token_ids=list(range(100_000)))
    yield chat("allowed_token_ids", allowed_token_ids=list(range(4_000)) * 50)
    yield chat(
        "n of 8 with penalties",
        n=8,
        frequency_penalty=2,
        repetition_penalty=1.3,
        logprobs=True,
        top_logprobs=20,
    )


def _messages() -> Iterator[HostileRequest]:
    """Yield histories of hostile calls, and hostile arguments of templates."""

    def history(arguments: str, num_calls: int = 1) -> list[dict[str, Any]]:
        calls = [
            {"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": arguments}}
            for at in range(num_calls)
        ]
        results = [{"role": "tool", "tool_call_id": f"c{at}", "content": "1"} for at in range(num_calls)]
        return [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}, *results]

    for depth in (900, 1_200, 1_480, 2_900, 5_000, _DEEP):
        yield chat(
            f"call arguments {depth} deep", messages=history('{"a":' + "[" * depth + "]" * depth + "}")
        )
        yield chat(f"call arguments {depth} deep", messages=history('{"a":' * depth + "1" + "}" * depth))
    yield chat("4,000 calls", messages=history('{"a": 1}', 4_000))
    yield chat("2,000 calls", messages=history('{"a": 1}', 2_000))
    yield chat("long arguments", messages=history(json.dumps({"a": "x" * 1_000_000})))
    yield chat("long number", messages=history('{"a": ' + "9" * 200_000 + "}"))
    yield chat("1,500 messages", messages=[{"role": "user", "content": "a"}] * 1_500)
    yield chat("many parts", messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 4_096}])
    for name in (
        "messages",
        "tools",
        "raise_exception",
        "bos_token",
        "strftime_now",
        "range",
        "self",
        "__class__",
    ):
        yield chat("template names", chat_template_kwargs={name: "x"})
    for depth in (500, 1_200, 5_000, _DEEP):
        body = b'{"model":"chat","messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":'
        nested = b"[" * depth + b"]" * depth
        yield raw("template arguments, deep", CHAT, body + nested + b"}}")
    yield chat("template arguments, huge", chat_template_kwargs={f"a{at}": at for at in range(50_000)})
    for depth in (1_200, 5_000, _DEEP):
        start = b'{"model":"chat","max_tokens":8,"messages":[{"role":"user","content":['
        nested = b'{"type":"tool_result","tool_use_id":"a","content":[' * depth + b"]}" * depth
        yield raw("Anthropic, deep content", "/v1/messages", start + nested + b"]}]}")
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        call = b'{"type":"tool_use","id":"a","name":"f","input":' + nested + b"}"
        body = start.replace(b'"user"', b'"assistant"') + call + b"]}]}"
        yield raw("Anthropic, deep input", "/v1/messages", body)
    uses = [{"type": "tool_use", "id": f"t{at}", "name": "f", "input": {"a": at}} for at in range(2_000)]
    results = [{"type": "tool_result", "tool_use_id": f"t{at}", "content": "1"} for at in range(2_000)]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
    ]
    yield request("Anthropic, 2,000 calls", "/v1/messages", max_tokens=8, messages=messages)
    for depth in (1_200, 5_000):
        nested_text = '{"a":' * depth + "1" + "}" * depth
        items = [
            {"type": "message", "role": "user", "content": "a"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": nested_text},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ]
        yield request("Responses, deep arguments", "/v1/responses", input=items, max_output_tokens=8)


def _bodies() -> Iterator[HostileRequest]:
    """Yield bodies of almost 10 MB, the largest that are read."""
    start = b'{"model":"chat","max_tokens":8,"messages":[{"role":"user","content":"a"}],'
    for name, one in {
        "lists": b"[],",
        "objects": b'{"a":1},',
        "numbers": b"1,",
        "strings": b'"ab",',
    }.items():
        values = b"[" + (one * (9_500_000 // len(one)))[:-1] + b"]"
        for field in (b"metadata", b"unknown", b"chat_template_kwargs", b"logit_bias", b"stop"):
            given = b'{"enable_thinking":' + values + b"}" if field == b"chat_template_kwargs" else values
            yield raw(f"10 MB of {name}", CHAT, start + b'"' + field + b'":' + given + b"}")
    yield chat("10 MB of text", messages=[{"role": "user", "content": "word " * 1_900_000}])
    yield request("10 MB of prompt ids", COMPLETIONS, prompt=[5] * 3_000_000, max_tokens=1)
    yield request("10 MB of prompt", COMPLETIONS, prompt="word " * 1_900_000, max_tokens=1)
    surrogates = start + b'"user":"' + b"x" * 9_000_000 + b'\\ud800"}'
    yield raw("10 MB and half a character", CHAT, surrogates)


def _scores() -> Iterator[HostileRequest]:
    """Yield prompts whose log-probabilities are asked for, short ones and ones of most of the context."""
    text = "The sea is wide and the day is long. " * 3_000
    for _ in range(2):
        for characters in (2_500, 30_000):
            long = text[:characters]
            name = f"{characters:,} characters"
            yield request(
                f"echo with logprobs, {name}", COMPLETIONS, prompt=long, echo=True, logprobs=20, max_tokens=1
            )
            yield request(
                f"echo alone, {name}", COMPLETIONS, prompt=long, echo=True, logprobs=5, max_tokens=0
            )
            yield request(
                f"prompt_logprobs, {name}", COMPLETIONS, prompt=long, prompt_logprobs=20, max_tokens=1
            )
            messages = [{"role": "user", "content": long}]
            yield chat(f"prompt_logprobs, {name}", messages=messages, prompt_logprobs=20)
    many = [text[:800]] * 64
    yield request("64 prompts", COMPLETIONS, prompt=many, echo=True, logprobs=20, max_tokens=0)


def _replies() -> Iterator[HostileRequest]:
    """Yield replies of pathological text, read for calls of tools."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    yield chat("long reply", max_tokens=2_000, ignore_eos=True)
    yield chat("long reply with logprobs", max_tokens=2_000, ignore_eos=True, logprobs=True, top_logprobs=20)
    for pattern in (
        "<{900}",
        r"\[{900}",
        "( |\\n){900}",
        '<tool_call>\\{"name": "f", "arguments": \\{"a": "[a-z]{900}',
        '<tool_call>\\{"name": \\[{900}',
        '<tool_call>\\{"arguments": \\{"a": "[ ]{900}',
        "<think>{300}",
        "(<tool_call>x){300}",
        '(<tool_call>\\{"name": "f", "arguments": \\{\\}\\}</tool_call>){60}',
    ):
        yield asked(f"reply {pattern[:30]}", "regex", pattern, tools=tools, max_tokens=900, stream=True)
