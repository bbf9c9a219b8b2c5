"""What the chat template gets beside the messages of a request.

Owns: the tools, the beginning of the reply, and how the model is told to think.
Does not know: how blocks become messages (`anthropic.context`), or how templates use these values.
"""

from __future__ import annotations

from typing import Any, Final

from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.server.anthropic.context import Context
from pensieve_jax.server.anthropic.schemas import ContextFields
from pensieve_jax.server.http.errors import ApiError, invalid_value, unsupported
from pensieve_jax.text import ChatFormat, check_tools

_THINKING: Final = ("enable_thinking", "thinking")
"""Names of the variable by which templates switch reasoning on."""
_EFFORT: Final = "reasoning_effort"
_STRONGEST: Final = "high"
"""The strongest effort that templates know."""


def template_input_of(body: ContextFields, context: Context, chat_format: ChatFormat | None) -> TemplateInput:
    """Return what the template gets; raise ApiError and InvalidRequestError naming the field.

    Without a chat format the resolver refuses every context, so nothing more is checked.
    """
    choice = body.tool_choice
    _check_choice(body, [tool["function"]["name"] for tool in context.tools])
    template_input = TemplateInput(
        tools=check_tools(context.tools),
        arguments={} if chat_format is None else _arguments(body, chat_format),
        prefill=context.prefill,
    )
    if chat_format is None:
        return template_input
    chat_format.check_input(template_input, arguments_field="thinking")
    if choice is not None and choice.type == "none":
        return template_input
    has_one_call = choice is not None and bool(choice.disable_parallel_tool_use)
    return chat_format.with_calls(template_input, has_one_call=has_one_call)


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
    if choice.type in ("any", "tool"):
        raise unsupported("tool_choice", "the model may always choose to call no tool")
