"""Rows are chosen by name, or by the words of a chat template."""

from __future__ import annotations

import pytest

from pensieve_jax.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format

# The parts of published templates that write calls.
TEMPLATES = {
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}',
    "qwen3_xml": "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n<parameter=' }}</tool_call>",
    "llama3_json": '{{- \'Respond in the format {"name": function name, "parameters": dictionary of '
    "argument name and its value}. ' }}",
    "pythonic": "Respond in the format [func_name1(params_name1=params_value1...), func_name2(params)]",
    "mistral": "{{- '[TOOL_CALLS]' + tool.function.name + '[ARGS]' + arguments }}",
    "mistral_v3": '{{- "[TOOL_CALLS] [" }}',
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
    "tool['function']['name'] + '\\n' + '```json' + '\\n'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'",
    "kimi_k2": "<|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>",
    "harmony": '"<|start|>assistant to=functions." + name + "<|channel|>commentary json<|message|>"',
}
GLM = "<tool_call>{{ tc.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value></tool_call>"


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_template_has_the_words_of_its_row(name: str) -> None:
    found = tool_format("auto", TEMPLATES[name])
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("template", [GLM, "{{ messages }}", None])
def test_other_templates_have_no_row(template: str | None) -> None:
    assert tool_format("auto", template) is None
    assert reasoning_format("auto", template) is None


def test_the_configuration_names_all_rows() -> None:
    assert ("auto", "none", *TOOL_FORMATS) == TOOL_CALL_PARSERS
    assert ("auto", "none", *REASONING_FORMATS) == REASONING_PARSERS


def test_quotes_may_be_escaped_in_a_template() -> None:
    escaped = TEMPLATES["llama3_json"].replace('"', '\\"')
    assert tool_format("auto", escaped) == TOOL_FORMATS["llama3_json"]


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("think", "{% if '</think>' in content %}"),
        ("mistral", "[THINK]"),
        ("harmony", "analysis<|channel|><|message|>"),
    ],
)
def test_reasoning_is_found_by_its_marks(name: str, template: str) -> None:
    found = reasoning_format("auto", template)
    assert found is not None
    assert found.name == name


def test_a_name_forces_a_row_and_none_switches_off() -> None:
    assert tool_format("pythonic", None) == TOOL_FORMATS["pythonic"]
    assert tool_format("none", TEMPLATES["hermes"]) is None
    assert reasoning_format("none", "</think>") is None


@pytest.mark.parametrize("choose", [tool_format, reasoning_format])
def test_an_unknown_name_is_refused(choose) -> None:
    with pytest.raises(ConfigError, match="one of auto, none, "):
        choose("xml", None)
