"""What the chat template gets beside the messages of a request.

Owns: the tools, the beginning and the form of the reply, and how the model is told to think.
Does not know: how blocks become messages (`anthropic.context`), or how templates use these values.
"""

from __future__ import annotations

from typing import Any, Final

from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.server.anthropic.context import Context
from pensieve_jax.server.anthropic.schemas import ContextFields, MessagesBody
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.turns.structured import AskedForm, asked_schema
from pensieve_jax.server.turns.template import template_input
from pensieve_jax.server.turns.tool_choice import ToolChoice, checked_choice, with_calls
from pensieve_jax.text import ChatFormat, check_tools

_THINKING: Final = ("enable_thinking", "thinking")
"""Names of the variable by which templates switch reasoning on."""
_STRONGEST: Final = "high"
"""The strongest effort that templates know."""


def template_input_of(
    body: ContextFields, context: Context, chat_format: ChatFormat | None, choice: ToolChoice
) -> TemplateInput:
    """Return what the template gets; raise ApiError and InvalidRequestError naming the field."""
    given = template_input(
        chat_format,
        tools=check_tools(context.tools),
        arguments={} if chat_format is None else _arguments(body, chat_format),
        effort=effort_of(body),
        effort_field="output_config.effort",
        prefill=context.prefill,
    )
    return given if chat_format is None else with_calls(given, chat_format, choice)


def choice_of(body: ContextFields, context: Context) -> ToolChoice:
    """Return which tools the reply may or must call; raise ApiError naming the field."""
    given = body.tool_choice
    if given is None:
        return ToolChoice(strict=context.strict)
    has_one_call = bool(given.disable_parallel_tool_use)
    if given.type in ("auto", "none"):
        return ToolChoice(given.type, has_one_call=has_one_call, strict=context.strict)
    names = None
    if given.type == "tool":
        if given.name is None:
            raise ApiError(
                400, "missing_required_parameter", "tool_choice.name is missing.", param="tool_choice.name"
            )
        names = frozenset([given.name])
    choice = ToolChoice("required", names, has_one_call=has_one_call)
    return checked_choice(choice, [tool["function"]["name"] for tool in context.tools], "tool_choice.name")


async def asked_form(call: HttpRequest, body: MessagesBody) -> AskedForm:
    """Return the form that a message asks for; raise ApiError naming the field."""
    config_format = None if body.output_config is None else body.output_config.format
    given = config_format or body.output_format
    at = "output_format" if config_format is None else "output_config.format"
    return await asked_schema(call, None if given is None else given.schema, f"{at}.schema")


def effort_of(body: ContextFields) -> str | None:
    """Return the reasoning effort of a request as templates know it."""
    effort = None if body.output_config is None else body.output_config.effort
    return _STRONGEST if effort in ("xhigh", "max") else effort


def _arguments(body: ContextFields, chat_format: ChatFormat) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "between_tools":
        thinks = body.thinking.type != "disabled"
        arguments |= {name: thinks for name in _THINKING if chat_format.reads(name)}
    return arguments
