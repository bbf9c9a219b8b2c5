"""Cases for the openai client, and their outcomes.

Owns: the list of cases, running each with the synchronous and the asynchronous client, and its outcome.
Does not know: what the cases do, processes, or tables.
Called by `programs.check_clients`.

A case is written once, for the asynchronous client. A wrapper makes the synchronous client look the same: its
results can be awaited and its iterables can be iterated asynchronously.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import openai

MODEL: Final = "chat"
GREEDY: Final[dict[str, Any]] = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
CHAT: Final[dict[str, Any]] = {"model": MODEL, "temperature": 0, "max_tokens": 12}

type Body = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Case:
    """One request pattern of a client.

    Attributes:
      area: part of the API, such as responses.
      name: a short description.
      body: runs the case with a client; fails with an assertion.
      is_refusal: the server refuses the request by design, and the case checks the refusal.
    """

    area: str
    name: str
    body: Body
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a case; `problem` is None if it passed."""

    area: str
    name: str
    client: str
    is_refusal: bool
    problem: str | None


CASES: Final[list[Case]] = []


def case(area: str, name: str, *, is_refusal: bool = False) -> Callable[[Body], Body]:
    """Register a function as a case."""

    def add(body: Body) -> Body:
        CASES.append(Case(area, name, body, is_refusal))
        return body

    return add


def run_case(one: Case, url: str, *, is_async: bool, api_key: str = "none") -> Outcome:
    """Run a case with strict response validation and without retries."""
    return asyncio.run(_run(one, url, is_async, api_key))


async def _run(one: Case, url: str, is_async: bool, api_key: str) -> Outcome:
    problem = None
    try:
        if is_async:
            async with openai.AsyncOpenAI(
                base_url=url, api_key=api_key, max_retries=0, _strict_response_validation=True
            ) as client:
                await one.body(client)
        else:
            with openai.OpenAI(
                base_url=url, api_key=api_key, max_retries=0, _strict_response_validation=True
            ) as client:
                await one.body(AsyncAdapter(client))
    except (AssertionError, openai.OpenAIError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} ({place.name}: {place.line})"
    return Outcome(
        one.area, one.name, "openai, async" if is_async else "openai, sync", one.is_refusal, problem
    )


class AsyncAdapter:
    """A synchronous client, or a part of one, with the interface of an asynchronous one."""

    def __init__(self, value: Any) -> None:
        """Wrap a client, a part of it, or a stream."""
        self._value = value

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped attribute; methods can be awaited."""
        return _awaited(getattr(self._value, name))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it at once; the result can be awaited, entered, and iterated."""
        return AsyncResult(self._value(*arguments, **options))


class AsyncResult:
    """Result of a synchronous method that can be awaited, entered or iterated asynchronously."""

    def __init__(self, value: Any) -> None:
        """Wrap a value of any type."""
        self._value = value

    def __await__(self) -> Iterator[Any]:
        """Return the value without waiting."""
        return self._result().__await__()

    async def _result(self) -> Any:
        return _awaited(self._value)

    def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate the value's items."""
        return _each(self._value)

    async def __aenter__(self) -> Any:
        """Enter the wrapped context manager."""
        return _awaited(self._value.__enter__())

    async def __aexit__(self, *error: Any) -> None:
        """Exit the wrapped context manager."""
        self._value.__exit__(*error)


class AsyncStreamAdapter(AsyncAdapter):
    """A synchronous stream with the interface of an asynchronous one."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate the stream's events."""
        return _each(self._value)

    async def __aenter__(self) -> Any:
        """Enter the wrapped stream."""
        self._value.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Exit the wrapped stream."""
        self._value.__exit__(*error)


async def _each(values: Any) -> AsyncIterator[Any]:
    for value in values:
        yield value


def _awaited(value: Any) -> Any:
    """Wrap a client's parts, methods and streams; return results unchanged."""
    if hasattr(value, "__next__") and hasattr(value, "__enter__"):
        return AsyncStreamAdapter(value)
    is_part = type(value).__module__.startswith("openai.resources")
    return AsyncAdapter(value) if callable(value) or is_part else value


async def refused(code: str, param: str | None, call: Any, **options: Any) -> None:
    """Assert that a call with these options is refused with this error code and field name."""
    try:
        await call(**options)
    except openai.APIStatusError as error:
        found = (error.code, error.param)
        assert found == (code, param), f"{found} instead of {(code, param)}: {error.message}"
    else:
        raise AssertionError(f"not refused: {param}")
