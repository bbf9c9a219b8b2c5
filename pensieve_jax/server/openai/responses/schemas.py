"""The request bodies of the Responses API, and the items that clients send.

Owns: `CreateResponse`, the limits of its fields, and the fields that a response echoes; the items and content
parts that a request may have, and their conversion to the stored form.
Does not know: turns, engines, how ids are made, or where anything is stored.
Called by the other modules of `openai.responses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from pensieve_jax.core.sampling_params import RESPONSES, refused_fields
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.history.server_tables.reply_items import call_item, reasoning_item
from pensieve_jax.server.http.bodies import MAX_IGNORED, Body, check_num_items, convert
from pensieve_jax.server.http.errors import ApiError, invalid_value, renamed_fields, unsupported
from pensieve_jax.server.turns.checks import check_metadata
from pensieve_jax.server.turns.items import Item, output_item, stored_item
from pensieve_jax.server.turns.sampling import (
    MISSPELLED,
    TEMPLATE_FIELDS,
    UNSUPPORTED_SAMPLING,
    UNSUPPORTED_TEMPLATE,
    Seed,
)
from pensieve_jax.server.turns.stored import default_echo
from pensieve_jax.server.turns.structured import StructuredFields, TextFormat
from pensieve_jax.server.turns.template import check_kind, template_input
from pensieve_jax.server.turns.tool_choice import ToolChoice, tool_choice, with_calls
from pensieve_jax.text import ChatFormat, Tool
from pensieve_jax.text.messages import check_arguments
from pensieve_jax.text.tools import function_tool

LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDES: Final = (
    LOGPROBS,
    # Accepted without effect: they ask for more fields of items that this server never makes.
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url"),
    *("code_interpreter_call.outputs", "reasoning.encrypted_content"),
)
_FORMS_OF_CHATS: Final = tuple(StructuredFields.__struct_fields__[1:])
MAX_ITEMS_OF_A_POST: Final = 20
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "reasoning_text")
_KINDS: Final = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_PARTS_WITHOUT_TEXT: Final = ("input_image", "input_file", "input_audio", "computer_screenshot")


_SUMMARIES: Final = (None, "auto", "concise", "detailed")


class Reasoning(Body, kw_only=True):
    """The `reasoning` field of a request. Nothing is summarized, so `summary` has no effect."""

    UNSUPPORTED = {"generate_summary": _SUMMARIES, "mode": ()}  # noqa: RUF012 - a ClassVar of the base class

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseTool(Body, kw_only=True):
    """A tool in the form of the Responses API. Templates do not get `strict`."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseStreamOptions(Body, kw_only=True):
    """Stream options of a response; they have no effect."""

    IGNORED = frozenset({"include_obfuscation"})


class TextConfig(Body, kw_only=True):
    """The `text` field of a request."""

    UNSUPPORTED = {"verbosity": ("medium",)}  # noqa: RUF012 - a ClassVar of the base class

    format: TextFormat | None = None


class ConversationRef(Body, kw_only=True):
    """A conversation by its id."""

    id: str


class ContextFields(Body, kw_only=True):
    """The request fields that determine the context of a response; counting tokens needs no others."""

    UNSUPPORTED = {  # noqa: RUF012 - a ClassVar of the base class
        **UNSUPPORTED_TEMPLATE,
        **{name: TEMPLATE_FIELDS[name] for name in TEMPLATE_FIELDS if name != "chat_template_kwargs"},
        "truncation": ("disabled",),
        "prompt": (),
        "personality": (),
        "context_management": ([],),
    }
    MISPLACED = {  # noqa: RUF012 - a ClassVar of the base class
        "messages": "Use input.",
        "reasoning_effort": "Use reasoning.effort.",
    }
    OPTIONAL_OFFERS = {"tools": ("function",)}  # noqa: RUF012 - a ClassVar of the base class

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tools: list[ResponseTool] | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_input(self, chat_format: ChatFormat | None) -> TemplateInput:
        """Return what the template gets beside the messages; raise ApiError and InvalidRequestError."""
        found = template_input(
            chat_format,
            tools=tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())),
            arguments=self.chat_template_kwargs,
            effort=self.effort,
            effort_field="reasoning.effort",
        )
        if chat_format is None:
            return found
        with renamed_fields(
            {f"tools[{index}].function": f"tools[{index}]" for index in range(len(found.tools))}
        ):
            return with_calls(found, chat_format, self.choice())

    def choice(self) -> ToolChoice:
        """Return which tools the reply may or must call; raise ApiError."""
        tools = self.tools or ()
        return tool_choice(
            self.tool_choice,
            [tool.name for tool in tools if tool.name is not None],
            parallel=self.parallel_tool_calls,
            strict=[tool.name for tool in tools if tool.name is not None and tool.strict],
        )

    @property
    def effort(self) -> str | None:
        """The reasoning effort that is asked for."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def text_format(self) -> TextFormat | None:
        """The form that is asked for in `text`."""
        return None if self.text is None else self.text.format

    @property
    def conversation_id(self) -> str | None:
        """The conversation's id, given as text or as an object."""
        given = self.conversation
        return given.id if isinstance(given, ConversationRef) else given


