"""Replies with calls in every format, as vLLM's tests of its parsers and published templates write them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Example(NamedTuple):
    """A reply, and what it says and calls."""

    format: str
    text: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


WEATHER = ("get_current_weather", {"city": "San Francisco", "state": "CA", "unit": "celsius"})
ADD = ("add", {"a": 3.5, "b": 4})
SCHEMAS: dict[str, Any] = {
    "calculate_area": {
        "type": "object",
        "properties": {
            "shape": {"type": "string"},
            "dimensions": {"type": "object"},
            "precision": {"type": "integer"},
        },
    },
    **{
        name: {}
        for name in (
            *("get_weather", "get_current_weather", "add", "get_age", "bash", "now", "f"),
            *("register_user", "say"),
        )
    },
}
EXAMPLES = [
    Example(
        "hermes",
        'Hello <tool_call>\n{"name": "get_weather", "arguments": {"city": "SF", '
        '"say": "a \\"}</tool_call>{ b"}}\n</tool_call>',
        "Hello",
        [("get_weather", {"city": "SF", "say": 'a "}</tool_call>{ b'})],
    ),
    Example(
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 3.5, "b": 4}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"name": "John"}, "name": "get_age"}\n</tool_call>',
        "",
        [ADD, ("get_age", {"name": "John"})],
    ),
    Example(
        "hermes",
        '<tool_call>\n{"name": "now"}\n</tool_call>\n\n<tool_call>\n'
        '{"name": "add", "arguments": {"a": 3.5, "b": 4}}\n</tool_call>\nThese two first.\n',
        "These two first.\n",
        [("now", {}), ADD],
    ),
    Example(
        "hermes",
        '<tool_call>{"name": "say", "arguments": "{\\"name\\": \\"x\\"}"}</tool_call>',
        "",
        [("say", {"name": "x"})],
    ),
    Example("hermes", "a <tool_cal is no call, nor <tool", "a <tool_cal is no call, nor <tool", []),
    Example(
        "hermes",
        'Write <tool_call> and a name. <tool_call>\n{"answer": 1}\n</tool_call>',
        'Write <tool_call> and a name. <tool_call>\n{"answer": 1}\n</tool_call>',
        [],
    ),
    Example("mistral_v3", '[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3.5, "b": 4} } ]', "", [ADD]),
    Example(
        "mistral_v3",
        'Hello[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3.5, "b": 4}}, {"arguments":{"city": '
        '"San Francisco", "state": "CA", "unit": "celsius"}, "name": "get_current_weather"}]',
        "Hello",
        [ADD, WEATHER],
    ),
    Example(
        "mistral",
        '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]get_current_weather[ARGS]{"city": '
        '"San Francisco", "state": "CA", "unit": "celsius"}',
        "",
        [ADD, WEATHER],
    ),
    Example(
        "mistral",
        'hi{hi[TOOL_CALLS]bash[CALL_ID]abcDEF123[ARGS]{"command": '
        '"print(\\"hello world!\\")\\nre.compile(r\'{}\')"}',
        "hi{hi",
        [("bash", {"command": "print(\"hello world!\")\nre.compile(r'{}')"})],
    ),
    Example(
        "qwen3_xml",
        "Sure! Let me check the weather for you.<tool_call>\n<function=get_current_weather>\n"
        "<parameter=city>\nSan Francisco\n</parameter>\n<parameter=state>\nCA\n</parameter>\n"
        "<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>",
        "Sure! Let me check the weather for you.",
        [WEATHER],
    ),
    Example(
        "qwen3_xml",
        "<tool_call>\n<function=calculate_area>\n<parameter=shape>\nrectangle\n</parameter>\n"
        '<parameter=dimensions>\n{"width": 10, \n "height": 20}\n</parameter>\n<parameter=precision>\n'
        "2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        [
            (
                "calculate_area",
                {"shape": "rectangle", "dimensions": {"width": 10, "height": 20}, "precision": 2},
            ),
            ("now", {}),
        ],
    ),
    Example(
        "deepseek_v3",
        "Let me check.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Tokyo", "path": "C:\\\\Users\\\\x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me check.",
        [("get_weather", {"city": "Tokyo", "path": "C:\\Users\\x"}), ("now", {})],
    ),
    Example(
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 3.5, "b": 4}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [ADD, ("now", {})],
    ),
    Example(
        "harmony",
        "<|channel|>analysis<|message|>Let me add.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 3.5, "b": 4}<|call|>',
        "",
        [ADD],
    ),
    Example(
        "harmony",
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}",
        "I look it up.",
        [("now", {})],
    ),
    Example(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 3.5, "b": 4}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "",
        [ADD, ("now", {})],
    ),
    Example(
        "llama3_json",
        '<|python_tag|>{"name": "add", "parameters": {"a": 3.5, "b": 4}}; {"name": "get_current_weather", '
        '"parameters": {"city": "San Francisco", "state": "CA", "unit": "celsius"}}',
        "",
        [ADD, WEATHER],
    ),
    Example("llama3_json", "No { here is a call.", "No { here is a call.", []),
    Example(
        "llama3_json",
        '{"name": "Bob", "parameters": {"age": 4}} is no tool.',
        '{"name": "Bob", "parameters": {"age": 4}} is no tool.',
        [],
    ),
    Example(
        "pythonic",
        "[get_weather(city='Martha\\'s Vineyard', metric='\\\"cool units\\\"'), f(), register_user("
        "name='John Doe', age=37, address={'city': 'SF'}, role=None, ok=true, aliases=['J'])]",
        "",
        [
            ("get_weather", {"city": "Martha's Vineyard", "metric": '"cool units"'}),
            ("f", {}),
            (
                "register_user",
                {
                    "name": "John Doe",
                    "age": 37,
                    "address": {"city": "SF"},
                    "role": None,
                    "ok": True,
                    "aliases": ["J"],
                },
            ),
        ],
    ),
    Example("pythonic", "[1, 2] and [link](x) are no calls", "[1, 2] and [link](x) are no calls", []),
]
