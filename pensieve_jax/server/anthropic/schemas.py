"""The request bodies of the Messages API.

Owns: their fields, the content blocks of messages, and which fields are rejected or ignored.
Does not know: turns, templates, responses. Called by the other modules of `server.anthropic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from pensieve_jax.core.sampling_params import MESSAGES, refused_fields
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import unsupported
from pensieve_jax.server.turns.sampling import (
    MISSPELLED,
    UNSUPPORTED_SAMPLING,
    UNSUPPORTED_TEMPLATE,
    Seed,
    Tokens,
)

_OTHER_FORMS: Final[Mapping[str, tuple[Any, ...]]] = {
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json_object": (False,),
}
"""Other APIs' names for the form of a reply, with values without effect; here it is `output_config`."""
_CLEAR_THINKING: Final = "clear_thinking_20251015"


class TextBlock(Body):
    """A text of a message or of the system prompt."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"type", "cache_control", "citations"})

    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier reply. Its signature is not checked."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"type", "signature", "cache_control"})

    thinking: str


class RedactedThinkingBlock(Body):
    """Reasoning that only the server that encrypted it can read."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"type", "cache_control"})

    data: str


class ToolUseBlock(Body):
    """A call of a tool by the assistant."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"type", "cache_control", "caller"})

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """The result of a call. The model reads its content, and not `is_error`."""

    IGNORED: ClassVar[frozenset[str]] = frozenset({"type", "cache_control"})

    tool_use_id: str
    content: str | list[Any] | None = None


class Tool(Body):
    """A tool that the client runs."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "defer_loading": (False,),
        "input_examples": ([],),
        "allowed_callers": (["direct"],),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"type", "cache_control", "eager_input_streaming"})

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ToolChoice(Body):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageParam(Body):
    """A message, with a text or with content blocks. Blocks are converted one by one, by their type."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class ThinkingConfig(Body):
    """Whether the model may think before it answers."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class ContextEdit(Body):
    """An edit of the context before the model reads it."""

    type: str
    keep: Any = None


class ContextManagement(Body):
    """Edits of the context."""

    edits: list[ContextEdit] | None = None

    def check(self) -> None:
        """Raise ApiError for an edit that would change the context."""
        for index, edit in enumerate(self.edits or ()):
            at = f"context_management.edits[{index}]"
            if edit.type != _CLEAR_THINKING:
                raise unsupported(f"{at}.type", "the context is what the messages say")
            if edit.keep != "all":
                raise unsupported(f"{at}.keep", "no reasoning is removed", ("all",))


class OutputFormat(Body):
    """The form of a reply: JSON that a schema describes."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body):
    """How much effort a reply takes, and its format."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ContextFields(Body, kw_only=True):
    """The request fields that determine the context of a reply; counting tokens needs no others."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: values for name, values in UNSUPPORTED_TEMPLATE.items() if name != "thinking"},
        "mcp_servers": ([],),
        "container": (),
        "thread": (),
        "compaction": (),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"cache_control"})
    MISPLACED: ClassVar[Mapping[str, str]] = {
        "input": "Use messages, or /v1/responses.",
        "instructions": "Use system, or /v1/responses.",
        "previous_response_id": "Use /v1/responses; requests of this route contain all messages.",
        "conversation": "Use /v1/responses; requests of this route contain all messages.",
    }
    OPTIONAL_OFFERS: ClassVar[Mapping[str, tuple[str | None, ...]]] = {"tools": (None, "custom")}

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None

    def check(self) -> None:
        """Raise ApiError for fields whose effect is missing."""
        if self.context_management is not None:
            self.context_management.check()


class CountTokensBody(ContextFields, kw_only=True):
    """The request body that `POST /v1/messages/count_tokens` takes."""


class MessagesBody(ContextFields, kw_only=True):
    """The request body that `POST /v1/messages` takes. `seed` is an addition to Anthropic's fields."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED_SAMPLING,
        **ContextFields.UNSUPPORTED,
        **refused_fields(MESSAGES),
        **_OTHER_FORMS,
        "n": (1,),
        "logprobs": (False, 0),
        "top_logprobs": (0,),
        "speed": ("standard",),
        "service_tier": ("auto", "standard_only"),
        "inference_geo": ("global",),
        "fallbacks": ([],),
        "billing_policy": (),
    }
    IGNORED: ClassVar[frozenset[str]] = ContextFields.IGNORED | {
        *("metadata", "diagnostics", "user_profile_id", "workspace_id", "fallback_credit_token"),
    }
    MISPLACED: ClassVar[Mapping[str, str]] = {
        **ContextFields.MISPLACED,
        **{name: f"Use {ours}." for name, ours in MISSPELLED.items() if ours in ("max_tokens", "seed")},
        **dict.fromkeys(
            (*refused_fields(MESSAGES), "n", "logprobs", "top_logprobs"), "Use /v1/chat/completions."
        ),
        **dict.fromkeys(("stop", "stop_strings"), "Use stop_sequences."),
        **dict.fromkeys(("max_completion_tokens", "max_output_tokens"), "Use max_tokens."),
        "store": "Start the server with --chat_history=durable, or use /v1/chat/completions.",
    }

    max_tokens: Tokens
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: Seed | None = None
    output_format: OutputFormat | None = None
