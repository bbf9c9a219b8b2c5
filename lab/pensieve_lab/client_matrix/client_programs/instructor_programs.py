"""Programs of instructor.

Owns: its programs.
Does not know: the server, or how an outcome is recorded.
"""

from __future__ import annotations

import instructor
import openai
import trial
from pydantic import BaseModel
from trial import check, program


class City(BaseModel):
    """A city of the questions."""

    name: str
    population: int


def _extract(mode: instructor.Mode) -> None:
    client = openai.OpenAI(base_url=trial.url(), api_key=trial.NO_KEY, max_retries=0)
    found = instructor.from_openai(client, mode=mode).create(
        model=trial.model(),
        messages=[{"role": "user", "content": trial.FACTS}],
        response_model=City,
        max_retries=1,
    )
    check(isinstance(found, City), found)


@program("first", "TOOLS")
def tools() -> None:
    _extract(instructor.Mode.TOOLS)


@program("structured", "RESPONSES_TOOLS")
def responses_tools() -> None:
    _extract(instructor.Mode.RESPONSES_TOOLS)


@program("structured", "JSON")
def json_mode() -> None:
    _extract(instructor.Mode.JSON)


@program("structured", "JSON_SCHEMA")
def json_schema() -> None:
    _extract(instructor.Mode.JSON_SCHEMA)


@program("structured", "MD_JSON")
def markdown() -> None:
    _extract(instructor.Mode.MD_JSON)


if __name__ == "__main__":
    trial.main()
