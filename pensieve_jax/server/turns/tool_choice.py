"""Which tools a reply may or must call, and the parameters of a turn that make it so.

Owns: the choice of a request, its check, and its effect on how a reply is sampled and read.
Does not know: the request schema of any one format. Called by `server.openai` and `server.anthropic`.

| choice | effect |
|---|---|
| none | the tools are rendered; a reply is text, and has no mark before calls if that is one token |
| auto | nothing, or with a form, strict tools or allowed ones: the reply is calls of these tools, or text |
| required, or tools by name | the reply is calls, after its reasoning; a form of its text has no effect |

Under auto, arguments of strict tools follow their schemas. Text has the form that the request asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.sampling_params import SamplingParams
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.server.http.errors import invalid_value, unsupported
from pensieve_jax.server.turns.structured import AskedForm
from pensieve_jax.text import ChatFormat
from pensieve_jax.text.reply_forms import form_of_calls, form_with_calls
from pensieve_jax.text.schema_errors import schema_error
from pensieve_jax.text.tools import Tool, tool_names

_FIELDS: Final = {"structured": "tools", "structured.grammar": "tools", "structured.frame": "tools"}
"""Names of fields by the engine's names, where calls are the form of a reply, or beside it."""
_MODES: Final = ("none", "auto", "required")


class ToolChoice(NamedTuple):
    """Which tools a reply may or must call.

    Attributes:
      mode: "none", "auto" or "required".
      names: the tools that may be called; None for all.
      has_one_call: whether the reply ends behind its first call.
      strict: names of tools whose arguments always have the form of their schemas.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: frozenset[str] | None = None
    has_one_call: bool = False
    strict: frozenset[str] = frozenset()


def tool_choice(
    value: Any, names: Collection[str], *, parallel: bool | None, strict: Collection[str] = ()
) -> ToolChoice:
    """Return the choice of a request in OpenAI's form, of either API; raise ApiError 400.

    Args:
      value: the field `tool_choice`; None for the default.
      names: names of the tools of the request.
      parallel: the field `parallel_tool_calls`.
      strict: names of the tools with `strict`.
    """
    field = "tool_choice"
    choice = ToolChoice(has_one_call=parallel is False, strict=frozenset(strict))
    if value is None or value in ("none", "auto"):
        return choice._replace(mode=value or "auto")
    if value == "required":
        return checked_choice(choice._replace(mode="required"), names, field)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        name = _name_of(value)
        found = choice._replace(mode="required", names=frozenset([name]), has_one_call=True)
        return checked_choice(found, names, f"{field}.name" if "name" in value else f"{field}.function.name")
    if kind == "allowed_tools":
        at = f"{field}.allowed_tools" if "allowed_tools" in value else field  # Responses has no inner object
        inner = value.get("allowed_tools", value)
        mode, tools = (
            (inner.get("mode", "auto"), inner.get("tools")) if isinstance(inner, Mapping) else (None, None)
        )
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise invalid_value(at, f"{at} must have the mode auto or required, and a list of tools.")
        allowed = frozenset(_name_of(tool) for tool in tools)
        return checked_choice(choice._replace(mode=mode, names=allowed), names, f"{at}.tools")
    if isinstance(kind, str):
        raise unsupported(field, f"a choice of the type {kind[:40]!r} has no function to call")
    limit = f"one of {', '.join(_MODES)}, or an object with the type function or allowed_tools"
    raise invalid_value(field, f"{field} must be {limit}.")


def with_calls(template_input: TemplateInput, chat_format: ChatFormat, choice: ToolChoice) -> TemplateInput:
    """Return the input of a turn with how its calls are read, and how many it may have."""
    max_calls = 0 if choice.mode == "none" else 1 if choice.has_one_call else None
    return chat_format.with_calls(template_input, max_calls=max_calls)


def with_choice(
    params: SamplingParams, template_input: TemplateInput, choice: ToolChoice, chat_format: ChatFormat | None
) -> SamplingParams:
    """Return the parameters of a turn whose calls are those of a choice; raise ApiError 400.

    `template_input` is the turn's own. The form begins with the reply; `with_placed_form` moves it.
    """
    if chat_format is None or chat_format.tool_format is None or not template_input.tools:
        return params
    if choice.mode == "none":
        return params
    tools = [
        tool
        for tool in template_input.tools
        if choice.names is None or tool["function"]["name"] in choice.names
    ]
    tokenizer, has_one_call = chat_format.tokenizer, choice.has_one_call
    if choice.mode == "required":
        form = form_of_calls(tools, template_input, tokenizer, has_one_call=has_one_call)
        return replace(params, structured=form)
    form_or_calls = form_with_calls(
        params.structured,
        tools,
        template_input,
        tokenizer,
        strict=choice.strict,
        has_one_call=has_one_call,
    )
    return replace(params, structured=form_or_calls)


def form_fields(choice: ToolChoice, asked: AskedForm) -> dict[str, str]:
    """Return the client's names of the fields of a reply's form, by the engine's names."""
    # Where calls are demanded, a form of the text has no effect.
    return {**_FIELDS, **({} if choice.mode == "required" else asked.fields)}


def error_of_calls(
    error: InvalidRequestError, fields: Mapping[str, str], tools: Sequence[Tool], choice: ToolChoice
) -> InvalidRequestError:
    """Return the error of a turn: one about the grammar of its calls names the tool.

    `fields` are those of `form_fields`, and `tools` those of the turn.
    """
    if fields.get(error.field) != "tools" or error.field == "structured":
        return error
    callable_names = set(tool_names(tools)) if choice.names is None else choice.names
    held = callable_names if choice.mode == "required" else callable_names & choice.strict
    return schema_error(error, tools, held) if held else error


def checked_choice(choice: ToolChoice, names: Collection[str], field: str) -> ToolChoice:
    """Return a choice that demands calls of some of the tools `names`; raise ApiError naming `field`."""
    if not names:
        raise invalid_value("tool_choice", "tool_choice demands a call, but tools is empty.")
    for name in choice.names or ():
        if name not in names:
            raise invalid_value(
                field, f"{field} is {name[:100]!r}, but must be the name of one of the tools."
            )
    return choice


def _name_of(value: Any) -> str:
    """Return the name of a function in the form of either API."""
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise invalid_value("tool_choice", "tool_choice must have the name of a function.")
    return name