class CreateResponse(ContextFields, kw_only=True):
    """The request body that `POST /v1/responses` takes."""

    UNSUPPORTED = {  # noqa: RUF012 - a ClassVar of the base class
        **ContextFields.UNSUPPORTED,
        **UNSUPPORTED_SAMPLING,
        **refused_fields(RESPONSES),
        "response_format": ({"type": "text"},),
        **dict.fromkeys(_FORMS_OF_CHATS, (False, "", [], {})),
        "n": (1,),
        "service_tier": ("auto", "default"),
        "moderation": (),
        "image": (),
        "access_programs": (),
        "background_options": (),
        "add_special_tokens": (False,),
        "enable_response_messages": (False,),
        "previous_input_messages": ([],),
    }
    IGNORED = frozenset({"prompt_cache_options", "prompt_cache_retention"})
    MISPLACED = {  # noqa: RUF012 - a ClassVar of the base class
        **ContextFields.MISPLACED,
        **{name: "Use max_output_tokens." for name, ours in MISSPELLED.items() if ours == "max_tokens"},
        **{name: "Use seed." for name, ours in MISSPELLED.items() if ours == "seed"},
        **dict.fromkeys((*refused_fields(RESPONSES), "n"), "Use /v1/chat/completions."),
        "response_format": "Use text.format.",
        **dict.fromkeys(_FORMS_OF_CHATS, "Use text.format, or /v1/chat/completions."),
        "max_tokens": "Use max_output_tokens.",
        "max_completion_tokens": "Use max_output_tokens.",
        "logprobs": 'Use include: ["message.output_text.logprobs"], and top_logprobs for likely tokens.',
        "return_token_ids": "Use /v1/completions to get token ids.",
        "echo": "Use /v1/completions.",
    }

    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    seed: Seed | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def stores(self) -> bool:
        """Whether the response is stored."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply includes log-probabilities of its tokens."""
        return LOGPROBS in (self.include or ())


class CountTokens(ContextFields, kw_only=True):
    """The request body that `POST /v1/responses/input_tokens` takes."""


def check_context(body: ContextFields) -> None:
    """Raise ApiError 400 for conflicting fields, or an input of too many items.

    The number of items is checked first, because later code loops over them on the event loop.
    """
    if isinstance(body.input, list):
        check_num_items(body.input, "input")
    if body.previous_response_id is not None and body.conversation is not None:
        sentence = "previous_response_id and conversation exclude each other; give only one of them."
        raise invalid_value("previous_response_id", sentence)
    if not body.input and (body.conversation is None or body.input is not None):
        if body.input is not None:
            raise invalid_value("input", "input is empty, but must be text or at least one item.")
        raise ApiError(400, "missing_required_parameter", "input is missing.", param="input")


def check_create(body: CreateResponse) -> None:
    """Raise ApiError 400 for conflicting fields, or fields over their limits."""
    check_context(body)
    check_metadata(body.metadata)
    check_num_items(body.include or (), "include")
    for index, name in enumerate(body.include or ()):
        if name not in _INCLUDES:
            raise invalid_value(f"include[{index}]", f"include[{index}] is {name!r}, which is unknown.")
    if body.background and not body.stores:
        raise invalid_value("background", "background needs store: the response could not be retrieved.")
    if body.conversation_id is not None and not body.stores:
        raise invalid_value(
            "conversation", "conversation needs store: the turn's items would be missing from it."
        )


