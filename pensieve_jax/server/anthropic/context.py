"""From the messages of a request to messages as the chat template reads them.

Owns: the conversion of roles, content blocks and tools, and the path in the request of each message.
Does not know: turns, templates, or how replies are written. Called by `anthropic.messages`.

A system prompt is the first message. Messages of one role that follow one another are one message, as in
Anthropic's API, since many templates want alternating roles. The texts of an assistant's blocks are joined as
they are, because a reply that comes back in several blocks must equal the text that was sampled. All other
texts are joined by a line break.

Claude Code puts a line for billing before its system prompt, with a number that differs in every request. No
model reads it, and a context with it would never be found again, so it is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pensieve_jax.server.anthropic.schemas import (
    ContextFields,
    MessageParam,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from pensieve_jax.server.http.bodies import MAX_IGNORED, Body, check_num_items, convert
from pensieve_jax.server.http.errors import invalid_value, unsupported
from pensieve_jax.server.turns.template import LEAVES_OUT
from pensieve_jax.text import Message
from pensieve_jax.text.messages import message_call

_BILLING: Final = "x-anthropic-billing-header:"
_SEPARATOR: Final = "\n"
_TEXT_ONLY: Final[Mapping[str, type[Body]]] = {"text": TextBlock}
_BLOCKS: Final[Mapping[str, Mapping[str, type[Body]]]] = {
    "system": _TEXT_ONLY,
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
}
"""The blocks that messages of each role may have, by their type."""


class Context(NamedTuple):
    """The messages of a request.

    Attributes:
      messages: for the chat template.
      paths: the path in the request of each message.
      prefill: the text with which the reply begins; None without an assistant's message at the end.
      tools: function tools, as the chat template reads them.
      strict: names of the tools whose arguments always have the form of their schemas.
      ignored: paths of fields without an effect.
    """

    messages: Sequence[Message]
    paths: Sequence[str]
    prefill: str | None
    tools: list[dict[str, Any]]
    strict: frozenset[str]
    ignored: tuple[str, ...]


def context_of(body: ContextFields) -> Context:
    """Return the messages and tools of a request; raise ApiError naming the field."""
    if not body.messages:
        raise invalid_value("messages", "messages is empty, but must be at least one message.")
    reader = _Reader()
    if body.system is not None:
        reader.add_system(body.system)
    for index, message in enumerate(body.messages):
        # Anthropic's API also refuses an empty message of the assistant. But a reply of this server can be
        # empty, and its client sends it again.
        if not message.content and message.role != "assistant":
            path = f"messages[{index}].content"
            raise invalid_value(path, f"{path} is empty, but must be text or at least one block.")
        reader.add(message, f"messages[{index}]")
    tools = [reader.tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    prefill = reader.take_prefill()
    for one in reader.messages:
        if "tool_calls" in one and not one["content"]:
            one["content"] = None
    strict = frozenset(reader.strict)
    return Context(reader.messages, reader.paths, prefill, tools, strict, tuple(reader.ignored))


class _Reader:
    """The messages of one request while its blocks are read.

    Attributes:
      messages, paths: see `Context`.
      strict: names of tools that are strict.
      ignored: paths of fields without an effect, in order.
    """

    def __init__(self) -> None:
        """Start before the first message."""
        self.messages: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.strict: list[str] = []
        self.ignored: dict[str, None] = {}

    def add_system(self, system: str | Sequence[Any]) -> None:
        """Add the system prompt, unless it is empty."""
        texts = [block.text for _, block in self._blocks(system, "system", _TEXT_ONLY)]
        prompt = _SEPARATOR.join(self._without_billing(texts))
        if prompt:
            self._add({"role": "system", "content": prompt}, "system")

    def add(self, message: MessageParam, path: str) -> None:
        """Add a message, whose results of tools are messages of their own."""
        blocks = self._blocks(message.content, f"{path}.content", _BLOCKS[message.role])
        if message.role == "assistant":
            self._add_assistant(blocks, path)
            return
        for at, block in blocks:
            if isinstance(block, ToolResultBlock):
                texts = self._blocks(block.content or "", f"{at}.content", _TEXT_ONLY)
                content = _SEPARATOR.join(text.text for _, text in texts)
                result = {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
                self._add(result, at)
            else:
                self._add_text(message.role, block.text, path)

    def take_prefill(self) -> str | None:
        """Remove an assistant's message at the end, and return its text, or None."""
        if self.messages[-1]["role"] != "assistant":
            return None
        message, path = self.messages.pop(), self.paths.pop()
        if "tool_calls" in message:
            raise invalid_value(path, f"{path} has a tool_use block, but no message with its result follows.")
        if "reasoning" in message:
            raise unsupported(path, "a reply cannot begin with reasoning that is given")
        prefill: str = message["content"]
        return prefill

    def tool(self, value: Any, path: str) -> dict[str, Any]:
        """Return a tool as the chat template reads it; raise ApiError for one that the server would run."""
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            raise unsupported(
                f"{path}.type", f"the server runs no tools itself, such as {kind}; {LEAVES_OUT}"
            )
        tool = self._convert(value, Tool, path)
        if tool.strict:
            self.strict.append(tool.name)
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        return {"type": "function", "function": function | {"parameters": tool.input_schema}}

    # Private methods

    def _add(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self.paths.append(path)

    def _add_text(self, role: str, text: str, path: str) -> None:
        """Add a text, to the message before it if that is the user's, too."""
        last = self.messages[-1] if self.messages else None
        if role == "user" and last is not None and last["role"] == role:
            last["content"] += _SEPARATOR + text
        else:
            self._add({"role": role, "content": text}, path)

    def _add_assistant(self, blocks: Iterable[tuple[str, Any]], path: str) -> None:
        """Add blocks of the assistant, to the message before them if that is the assistant's, too."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""}, path)
        message = self.messages[-1]
        for _, block in blocks:
            if isinstance(block, ThinkingBlock):
                message["reasoning"] = message.get("reasoning", "") + block.thinking
            elif isinstance(block, RedactedThinkingBlock):
                self._ignore(["messages[].content[].data"])
            elif isinstance(block, ToolUseBlock):
                call = message_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
                message.setdefault("tool_calls", []).append(call)
            else:
                message["content"] += block.text

    def _blocks(
        self, content: str | Sequence[Any], path: str, kinds: Mapping[str, type[Body]]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the blocks of a content with their paths; raise ApiError for one of another type."""
        if isinstance(content, str):
            yield path, TextBlock(content)
            return
        check_num_items(content, path)
        for index, value in enumerate(content):
            at = f"{path}[{index}]"
            kind = value.get("type") if isinstance(value, dict) else None
            if not isinstance(kind, str):
                sentence = f'{at} must be a content block such as {{"type": "text", "text": "Hi"}}.'
                raise invalid_value(at, sentence)
            if kind not in kinds:
                raise unsupported(f"{at}.type", f"{' and '.join(kinds)} are the blocks here, not {kind}")
            yield at, self._convert(value, kinds[kind], at)

    def _convert[T: Body](self, value: Any, kind: type[T], path: str) -> T:
        converted, unknown = convert(value, kind, path)
        self._ignore(unknown)
        return converted

    def _ignore(self, names: Iterable[str]) -> None:
        if len(self.ignored) < MAX_IGNORED:
            self.ignored.update(dict.fromkeys(names))

    def _without_billing(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts of a system prompt without the line for billing, which is noted as ignored."""
        for text in texts:
            if not text.startswith(_BILLING):
                yield text
                continue
            self._ignore(["system.x-anthropic-billing-header"])
            _, _, rest = text.partition("\n")
            if rest:
                yield rest
