"""Clients see no path, host, port, statement or address of the server, wherever an error comes from."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from pensieve_jax.core import errors
from tests.server.fakes import MODEL
from tests.server.stored_server import StoredServer

WORDS = ("/srv/private", "db.internal", "SELECT", "0x7f12", "Traceback")
DETAILS = "'/srv/private/a.sqlite' at db.internal:5432: SELECT 1 by <function f at 0x7f12>"
ERRORS = [
    errors.HistoryError(DETAILS),
    errors.HistoryUnavailableError(DETAILS),
    errors.HistoryUnavailableError(DETAILS, may_be_kept=True),
    errors.HistoryDeniedError(DETAILS),
    errors.HistoryMismatchError(DETAILS),
    errors.HistoryMissingError(DETAILS),
    errors.HistoryLockedError(DETAILS),
    errors.HistoryBusyError(DETAILS),
    errors.HistoryCorruptError(DETAILS),
    errors.StepFailedError(DETAILS),
    errors.EngineDiedError(DETAILS),
    errors.ConfigError("history", DETAILS, "a file"),
    errors.PensieveError(DETAILS),
    errors.ChatTemplateError("The template is broken", DETAILS),
    errors.InvalidRequestError("prompt", "a", "b", DETAILS),
    FileNotFoundError(2, "No such file", "/srv/private/a"),
    ConnectionRefusedError(111, "refused by db.internal:5432"),
    sqlite3.OperationalError(DETAILS),
    RuntimeError(DETAILS),
    TypeError(DETAILS),
    KeyError(DETAILS),
    UnicodeEncodeError("utf-8", DETAILS, 0, 1, DETAILS),
]
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
CONVERSATION = "/v1/conversations/conv_1"


async def seen(server: StoredServer, method: str, path: str, body=None) -> str:
    """Return the headers and the body of an answer."""
    body = None if body is None else {"model": MODEL, **body}
    status, headers, raw = await server.harness.open(method, path, body).whole()
    assert status >= 400 or headers["content-type"].startswith("text/event-stream")
    return f"{headers}{raw.decode()}"


def raising(error: BaseException):
    """Return a function, and a coroutine function, that raise the error."""

    def work(*_, **__):
        raise error

    async def awaited(*_, **__):
        raise error

    return work, awaited


async def refused(server: StoredServer, error, monkeypatch) -> list[str]:
    """The engine refuses turns."""
    found = []
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {**CHAT, "max_tokens": 4}),
        ("/v1/responses", {"input": "a"}),
    ):
        server.engine.refuse.append(error)
        found.append(await seen(server, "POST", path, body))
    return found


async def failed(server: StoredServer, error, monkeypatch) -> list[str]:
    """Turns fail while their replies are streamed."""
    server.engine.script = lambda turn: (turn.feed("ab"), turn.fail(error))
    found = []
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {**CHAT, "max_tokens": 4}),
        ("/v1/responses", {"input": "a"}),
    ):
        found.append(await seen(server, "POST", path, {**body, "stream": True}))
    return found


async def unchanged(server: StoredServer, error, monkeypatch) -> list[str]:
    """The engine's process cannot change the history, or answer calls."""
    _, awaited = raising(error)
    monkeypatch.setattr(server.engine, "apply", awaited)
    monkeypatch.setattr(server.engine, "call", awaited)
    return [
        await seen(server, "POST", "/v1/conversations", {}),
        await seen(server, "GET", "/v1/pensieve/chunks"),
        await seen(server, "GET", "/v1/pensieve/chunks?stream=true"),
        await seen(server, "GET", "/v1/pensieve/stats"),
        await seen(server, "POST", "/v1/pensieve/push_out", {"response_id": "resp_" + "0" * 32}),
        await seen(server, "DELETE", CONVERSATION),
    ]


async def unread(server: StoredServer, error, monkeypatch) -> list[str]:
    """The history cannot be read."""
    work, _ = raising(error)
    monkeypatch.setattr(server.reader, "_run", work)
    return [
        await seen(server, "GET", "/v1/responses/resp_1"),
        await seen(server, "GET", "/v1/responses/resp_1?stream=true"),
        await seen(server, "GET", "/v1/pensieve/trees"),
        await seen(server, "GET", "/v1/pensieve/stored"),
        await seen(server, "GET", f"{CONVERSATION}/items"),
        await seen(server, "POST", f"{CONVERSATION}/items", {"items": [{"role": "user", "content": "a"}]}),
        await seen(server, "POST", "/v1/responses", {"input": "a", "conversation": "conv_1"}),
        await seen(server, "POST", "/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
        await seen(server, "POST", "/v1/completions", {"prompt": "a", "previous_response_id": "resp_1"}),
    ]


async def untokenized(server: StoredServer, error, monkeypatch) -> list[str]:
    """The tokenizer, or the chat template, fails."""
    work, _ = raising(error)
    monkeypatch.setattr(server.harness.services.tokenizer, "encode", work)
    monkeypatch.setattr(server.harness.services.resolver, "resolve", work)
    monkeypatch.setattr(server.harness.services.chat_format, "token_ids", work)
    return [
        await seen(server, "POST", "/v1/completions", {"prompt": "a"}),
        await seen(server, "POST", "/v1/chat/completions", CHAT),
        await seen(server, "POST", "/v1/messages", {**CHAT, "max_tokens": 4}),
        await seen(server, "POST", "/v1/messages/count_tokens", CHAT),
        await seen(server, "POST", "/tokenize", {"prompt": "a"}),
        await seen(server, "POST", "/tokenize", CHAT),
    ]


@pytest.mark.parametrize("seam", [refused, failed, unchanged, unread, untokenized])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_tells_clients_nothing_about_the_server(tmp_path, monkeypatch, seam, error):
    server = StoredServer(tmp_path / "history.sqlite")

    async def scenario() -> list[str]:
        # One client's answer is complete before the next request, so nothing waits for the other tasks.
        async with asyncio.timeout(20.0):
            return await seam(server, error, monkeypatch)

    for told in asyncio.run(scenario()):
        assert not [word for word in WORDS if word in told], told
    server.close()
