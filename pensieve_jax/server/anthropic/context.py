"""From the messages of a request to messages as the chat template reads them.

Owns: the conversion of roles and content blocks, and the path in the request of each converted message.
Does not know: turns, templates, or how replies are written. Called by `anthropic.messages`.

A system prompt is the first message. Messages of the user that follow one another are one message, as in
Anthropic's API, since many templates want alternating roles. The texts of an assistant's blocks are joined as
they are, because a reply that comes back in several blocks must equal the text that was sampled; all other
texts are joined by a line break.

Claude Code puts a line for billing before its system prompt, with a number that differs in every request. No
model reads it, and a context with it would never be found again, so it is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from pensieve_jax.server.anthropic.schemas import ContextFields, MessageParam, TextBlock
from pensieve_jax.server.http.bodies import MAX_IGNORED, check_num_items, convert
from pensieve_jax.server.http.errors import invalid_value, unsupported
from pensieve_jax.text import Message

_BILLING: Final = "x-anthropic-billing-header:"
_SEPARATOR: Final = "\n"


class Context(NamedTuple):
    """The messages of a request.

    Attributes:
      messages: for the chat template, with role and text only.
      paths: the path in the request of each message.
      ignored: paths of fields without an effect.
    """

    messages: list[Message]
    paths: list[str]
    ignored: tuple[str, ...]


def context_of(body: ContextFields) -> Context:
    """Return the messages of a request; raise ApiError naming the field."""
    if not body.messages:
        raise invalid_value("messages", "messages is empty, but must be at least one message.")
    context = Context([], [], ())
    ignored: dict[str, None] = {}
    if body.system is not None:
        texts = _texts(body.system, "system", ignored)
        prompt = _SEPARATOR.join(_without_billing(texts, ignored))
        if prompt:
            _add(context, "system", prompt, "system")
    for index, message in enumerate(body.messages):
        _add_message(context, message, f"messages[{index}]", ignored)
    return context._replace(ignored=tuple(ignored))


def _add(context: Context, role: str, text: str, path: str) -> None:
    """Add a message; a user's text right after another one is added to that message."""
    messages = context.messages
    if role == "user" and messages and messages[-1]["role"] == "user":
        messages[-1] = {"role": role, "content": messages[-1]["content"] + _SEPARATOR + text}
        return
    messages.append({"role": role, "content": text})
    context.paths.append(path)


def _add_message(context: Context, message: MessageParam, path: str, ignored: dict[str, None]) -> None:
    texts = list(_texts(message.content, f"{path}.content", ignored))
    if not texts and message.role != "assistant":
        raise invalid_value(f"{path}.content", f"{path}.content is empty, but must be text or a block.")
    separator = "" if message.role == "assistant" else _SEPARATOR
    _add(context, message.role, separator.join(texts), path)


def _texts(content: str | Sequence[Any], path: str, ignored: dict[str, None]) -> Iterator[str]:
    """Yield the texts of a content; raise ApiError for a block that is no text."""
    if isinstance(content, str):
        yield content
        return
    check_num_items(content, path)
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise invalid_value(at, f'{at} must be a content block such as {{"type": "text", "text": "Hi"}}.')
        if kind != "text":
            raise unsupported(f"{at}.type", f"the model reads blocks of type text, not {kind}")
        found, unknown = convert(block, TextBlock, at)
        if len(ignored) < MAX_IGNORED:
            ignored.update(dict.fromkeys(unknown))
        yield found.text


def _without_billing(texts: Iterable[str], ignored: dict[str, None]) -> Iterator[str]:
    """Yield the texts of a system prompt without the line for billing, which is noted as ignored."""
    for text in texts:
        if not text.startswith(_BILLING):
            yield text
            continue
        ignored["system.x-anthropic-billing-header"] = None
        _, _, rest = text.partition("\n")
        if rest:
            yield rest
