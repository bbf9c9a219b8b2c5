"""One request of an attack, and the same load without what is hostile in it.

Owns: the value, its shorthands, and its control.
Does not know: attacks.
"""

from __future__ import annotations

import itertools
import json
from typing import Any, Final, NamedTuple

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MODEL: Final = "chat"
_MESSAGES: Final = ({"role": "user", "content": "Tell me about the sea."},)
_WORD: Final = "word "
_IN_PROMPT: Final = ("messages", "tools", "input")
_LONGEST_PROMPT: Final = 60_000  # bytes; a longer one rarely fits into the context
_SAME: Final = ("max_tokens", "n", "stream")


_numbers = itertools.count()


class HostileRequest(NamedTuple):
    """One request.

    Attributes:
      name: the attack that it belongs to.
      route: its path.
      body: its body, which may be no JSON.
      control: the body of a request to `control_route` with the same load, in which nothing is hostile.
      control_route: Completions for a prompt, Chat Completions otherwise.
      may_fail: whether a turn may end with `grammar_failed`, since its masks exceed limits or allow nothing.
    """

    name: str
    route: str
    body: bytes
    control: bytes
    control_route: str = CHAT
    may_fail: bool = False


def request(name: str, route: str, **fields: Any) -> HostileRequest:
    """Return a request with these fields.

    Its control has the same prompt, or a message about as long as the messages and tools, and the same length
    and number of replies. It has a short message where these are too long for the context, since no prompt
    is computed for them. Each control begins with a number of its own, since the state of equal prompts would
    be found.
    """
    start = f"{next(_numbers):07} "
    body = json.dumps({"model": MODEL, **fields}).encode()
    num_bytes = sum(len(json.dumps(fields[key])) for key in _IN_PROMPT if key in fields)
    num_words = num_bytes // len(_WORD) if num_bytes < _LONGEST_PROMPT else 8
    message = {"role": "user", "content": start + _WORD * num_words}
    prompt: dict[str, Any] = {"messages": [message]}
    if "prompt" in fields:
        given = fields["prompt"]
        prompt = {"prompt": start + given[len(start) :] if isinstance(given, str) else given}
    same = {key: fields[key] for key in _SAME if key in fields}
    same["max_tokens"] = max(1, same.get("max_tokens", fields.get("max_output_tokens", 64)))
    control = json.dumps({"model": MODEL, **prompt, **same}).encode()
    return HostileRequest(name, route, body, control, COMPLETIONS if "prompt" in fields else CHAT)


def raw(name: str, route: str, body: bytes) -> HostileRequest:
    """Return a request whose body is written already; its control is a short chat."""
    return request(name, route, max_tokens=8)._replace(body=body)


def chat(name: str, **fields: Any) -> HostileRequest:
    """Return a request to Chat Completions, with one short message unless `fields` has others."""
    return request(name, CHAT, **{"messages": _MESSAGES, "max_tokens": 64, "temperature": 1.0, **fields})


def asked(name: str, kind: str, value: Any, **fields: Any) -> HostileRequest:
    """Return a chat whose reply must have a form; see `StructuredOutputs` of the server for kinds."""
    return chat(name, structured_outputs={kind: value}, **fields)
