"""Templates with tools that have the structure of published ones, and a reading of their replies.

They have the published structure, which decides what stays of a conversation, and none of the text. The
reading is independent of the product's: it takes whole replies apart by regular expressions.
"""

import json
import re

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pensieve_jax.core.outputs import ToolCall
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.text import ReplyReader, Tokenizer
from pensieve_jax.text.replies import ReplyParts
from tests.text.tokenizer_zoo import byte_level_backend

_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
_CALLS = """\
{%- for call in message.tool_calls or [] %}
{%- if call.function %}{% set call = call.function %}{% endif %}
{%- if (loop.first and content) or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
"""
_RESULTS = """\
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
"""
_OTHERS = """\
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
"""
# Hermes 2 Pro and Qwen2.5: replies are written as they were.
HERMES = (
    _TOOLS
    + _OTHERS
    + "{%- set content = message.content or '' %}{{ '<|im_start|>assistant\n' + content }}"
    + _CALLS
    + _RESULTS
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen3: replies after the last question keep their reasoning, earlier ones lose it.
QWEN3 = (
    _TOOLS
    + """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}
{%- set ns.last = messages.index(message) %}
{%- endfor %}
"""
    + _OTHERS
    + """\
{%- set content = message.content if message.content is string else '' %}
{%- set reasoning = message.reasoning_content or '' %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif %}
"""
    + _CALLS
    + _RESULTS
    + """\
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
)
# DeepSeek V3: a call is a message without content, and its arguments are concatenated as text.
DEEPSEEK = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for call in message['tool_calls'] %}
{{- '<|im_start|>' + call['function']['name'] + '\n' + call['function']['arguments'] + '<|im_end|>' }}
{%- endfor %}
{%- else %}{{ '<|im_start|>' + message['role'] + message['content'] + '<|im_end|>' }}{% endif %}
{%- endfor %}
{{- tools | length if tools else '' }}
"""
TEMPLATES = {"hermes": HERMES, "qwen3": QWEN3}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    },
)
WITH_TOOLS = TemplateInput(tools=TOOLS)


def tool_tokenizer(template: str = HERMES) -> Tokenizer:
    """Return a tokenizer whose words <think> and <tool_call> are plain text."""
    return Tokenizer(
        byte_level_backend(SPECIALS), eos_token="<|im_end|>", wants_bos=False, chat_template=template
    )


def call(call_id: str, name: str, arguments: str) -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def read_parts(self: ReplyReader, text: str, template: TemplateInput, *, turn: str = "") -> ReplyParts:
    """Read a whole reply in the form of Hermes and Qwen3, in place of `ReplyReader.parts`."""
    reasoning = re.match(r"\s*<think>\n(.*?)\n</think>\s*", text, re.DOTALL)
    if reasoning:
        text = text[reasoning.end() :]
    calls = []
    if template.tools:
        for found in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL):
            name, arguments = re.match(r'{\s*"name":\s*"(.*?)",\s*"arguments":\s*(.*)}', found).groups()
            calls.append(ToolCall(f"call_{turn}_{len(calls)}", name, arguments))
    content = text.partition("<tool_call>")[0].rstrip() if calls else text
    return ReplyParts(content, reasoning[1] if reasoning else "", calls)


def written(name: str, arguments: str) -> str:
    """Return a call as a model of these families writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def rendered(template: str, messages: list[dict], tools=(), **arguments) -> str:
    """Return what transformers' `apply_chat_template` writes, with arguments of calls as objects."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template).render(
        messages=[_parsed(message) for message in messages],
        tools=list(tools) or None,
        add_generation_prompt=True,
        **arguments,
    )


def _parsed(message: dict) -> dict:
    parsed = dict(message)
    if "tool_calls" in message:
        parsed["tool_calls"] = [
            {
                **one,
                "function": {**one["function"], "arguments": json.loads(one["function"]["arguments"])},
            }
            for one in message["tool_calls"]
        ]
    if "reasoning" in message:
        parsed["reasoning_content"] = message["reasoning"]
    return parsed


def _raise(message: str):
    raise jinja2.TemplateError(message)
