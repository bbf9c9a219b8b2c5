"""Why a client's program failed, by the answers that it got.

Owns: the outcomes, and the rule that finds one.
Does not know: clients or processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from pensieve_lab.client_matrix.running import Ended
from pensieve_lab.clients.recorder import Exchange

type Outcome = Literal["passed", "refused", "server error", "time limit", "answer", "client"]

FIRST_SERVER_ERROR: Final = 500
FIRST_ERROR: Final = 400


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a program.

    Attributes:
      name: kind and name.
      outcome: "refused" if the server answered an error of the client's, "answer" if it refused nothing and
        the program did not find what it expects, "client" if the program sent no request.
      cause: the refused field and its error code, or the program's own words.
      seconds: how long it took.
    """

    name: str
    outcome: Outcome
    cause: str
    seconds: float


def result_of(ended: Ended, exchanges: Sequence[Exchange]) -> Result:
    """Return what became of a program that sent these requests."""
    if ended.problem is None:
        return Result(ended.name, "passed", "", ended.seconds)
    failed = [exchange for exchange in exchanges if exchange.status >= FIRST_ERROR]
    outcome: Outcome = "answer" if exchanges else "client"
    cause = ended.problem
    if ended.is_late:
        outcome = "time limit"
    elif failed:
        last = failed[-1]
        outcome = "server error" if last.status >= FIRST_SERVER_ERROR else "refused"
        cause = refusal(last)
    return Result(ended.name, outcome, cause, ended.seconds)


def refusal(exchange: Exchange) -> str:
    """Return status, error code and field of a refused request, in the format of OpenAI or Anthropic."""
    try:
        body = json.loads(exchange.answer)
    except ValueError:
        return f"{exchange.status}"
    error: Any = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, Mapping):
        return f"{exchange.status}"
    code = error.get("code") or error.get("type") or ""
    param = error.get("param")
    where = f" ({param})" if param else f" ({exchange.method} {exchange.path.partition('?')[0]})"
    return f"{exchange.status} {code}{where}: {error.get('message', '')}"