def echo_of(body: CreateResponse, model: str, temperature: float, top_p: float) -> dict[str, Any]:
    """Return the request fields that a response repeats, by the schemas of OpenAI and of Open Responses."""
    echo = default_echo(model, temperature, top_p) | {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "metadata": body.metadata or {},
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tools": [_tool_echo(tool) for tool in body.tools or ()],
        "tool_choice": body.tool_choice or "auto",
        "reasoning": None
        if body.reasoning is None
        else {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "store": body.stores,
        "background": bool(body.background),
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
    text_format = body.text_format
    if text_format is not None and text_format.type != "text":
        given = msgspec.to_builtins(text_format)
        echo["text"] = {"format": {name: value for name, value in given.items() if value is not None}}
    if body.conversation_id is not None:
        echo["conversation"] = {"id": body.conversation_id}
    if body.user is not None:  # OpenAI's schema allows no null here
        echo["user"] = body.user
    return echo


def _tool_echo(tool: ResponseTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _tool(tool: ResponseTool, at: str) -> Tool:
    check_kind(tool.type, f"{at}.type")
    if tool.name is None:
        raise ApiError(400, "missing_required_parameter", f"{at}.name is missing.", param=f"{at}.name")
    return function_tool(tool.name, tool.description, tool.parameters, at)


class ResponseContentPart(Body, kw_only=True):
    """A content part of a message."""

    UNSUPPORTED = {"prompt_cache_breakpoint": ()}  # noqa: RUF012 - a ClassVar of the base class
    IGNORED = frozenset({"annotations", "logprobs"})

    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(Body, kw_only=True):
    """A message item, with a text or with parts."""

    IGNORED = frozenset({"id", "status", "phase", "object", "created_at"})

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"


class FunctionCallItem(Body, kw_only=True):
    """A call that the model made."""

    IGNORED = frozenset({"id", "status", "object", "created_at"})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(Body, kw_only=True):
    """The result of a call, as text or as parts."""

    IGNORED = frozenset({"id", "status", "object", "created_at"})

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(Body, kw_only=True):
    """Reasoning before a reply. A model reads its content only, so the summary has no effect."""

    UNSUPPORTED = {"encrypted_content": ("",)}  # noqa: RUF012 - a ClassVar of the base class
    IGNORED = frozenset({"id", "status", "object", "created_at"})

    type: Literal["reasoning"]
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None


class ItemReference(Body, kw_only=True):
    """A reference to a stored item."""

    id: str
    type: Literal["item_reference"] | None = None


def parse_input(value: str | Sequence[Any], at: str) -> tuple[list[Item | ItemReference], tuple[str, ...]]:
    """Return the items of an input and its unknown fields; messages are in stored form, but without ids.

    Raises ApiError 400 with the path of the invalid field.
    """
    if isinstance(value, str):
        return [stored_item("user", [value])], ()
    check_num_items(value, at)
    items: list[Item | ItemReference] = []
    ignored: dict[str, None] = {}
    for index, one in enumerate(value):
        item, unknown = _parse_item(one, f"{at}[{index}]")
        items.append(item)
        if len(ignored) < MAX_IGNORED:
            ignored |= dict.fromkeys(unknown)
    return items, tuple(ignored)


def _parse_item(value: Any, at: str) -> tuple[Item | ItemReference, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise invalid_value(at, f"{at} must be an object such as a message.")
    if is_reference(value):
        return convert(value, ItemReference, at)
    kind = value.get("type")
    if kind == "function_call":
        call, ignored = convert(dict(value), FunctionCallItem, at)
        check_arguments(call.arguments, f"{at}.arguments")
        return call_item(call.call_id, call.name, call.arguments), ignored
    if kind == "function_call_output":
        result, ignored = convert(dict(value), FunctionCallOutputItem, at)
        texts, more = _texts(result.output, f"{at}.output")
        return output_item(result.call_id, "".join(texts)), (*ignored, *more)
    if kind == "reasoning":
        reasoning, ignored = convert(dict(value), ReasoningItem, at)
        texts, more = _texts(reasoning.content or [], f"{at}.content")
        return reasoning_item("".join(texts)), (*ignored, *more)
    if kind not in (None, "message"):
        raise unsupported(f"{at}.type", f"the server accepts {', '.join(_KINDS)}, not {str(kind)[:40]!r}")
    message, ignored = convert(dict(value), MessageItem, at)
    texts, more = _texts(message.content, f"{at}.content")
    return stored_item(message.role, texts), (*ignored, *more)


def _texts(content: str | Sequence[Any], at: str) -> tuple[list[str], list[str]]:
    """Return the texts of a content's parts, and the paths of unknown fields in them."""
    if isinstance(content, str):
        return [content], []
    check_num_items(content, at)
    texts: list[str] = []
    ignored: list[str] = []
    for index, raw in enumerate(content):
        part, unknown = convert(raw, ResponseContentPart, f"{at}[{index}]")
        texts.append(_text_of(part, f"{at}[{index}]"))
        ignored += unknown
    return texts, ignored


def is_reference(value: Any) -> bool:
    """Return whether an input item refers to a stored item."""
    if not isinstance(value, Mapping):
        return False
    kind = value.get("type")
    return kind == "item_reference" or (kind is None and "id" in value and "role" not in value)


def _text_of(part: ResponseContentPart, at: str) -> str:
    if part.type in _PARTS_WITHOUT_TEXT:
        raise unsupported(f"{at}.type", f"the model reads text, not {part.type}")
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in _TEXT_PARTS:
        raise invalid_value(
            f"{at}.type", f"{at}.type is {part.type!r}, but must be input_text or output_text."
        )
    if part.text is None:
        raise ApiError(400, "missing_required_parameter", f"{at}.text is missing.", param=f"{at}.text")
    return part.text
