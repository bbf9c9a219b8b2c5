"""Requests that cost a server's front end much: bodies, texts, answers, threads and places.

Owns: the requests of each attack on the front end.
Does not know: who sends them, or what is measured meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

MODEL: Final = "chat"
_NUM_BYTES: Final = 10 * 2**20 - 2000  # a little less than the limit of a body
_RESPONSES: Final = "/v1/responses"


class FrontAttack(NamedTuple):
    """One attack.

    Attributes:
      path: what the attackers ask for again and again; `ID` stands for the conversation's id.
      body: the body; None for a GET; `ID` stands for the conversation's id.
      conversation: the body that creates a conversation before the attack, or None.
      num_owners: how many keys attack at a time.
      num_requests: how many requests each key has open at a time.
      is_read: whether the attackers read the answers; otherwise they keep their connections open.
    """

    path: str
    body: bytes | None = None
    conversation: bytes | None = None
    num_owners: int = 1
    num_requests: int = 4
    is_read: bool = True


def _written(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def _filled(head: str, entry: Callable[[int], str], tail: str) -> bytes:
    """Return a JSON text of the maximum length: `head`, entries by number with commas, `tail`."""
    entries: list[str] = []
    num_bytes = len(head) + len(tail)
    while num_bytes < _NUM_BYTES:
        entries.append(entry(len(entries)))
        num_bytes += len(entries[-1]) + 1
    return f"{head}{','.join(entries)}{tail}".encode()


def front_attacks() -> Mapping[str, FrontAttack]:
    """Return the attacks by name."""
    head = '{"model":"chat","max_output_tokens":1,"input":'
    words = "the cat sat on. " * (_NUM_BYTES // 16)
    message = {"role": "user", "content": "w" * 2000}
    items = [{"type": "message", "role": "user", "content": "b" * (_NUM_BYTES // 20 - 100)}] * 20
    conversation = json.dumps({"items": items}).encode()
    shorter = json.dumps({"items": items[:8]}).encode()
    turn = _written(messages=[{"role": "user", "content": "Tell me a story."}], max_tokens=64)
    tokenized = _written(prompt=words[: 2 * 2**20])
    return {
        "lists in an unknown field": FrontAttack(
            _RESPONSES, _filled(head + '"x","zz":[', lambda _: "[]", "]}")
        ),
        "lists as items": FrontAttack(_RESPONSES, _filled(head + "[", lambda _: "[]", "]}")),
        "many unknown fields": FrontAttack(
            _RESPONSES, _filled(head + '"x",', lambda number: f'"{number:x}":0', "}")
        ),
        "many pairs of metadata": FrontAttack(
            _RESPONSES, _filled(head + '"x","metadata":{', lambda number: f'"{number:x}":"a"', "}}")
        ),
        "many stop strings": FrontAttack(
            "/v1/chat/completions",
            _filled('{"model":"chat","messages":[],"stop":[', lambda _: '"s"', "]}"),
        ),
        "tokenize one letter": FrontAttack("/tokenize", _written(prompt="a" * _NUM_BYTES)),
        "tokenize words": FrontAttack("/tokenize", _written(prompt=words)),
        "tokenize with two keys": FrontAttack("/tokenize", tokenized, num_owners=2),
        "count one letter": FrontAttack(f"{_RESPONSES}/input_tokens", _written(input="a" * _NUM_BYTES)),
        "detokenize": FrontAttack("/detokenize", _written(tokens=[5] * (_NUM_BYTES // 3))),
        "ids as a prompt": FrontAttack("/v1/completions", _written(prompt=[5] * (_NUM_BYTES // 3))),
        "a long text": FrontAttack(_RESPONSES, _written(input="a" * _NUM_BYTES, max_output_tokens=1)),
        "many messages": FrontAttack(
            "/v1/chat/completions", _written(messages=[message] * 4095, max_tokens=1)
        ),
        "count a long conversation": FrontAttack(
            f"{_RESPONSES}/input_tokens", _written(conversation="ID"), conversation=shorter
        ),
        "long conversations": FrontAttack("/v1/conversations", conversation),
        "turns of one key": FrontAttack("/v1/chat/completions", turn, num_requests=64),
        "maps": FrontAttack("/v1/pensieve/chunks", num_requests=16),
        "statistics": FrontAttack("/v1/pensieve/stats", num_requests=16),
        "long answers that are not read": FrontAttack(
            "/v1/conversations/ID/items?limit=100", None, conversation, num_requests=60, is_read=False
        ),
    }
