"""The request body of a chat completion.

Owns: its fields, and which fields of OpenAI's API are rejected or ignored.
Does not know: turns, templates, responses. Called by `openai.chat` and `server.operations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta

from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import invalid_value, unsupported
from pensieve_jax.server.turns.sampling import SamplingFields, Tokens
from pensieve_jax.text import Message

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


class ChatMessage(Body):
    """A message of a chat, as clients send it."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
        "reasoning_content": ("",),
        "reasoning": ("",),
        "reasoning_details": ([],),
        "thinking": ("", []),
        "prefix": (False,),
        "partial": (False,),
    }
    IGNORED: ClassVar[frozenset[str]] = frozenset({"annotations"})

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None

    def as_message(self, at: str) -> Message:
        """Return the message's role and whole text; raise ApiError if it has no text. `at` is its path.

        An assistant's message may have no content, as in OpenAI's schema; a refusal is then its text.
        """
        content = self.content
        if self.refusal:
            if content:
                raise unsupported(f"{at}.refusal", "a message has a content or a refusal")
            content = self.refusal
        if content is None and self.role == "assistant":
            content = ""
        if isinstance(content, list):
            return {
                "role": self.role,
                "content": "".join(_text(part, i, at) for i, part in enumerate(content)),
            }
        if content is None:
            raise invalid_value(f"{at}.content", f"{at}.content is missing, but must be text.")
        return {"role": self.role, "content": content}


def _text(part: ContentPart, index: int, at: str) -> str:
    path = f"{at}.content[{index}]"
    if part.type != "text":
        raise unsupported(f"{path}.type", "only parts of type text are read")
    if part.text is None:
        raise invalid_value(f"{path}.text", f"{path}.text is missing, but must be text.")
    return part.text


class ChatBody(SamplingFields, kw_only=True):
    """The request body that `POST /v1/chat/completions` takes."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingFields.UNSUPPORTED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
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
    IGNORED: ClassVar[frozenset[str]] = SamplingFields.IGNORED | {"parallel_tool_calls"}
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
    OPTIONAL_OFFERS: ClassVar[frozenset[str]] = frozenset({"tools", "functions"})

    messages: list[ChatMessage]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def context(self) -> list[Message]:
        """Return the messages with role and text only; raise ApiError naming the field."""
        if not self.messages:
            raise invalid_value("messages", "messages is empty, but must be at least one message.")
        return [message.as_message(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def num_logprobs(self) -> int | None:
        """Return the engine's `logprobs`: None for none, 0 for chosen tokens only, k also for the top k."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid_value("top_logprobs", "top_logprobs needs logprobs to be true.")
        return None
