"""The answers to the requests of one attack.

Owns: sending, the code of each answer, and which answers are wrong.
Does not know: what a request asks for.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Final

import httpx2

_REFUSALS: Final = (400, 413, 429, 503)
_FAILED_TURN: Final = "grammar_failed"
"""Code of a turn that ends alone, since a later mask exceeds the limits. Only some attacks may cause it."""


class Answers:
    """Counts of answers.

    Attributes:
      may_fail: whether turns may end with `grammar_failed`.
      codes: number of answers by status and code of the error.
      wrong: answers that are neither a success nor a typed refusal, and failed requests.
    """

    def __init__(self, *, may_fail: bool = False) -> None:
        self.may_fail = may_fail
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def send(self, http: httpx2.AsyncClient, route: str, body: bytes) -> None:
        """Send a request and count its answer."""
        try:
            answer = await http.post(route, content=body, headers={"Content-Type": "application/json"})
        except httpx2.HTTPError as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
            return
        self.add(answer.status_code, answer.content)

    def add(self, status: int, body: bytes) -> None:
        """Count an answer, and whether it is wrong."""
        code = answer_code(status, body)
        self.codes[code] += 1
        if self.may_fail and code.endswith(f" {_FAILED_TURN}"):
            return
        is_refusal = status in _REFUSALS and " " in code
        if status != 200 and not is_refusal:
            self.wrong.append(f"{code}: {body[:200]!r}")
        elif status == 200 and " " in code:
            self.wrong.append(f"{code}: {body[-200:]!r}")


def answer_code(status: int, body: bytes) -> str:
    """Return the status of an answer and the code of its error, which may stand in a stream."""
    if status == 200 and b'"error"' not in body:
        return str(status)
    last = [line for line in body.splitlines() if line.startswith(b"data: {")]
    try:
        value = json.loads(last[-1].removeprefix(b"data: ") if last else body)
    except (ValueError, RecursionError):
        return str(status)
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return str(status)
    return f"{status} {error.get('code') or error.get('type')}"
