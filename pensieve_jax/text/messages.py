"""Chat messages: their form, and the check that user input has this form.

Owns: `Message`, and what a well-formed list of them is.
Does not know: templates, tokenizers or conversations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.options import is_utf8

type Message = Mapping[str, Any]
"""A JSON object with at least `role` (one of `ROLES`) and `content` (a string)."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: object, field: str = "messages") -> tuple[Message, ...]:
    """Return copies of well-formed messages; keys beside `role` and `content` are kept for the template.

    Raises InvalidRequestError naming `field`, `field[i]`, `field[i].role` or `field[i].content`.
    """
    if not isinstance(messages, list | tuple):
        raise InvalidRequestError(field, messages, 'a list such as [{"role": "user", "content": "Hi"}]')
    if not messages:
        raise InvalidRequestError(field, messages, "a list of at least one new message")
    return tuple(_check_message(message, f"{field}[{index}]") for index, message in enumerate(messages))


def _check_message(message: object, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(field, message, "a dict with the keys role and content")
    for key in ("role", "content"):
        if key not in message:
            raise InvalidRequestError(f"{field}.{key}", None, "given", f"add {key!r} to the message")
        if not isinstance(message[key], str):
            raise InvalidRequestError(f"{field}.{key}", message[key], "a string")
    if message["role"] not in ROLES:
        raise InvalidRequestError(f"{field}.role", message["role"], f"one of {', '.join(ROLES)}")
    try:
        # A deep copy through JSON, the history's format: later changes by the caller must not affect it.
        text = json.dumps(dict(message), allow_nan=False, ensure_ascii=False)
        text.encode()
        copied: dict[str, Any] = json.loads(text)
    except UnicodeEncodeError as error:
        of_content = not is_utf8(message["content"])
        name, value = (f"{field}.content", message["content"]) if of_content else (field, message)
        limit = "text that UTF-8 can hold, without lone surrogates"
        raise InvalidRequestError(name, value, limit) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, message, f"made of JSON values ({error})") from error
    return copied
