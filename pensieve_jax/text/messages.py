"""Chat messages: their form, and the check that user input has this form.

Owns: `Message`, and what a well-formed list of them is.
Does not know: templates, tokenizers or conversations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.json_values import json_copy
from pensieve_jax.core.options import is_utf8
from pensieve_jax.text.call_arguments import parse_arguments

type Message = Mapping[str, Any]
"""A JSON object with `role` (one of `ROLES`) and `content`.

`content` is a string, or None in a message of the assistant with `tool_calls`: a list of {"id", "type":
"function", "function": {"name", "arguments"}}, whose arguments are the text of a JSON object. A message with
the role "tool" has the `tool_call_id` of the call that it answers. Any message may have a `name`, and one of
the assistant `reasoning`, both strings.
"""

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_STRINGS: Final = ("name", "reasoning")


def check_messages(messages: object, field: str = "messages") -> tuple[Message, ...]:
    """Return copies of well-formed messages; keys of other names are kept for the template.

    The texts of content parts are joined. `check_results` checks what tool messages answer.

    Raises InvalidRequestError naming `field`, `field[i]`, `field[i].role` and so on.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(field, messages, 'a list such as [{"role": "user", "content": "Hi"}]')
    if not messages:
        raise InvalidRequestError(field, messages, "a list of at least one new message")
    return tuple(_check_message(message, f"{field}[{index}]") for index, message in enumerate(messages))


def check_results(
    messages: Sequence[Message], known_ids: Collection[str] = (), field: str = "messages"
) -> None:
    """Raise InvalidRequestError for a tool message that answers no call before it.

    Args:
      messages: well-formed messages.
      known_ids: ids of the calls before these messages.
      field: the messages' name in errors.
    """
    known = set(known_ids)
    for index, message in enumerate(messages):
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and call_id not in known:
            limit = "the id of a tool call in an earlier message of the assistant"
            raise InvalidRequestError(f"{field}[{index}].tool_call_id", call_id, limit)
        known.update(call_ids([message]))


def prefill_of(messages: Sequence[Message]) -> str | None:
    """Return the text of the last message as the beginning of a reply to those before it.

    Returns None unless it is a text of the assistant alone, behind another message.
    """
    last = messages[-1]
    if len(messages) < 2 or last["role"] != "assistant" or last.get("tool_calls") or last.get("reasoning"):
        return None
    return content_of(last)


def call_ids(messages: Iterable[Message]) -> list[str]:
    """Return the ids of the tool calls in these messages, in order."""
    return [call["id"] for message in messages for call in message.get("tool_calls") or ()]


def content_of(message: Message) -> str:
    """Return the text of a message; "" for one that has only tool calls."""
    return message["content"] or ""


def text_with_calls(message: Message) -> str:
    """Return the text of a message, with its tool calls as `name(arguments)`."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = "\n".join(f"{function['name']}({function['arguments']})" for function in functions)
    return "\n".join(text for text in (content_of(message), calls) if text)


def num_characters(messages: Iterable[Message]) -> int:
    """Return the approximate length of messages as text, tool calls and reasoning included."""
    return sum(len(text_with_calls(message)) + len(message.get("reasoning") or "") for message in messages)


def message_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call as messages have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def checked_call(call_id: object, name: object, arguments: object, field: str) -> dict[str, Any]:
    """Return a tool call of these parts; raise InvalidRequestError naming `field.id` and so on.

    Blank arguments are an empty object.
    """
    for key, value in (("id", call_id), ("function.name", name)):
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"{field}.{key}", value, "a non-empty string")
    check_arguments(arguments, f"{field}.function.arguments")
    return message_call(str(call_id), str(name), str(arguments) if str(arguments).strip() else "{}")


def check_arguments(arguments: object, field: str) -> None:
    """Raise InvalidRequestError naming `field` unless `arguments` is the text of a JSON object."""
    if not isinstance(arguments, str):
        raise InvalidRequestError(field, arguments, "the text of a JSON object, as json.dumps returns it")
    try:
        parse_arguments(arguments)
    except ValueError as error:
        raise InvalidRequestError(field, arguments, f"the text of a JSON object ({error})") from error


def _check_message(message: object, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, message, "a dict with the keys role and content")
    role = _role(message, field)
    found = {key: value for key, value in message.items() if value is not None}
    found |= {"role": role, "content": None}
    calls = found.pop("tool_calls", None)
    if calls is not None and role != "assistant":
        raise InvalidRequestError(f"{field}.tool_calls", calls, "left out, unless the role is assistant")
    if calls:
        found["tool_calls"] = _check_calls(calls, f"{field}.tool_calls")
    if not calls or message.get("content") is not None:
        found["content"] = _content(message, field)
    _check_call_id(found, field)
    for key in _STRINGS:
        if not isinstance(found.get(key), str | None):
            raise InvalidRequestError(f"{field}.{key}", found[key], "a string")
    if found["content"] is not None and not is_utf8(found["content"]):
        limit = "text that UTF-8 can hold, without lone surrogates"
        raise InvalidRequestError(f"{field}.content", found["content"], limit)
    return json_copy(found, field)


def _role(message: Mapping[Any, Any], field: str) -> str:
    role = _given(message, "role", field)
    if not isinstance(role, str):
        raise InvalidRequestError(f"{field}.role", role, "a string")
    if role not in ROLES:
        raise InvalidRequestError(f"{field}.role", role, f"one of {', '.join(ROLES)}")
    return role


def _content(message: Mapping[Any, Any], field: str) -> str:
    content = _given(message, "content", field)
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{field}.content", content, "a string")
    for index, part in enumerate(content):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            limit = 'a part such as {"type": "text", "text": "Hi"}'
            raise InvalidRequestError(f"{field}.content[{index}]", part, limit)
    return "".join(part["text"] for part in content)


def _given(message: Mapping[Any, Any], key: str, field: str) -> Any:
    if key not in message:
        raise InvalidRequestError(f"{field}.{key}", None, "given", f"add {key!r} to the message")
    return message[key]


def _check_calls(calls: object, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(field, calls, "a list of tool calls")
    return [_check_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _check_call(call: object, field: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InvalidRequestError(field, call, "a dict with the keys id, type and function")
    if call.get("type", "function") != "function":
        raise InvalidRequestError(f"{field}.type", call["type"], '"function"')
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", function, "a dict with the keys name and arguments")
    return checked_call(call.get("id"), function.get("name"), function.get("arguments"), field)


def _check_call_id(message: Mapping[str, Any], field: str) -> None:
    call_id, is_result = message.get("tool_call_id"), message["role"] == "tool"
    if is_result and (not isinstance(call_id, str) or not call_id):
        limit = "the id of the tool call that the message answers"
        raise InvalidRequestError(f"{field}.tool_call_id", call_id, limit)
    if not is_result and call_id is not None:
        raise InvalidRequestError(f"{field}.tool_call_id", call_id, "left out, unless the role is tool")
