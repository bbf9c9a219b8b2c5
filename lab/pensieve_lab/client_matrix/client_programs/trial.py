"""Runs the programs of one client and prints what became of each.

Owns: the list of programs, the questions that they share, and the lines that the parent process reads.
Does not know: client libraries.

`python FILE URL MODEL` prints the names of its programs, and runs each one that a line of its input names. It
prints the problem of each, or None. These lines are JSON and begin with `MARK`; libraries may print anything
else.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

MARK = "@trial "
HELLO = "Hello"
NAME = "My name is Ada."
ASK_NAME = "What is my name?"
ASK_WEATHER = "What is the weather in Paris?"
ASK_TWO = "What is the weather in Paris and in Rome?"
FACTS = "Paris has 2100000 inhabitants."
WEATHER = {"Paris": "sunny, 21 degrees", "Rome": "rainy, 15 degrees"}
NO_KEY = "none"

_programs: dict[str, Callable[[], Any]] = {}
_calls: list[str] = []


def program(kind: str, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as a program; a problem is any exception."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        _programs[f"{kind}: {name}"] = function
        return function

    return add


def url() -> str:
    return sys.argv[1]


def model() -> str:
    return sys.argv[2]


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    _calls.append(city)
    return WEATHER.get(city, "unknown")


WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def check(holds: object, found: object) -> None:
    """Raise AssertionError that shows what was found."""
    if not holds:
        raise AssertionError(f"found {str(found)[:300]!r}")


def check_weather(answer: str, *cities: str) -> None:
    """Check that the tool was called for these cities, and that the answer uses its results."""
    check(sorted(_calls) == sorted(cities or ("Paris",)), {"calls": _calls, "answer": answer})
    check("sunny" in answer, answer)


def main() -> None:
    """Run the programs that lines of the input name."""
    _say({"programs": list(_programs)})
    for line in sys.stdin:
        _calls.clear()
        _say({"problem": _problem(_programs[line.strip()])})


def _problem(run: Callable[[], Any]) -> str | None:
    try:
        result = run()
        if inspect.isawaitable(result):
            asyncio.run(_wait(result))
    except Exception as error:  # any exception of a client library is the outcome of its program
        lines = traceback.format_exception(error)
        print("".join(lines), file=sys.stderr, flush=True)
        return f"{type(error).__name__}: {error}"[:2000]
    return None


async def _wait(result: Any) -> None:
    await result


def _say(line: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(line)}", flush=True)
