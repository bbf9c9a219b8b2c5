"""Clients that are programs of their own: langchain-openai, and Open Responses' compliance test.

Owns: starting them, and reading what they say of each of their cases.
Does not know: the server, or tables.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

from pensieve_jax import PensieveError
from pensieve_lab.clients.cases import MODEL, Outcome

OUTSIDE: Final = {
    "websocket-": "responses over WebSocket",
    "tool-calling": "tools",
    "image-input": "images",
    "file-": "files",
    "search-": "search",
}
"""Cases of the compliance test that this server refuses by design, by how their ids begin."""
_LANGCHAIN_CASES: Final = Path(__file__).with_name("langchain_cases.py")
_TIMEOUT_S: Final = 900.0


class ProgramFailedError(PensieveError):
    """A program told nothing that could be read."""


def run_langchain(python: str, url: str) -> tuple[list[Outcome], dict[str, str]]:
    """Outcomes of an interpreter that has langchain-openai, and what versions it has."""
    told = _told([python, str(_LANGCHAIN_CASES), url], Path.cwd())
    problems: dict[str, str | None] = told["problems"]
    return [Outcome("langchain", name, "langchain", False, why) for name, why in problems.items()], told[
        "versions"
    ]


def run_open_responses(bun: str, checkout: str, url: str) -> list[Outcome]:
    """Outcomes of the compliance test in a checkout of github.com/openresponses/openresponses.

    Its generated schemas and zod must be there.
    """
    command = [bun, "run", "bin/compliance-test.ts", "-u", url, "-k", "none", "-m", MODEL, "--json"]
    told = _told(command, Path(checkout))
    outcomes = []
    for one in told["results"]:
        is_outside = any(one["id"].startswith(prefix) for prefix in OUTSIDE)
        failed = one["status"] != "passed"
        problem = None
        if is_outside and not failed:
            problem = "passed, though it is said to be refused"
        elif failed and not is_outside:
            problem = "; ".join(one.get("errors") or ["failed"])
        outcomes.append(Outcome("Open Responses", one["id"], "compliance test", is_outside, problem))
    return outcomes


def _told(command: list[str], directory: Path) -> Any:
    """The JSON object that a program ends its output with; raises ProgramFailedError."""
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    start = done.stdout.find("{")
    try:
        return json.loads(done.stdout[start:])
    except json.JSONDecodeError as error:
        said = (done.stderr or done.stdout)[-500:]
        raise ProgramFailedError(f"{command[0]} ended with {done.returncode} and said: {said}") from error
