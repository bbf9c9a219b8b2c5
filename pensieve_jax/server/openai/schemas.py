"""The request body of a chat completion.

Owns: its fields, and which fields of OpenAI's API are rejected or ignored.
Does not know: turns, templates, responses. Called by `openai.chat` and `server.operations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

from msgspec import Meta

from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import invalid_value, unsupported
from pensieve_jax.server.turns.sampling import SamplingFields, Tokens
from pensieve_jax.server.turns.template import FunctionTool, checked_tools, divided, template_input
from pensieve_jax.server.turns.tool_choice import ToolChoice, tool_choice
from pensieve_jax.text import ChatFormat, Message
from pensieve_jax.text.messages import checked_call

_RESPONSES_ONLY: Final = (
    "Use /v1/responses to continue from stored turns; requests of this route contain all messages."
)


class ContentPart(Body):
    """A part of a message's content; only text is read."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: () for name in ("image_url", "input_audio", "file", "refusal", "video_url", "audio_url")
    }

    type: str
    text: str | None = None


class CalledFunction(Body):
    """The function of a tool call, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call in a message of the assistant."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"custom": ()}
    IGNORED: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Body):
    """A message of a chat, as clients send it.

    Servers name reasoning `reasoning` or `reasoning_content`; both are read.
    """

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "function_call": (),
        "audio": (),
        "reasoning_details": ([],),
        "thinking": ("", []),
        "prefix": (False,),
        "partial": (False,),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations"})

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def as_message(self, at: str) -> Message:
        """Return the message as templates read it, with its whole text. `at` is its path.

        An assistant's message may have no content, as in OpenAI's schema; a refusal is then its text. Raises
        ApiError for a message without text, and InvalidRequestError for broken arguments of a call.
        """
        message: dict[str, Any] = {"role": self.role, "content": self._text(at)}
        calls = self._calls(at)
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        if self.role == "tool" and not self.tool_call_id:
            field = f"{at}.tool_call_id"
            raise invalid_value(
                field, f"{field} is missing, but must be the id of the call that is answered."
            )
        reasoning = self.reasoning or self.reasoning_content
        if reasoning and self.role != "assistant":
            raise invalid_value(f"{at}.reasoning", f"{at} has reasoning, but its role is {self.role!r}.")
        others = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning": reasoning}
        return message | {key: value for key, value in others.items() if value}

    def _calls(self, at: str) -> list[dict[str, Any]]:
        calls = self.tool_calls or []
        if calls and self.role != "assistant":
            raise invalid_value(f"{at}.tool_calls", f"{at} has tool_calls, but its role is {self.role!r}.")
        return [
            checked_call(call.id, call.function.name, call.function.arguments, f"{at}.tool_calls[{index}]")
            for index, call in enumerate(calls)
        ]

    def _text(self, at: str) -> str:
        content = self.content
        if self.refusal:
            if content:
                raise unsupported(f"{at}.refusal", "a message has a content or a refusal")
            content = self.refusal
        if content is None and self.role == "assistant":
            content = ""
        if isinstance(content, list):
            return "".join(_text(part, i, at) for i, part in enumerate(content))
        if content is None:
            raise invalid_value(f"{at}.content", f"{at}.content is missing, but must be text.")
        return content


def _text(part: ContentPart, index: int, at: str) -> str:
    path = f"{at}.content[{index}]"
    if part.type != "text":
        raise unsupported(f"{path}.type", "only parts of type text are read")
    if part.text is None:
        raise invalid_value(f"{path}.text", f"{path}.text is missing, but must be text.")
    return part.text


class TemplateFields(Protocol):
    """The request fields that decide how messages are rendered, of several bodies."""

    tools: list[FunctionTool] | None
    chat_template_kwargs: dict[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


def rendering(
    body: TemplateFields,
    messages: list[ChatMessage],
    chat_format: ChatFormat | None,
    effort: str | None = None,
) -> tuple[list[Message], TemplateInput]:
    """Return the messages without a prefill, and what the template gets beside them.

    Args:
      body: the request.
      messages: its messages.
      chat_format: the model's chat template, if it has one.
      effort: the reasoning effort of the request.

    Raises ApiError and InvalidRequestError naming the field.
    """
    if not messages:
        raise invalid_value("messages", "messages is empty, but must be at least one message.")
    all_messages = [message.as_message(f"messages[{i}]") for i, message in enumerate(messages)]
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        sentence = "add_generation_prompt and continue_final_message exclude each other."
        raise invalid_value("add_generation_prompt", sentence)
    context, prefill = divided(all_messages, continues=continues)
    return context, template_input(
        chat_format,
        tools=checked_tools(body.tools or ()),
        arguments=body.chat_template_kwargs,
        effort=effort,
        prefill=prefill,
        generation_prompt=continues or body.add_generation_prompt is not False,
    )


class ChatBody(SamplingFields, kw_only=True):
    """The request body that `POST /v1/chat/completions` takes."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingFields.UNSUPPORTED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "moderation": (),
        "add_special_tokens": (False,),
    }
    IGNORED: ClassVar[frozenset[str]] = SamplingFields.IGNORED
    MISPLACED: ClassVar[Mapping[str, str]] = {
        **SamplingFields.MISPLACED,
        "previous_response_id": _RESPONSES_ONLY,
        "conversation": _RESPONSES_ONLY,
        "instructions": "Send them as a message with the role system, or use /v1/responses.",
        "input": "Send messages, or use /v1/responses.",
        "prompt": "Send messages, or use /v1/completions.",
        "max_output_tokens": "Use max_completion_tokens.",
        "background": "Use /v1/responses.",
        "return_token_ids": "Use /v1/completions to get token ids.",
        "echo": "Use /v1/completions, or prompt_logprobs for log-probabilities of the context.",
    }
    OPTIONAL_OFFERS: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "tools": ("function",),
        "functions": (None,),
    }

    messages: list[ChatMessage]
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def choice(self) -> ToolChoice:
        """Return which tools the reply may or must call; raise ApiError."""
        functions = [tool.function for tool in self.tools or () if tool.function is not None]
        return tool_choice(
            self.tool_choice,
            [function.name for function in functions],
            parallel=self.parallel_tool_calls,
            strict=[function.name for function in functions if function.strict],
        )

    def num_logprobs(self) -> int | None:
        """Return the engine's `logprobs`: None for none, 0 for chosen tokens only, k also for the top k."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid_value("top_logprobs", "top_logprobs needs logprobs to be true.")
        return None
