"""Clients that are programs of their own: langchain-openai, and Open Responses' compliance test.

Owns: starting them and reading the outcomes of their cases.
Does not know: the server, or tables.
Called by `programs.check_clients`.
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
"""Prefixes of the compliance test's case ids that this server refuses by design."""
_LANGCHAIN_CASES: Final = Path(__file__).with_name("langchain_cases.py")
_TIMEOUT_S: Final = 900.0


class ProgramFailedError(PensieveError):
    """A program printed no readable result."""


def run_langchain(python: str, url: str) -> tuple[list[Outcome], dict[str, str]]:
    """Return the outcomes from an interpreter that has langchain-openai, and its package versions."""
    results = _json_at_end([python, str(_LANGCHAIN_CASES), url], Path.cwd())
    problems: dict[str, str | None] = results["problems"]
    return [Outcome("langchain", name, "langchain", False, why) for name, why in problems.items()], results[
        "versions"
    ]


def run_open_responses(bun: str, checkout: str, url: str) -> list[Outcome]:
    """Return the outcomes of the compliance test in a checkout of github.com/openresponses/openresponses.

    The checkout must contain its generated schemas and zod.
    """
    command = [bun, "run", "bin/compliance-test.ts", "-u", url, "-k", "none", "-m", MODEL, "--json"]
    results = _json_at_end(command, Path(checkout))
    outcomes = []
    for one in results["results"]:
        is_outside = any(one["id"].startswith(prefix) for prefix in OUTSIDE)
        failed = one["status"] != "passed"
        problem = None
        if is_outside and not failed:
            problem = "passed, although it is listed as refused"
        elif failed and not is_outside:
            problem = "; ".join(one.get("errors") or ["failed"])
        outcomes.append(Outcome("Open Responses", one["id"], "compliance test", is_outside, problem))
    return outcomes


def _json_at_end(command: list[str], directory: Path) -> Any:
    """Return the JSON object at the end of a program's output; raises ProgramFailedError."""
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    start = done.stdout.find("{")
    try:
        return json.loads(done.stdout[start:])
    except json.JSONDecodeError as error:
        output_tail = (done.stderr or done.stdout)[-500:]
        raise ProgramFailedError(
            f"{command[0]} exited with {done.returncode}; its last output: {output_tail}"
        ) from error
