"""What the chat template gets beside the messages of a request.

Owns: the tools, the beginning and the form of the reply, and how the model is told to think.
Does not know: how blocks become messages (`anthropic.context`), or how templates use these values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pensieve_jax.core.structured import StructuredOutput
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.server.anthropic.context import Context
from pensieve_jax.server.anthropic.schemas import ContextFields, MessagesBody
from pensieve_jax.server.http.errors import ApiError, invalid_value, renamed_fields, unsupported
from pensieve_jax.server.turns.template import template_input
from pensieve_jax.text import ChatFormat, Tokenizer, check_tools
from pensieve_jax.text.reply_forms import form_of_calls

_THINKING: Final = ("enable_thinking", "thinking")
"""Names of the variable by which templates switch reasoning on."""
_EFFORT: Final = "reasoning_effort"
_STRONGEST: Final = "high"
"""The strongest effort that templates know."""


def template_input_of(body: ContextFields, context: Context, chat_format: ChatFormat | None) -> TemplateInput:
    """Return what the template gets; raise ApiError and InvalidRequestError naming the field."""
    choice = body.tool_choice
    _check_choice(body, [tool["function"]["name"] for tool in context.tools])
    given = template_input(
        chat_format,
        tools=check_tools(context.tools),
        arguments={} if chat_format is None else _arguments(body, chat_format),
        prefill=context.prefill,
    )
    if choice is None or not given.reply.calls:
        return given
    if choice.type == "none":
        return replace(given, reply=replace(given.reply, calls=""))
    has_one_call = bool(choice.disable_parallel_tool_use)
    return replace(given, reply=replace(given.reply, has_one_call=has_one_call))


class AskedForm(NamedTuple):
    """The form that a request asks for, and the paths of its fields by the engine's names, for errors."""

    form: StructuredOutput | None = None
    fields: Mapping[str, str] = MappingProxyType({})


def asked_form(body: MessagesBody, template: TemplateInput, tokenizer: Tokenizer | None) -> AskedForm:
    """Return the form that a request asks for; raise ApiError and InvalidRequestError naming the field."""
    config_format = None if body.output_config is None else body.output_config.format
    given = config_format or body.output_format
    choice = body.tool_choice
    demands_call = choice is not None and choice.type in ("any", "tool")
    if choice is not None and demands_call:
        if tokenizer is None or not template.reply.calls:
            raise unsupported("tool_choice", "it is not known how the model writes calls")
        if given is not None:
            sentence = (
                "tool_choice demands a call, so the reply cannot have the form of output_config.format."
            )
            raise invalid_value("tool_choice", sentence)
        names = None if choice.name is None or choice.type == "any" else [choice.name]
        return AskedForm(form_of_calls(template, tokenizer, names), {"structured": "tools"})
    if given is None:
        return AskedForm()
    at = "output_format" if config_format is None else "output_config.format"
    fields = {"structured.json_schema": f"{at}.schema", "structured": at}
    with renamed_fields(fields):
        return AskedForm(StructuredOutput.json_schema(given.schema), fields)


def ignores_effort(body: ContextFields, chat_format: ChatFormat | None) -> bool:
    """Return whether the request asks for an effort that the template has no words for."""
    effort = None if body.output_config is None else body.output_config.effort
    return effort is not None and (chat_format is None or not chat_format.reads(_EFFORT))


def _arguments(body: ContextFields, chat_format: ChatFormat) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "between_tools":
        thinks = body.thinking.type != "disabled"
        arguments |= {name: thinks for name in _THINKING if chat_format.reads(name)}
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and chat_format.reads(_EFFORT):
        arguments[_EFFORT] = _STRONGEST if effort in ("xhigh", "max") else effort
    return arguments


def _check_choice(body: ContextFields, names: list[str]) -> None:
    """Raise ApiError for a choice that the tools do not allow."""
    choice = body.tool_choice
    if choice is None:
        return
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(
                400, "missing_required_parameter", "tool_choice.name is missing.", param="tool_choice.name"
            )
        if choice.name not in names:
            sentence = f"tool_choice.name is {choice.name!r}, but must be the name of one of the tools."
            raise invalid_value("tool_choice.name", sentence)
    if choice.type == "any" and not names:
        raise invalid_value("tool_choice", "tool_choice demands a call, but tools is empty.")
