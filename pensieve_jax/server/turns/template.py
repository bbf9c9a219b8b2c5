"""The request fields that decide how messages are rendered, as all API formats use them.

Owns: tools, template arguments, reasoning efforts and prefills of a request as one `TemplateInput`.
Does not know: the request schema of any one format, or how a template renders. Called by `server.openai` and
`server.operations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pensieve_jax.core.json_values import json_copy
from pensieve_jax.core.template_input import NO_INPUT, TemplateInput
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import invalid_value, unsupported
from pensieve_jax.text import ChatFormat, Message
from pensieve_jax.text.messages import prefill_of
from pensieve_jax.text.tools import Tool, check_tools

HOSTED_TOOLS: Final = frozenset(
    {
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "computer_use"),
        *("computer_use_preview", "image_generation", "mcp", "local_shell", "shell", "apply_patch"),
    }
)
"""Tools that OpenAI's server runs itself."""
LEAVES_OUT: Final = "`pensieve serve --tools=functions` leaves out tools that are not functions"
_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables with which templates switch reasoning on and off."""
_REASONS: Final = ("<think>", "reasoning_content", "reasoning_effort")
"""Words of templates for models that reason."""


class FunctionDefinition(Body):
    """The function of a tool. Templates do not get `strict`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A tool in the form of Chat Completions."""

    type: str
    function: FunctionDefinition | None = None


def checked_tools(tools: Sequence[FunctionTool], field: str = "tools") -> tuple[Tool, ...]:
    """Return the tools of a request as templates read them; raise ApiError or InvalidRequestError."""
    values = []
    for index, tool in enumerate(tools):
        check_kind(tool.type, f"{field}[{index}].type")
        if tool.function is None:
            raise invalid_value(f"{field}[{index}].function", f"{field}[{index}].function is missing.")
        function = tool.function
        values.append(
            {
                "function": {
                    "name": function.name,
                    "description": function.description,
                    "parameters": function.parameters,
                }
            }
        )
    return check_tools(values, field)


def check_kind(kind: str, field: str) -> None:
    """Raise ApiError 400 for a kind of tools other than functions, by its name."""
    if kind == "function":
        return
    if kind in HOSTED_TOOLS:
        raise unsupported(field, f"the server runs no tools itself, such as {kind}; {LEAVES_OUT}")
    raise unsupported(field, f"tools must be of the type function, not {kind[:40]}; {LEAVES_OUT}")


def template_input(
    chat_format: ChatFormat | None,
    *,
    tools: tuple[Tool, ...] = (),
    arguments: Mapping[str, Any] | None = None,
    effort: str | None = None,
    effort_field: str = "reasoning_effort",
    prefill: str | None = None,
    generation_prompt: bool = True,
) -> TemplateInput:
    """Return the input of a rendering, whose reply may call the tools.

    Args:
      chat_format: the model's chat template; None without one, which the resolver refuses.
      tools: the tools of the request.
      arguments: its `chat_template_kwargs`.
      effort: its reasoning effort; "none" switches reasoning off. See `ignores_effort`.
      effort_field: the name of the field with the effort.
      prefill, generation_prompt: see `TemplateInput`.

    Raises ApiError 400 and InvalidRequestError for what the template does not read.
    """
    given = TemplateInput(
        tools,
        {} if arguments is None else json_copy(arguments, "chat_template_kwargs"),
        prefill,
        generation_prompt=generation_prompt,
    )
    if chat_format is None:
        return given
    if tools and not chat_format.reads("tools"):
        why = "the model's chat template takes no tools"
        raise unsupported("tools", f"{why}; `pensieve serve --tools=ignore` accepts them without effect")
    if tools and chat_format.tool_format is None:
        why = "the chat template has the words of no known format of tool calls"
        hint = "name it with `pensieve serve --tool_call_parser`, or let --tools=ignore accept tools"
        raise unsupported("tools", f"{why}; {hint} without effect")
    if given != NO_INPUT:
        chat_format.check_input(given, arguments_field="chat_template_kwargs")
    for name, value in (_effort_arguments(chat_format, effort) or {}).items():
        if given.arguments.setdefault(name, value) != value:
            sentence = f"{effort_field} and chat_template_kwargs.{name} contradict each other; give only one."
            raise invalid_value(effort_field, sentence)
    return given


def ignores_effort(chat_format: ChatFormat | None, effort: str | None) -> bool:
    """Return whether a request asks for a reasoning effort that the template has no words for."""
    return chat_format is not None and _effort_arguments(chat_format, effort) is None


def _effort_arguments(chat_format: ChatFormat, effort: str | None) -> dict[str, Any] | None:
    """Return the variables of the template that a reasoning effort sets; None if it has none for it."""
    if effort is None:
        return {}
    if effort == "none":
        for name in _SWITCHES:
            if chat_format.reads(name):
                return {name: False}
        if not chat_format.mentions(_REASONS):
            return {}  # the model does not reason
    return {"reasoning_effort": effort} if chat_format.reads("reasoning_effort") else None


def divided(
    messages: Sequence[Message], *, continues: bool, field: str = "continue_final_message"
) -> tuple[list[Message], str | None]:
    """Return the messages before the reply, and the beginning of the reply if the last message is that.

    Raises ApiError 400 naming `field` if the last message cannot be continued.
    """
    if not continues:
        return list(messages), None
    prefill = prefill_of(messages)
    if prefill is None:
        sentence = f"{field} needs a text of the assistant alone as the last message, after another message."
        raise invalid_value(field, sentence)
    return list(messages[:-1]), prefill
