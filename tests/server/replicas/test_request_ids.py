"""The id of a request through Serve's proxy: the same in the answer, the log and errors."""

from __future__ import annotations

import asyncio
import io
import json
from types import SimpleNamespace

import pytest

from pensieve_jax.server.http.middleware import ErrorReplies, RequestLog
from pensieve_jax.server.logs import log_to
from pensieve_jax.server.replicas.serve_middleware import ChunkRateLimiter, ProxyRequestIdMiddleware
from tests.log_state import kept_log

pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Ray's imports


async def fails(scope, receive, send):
    raise RuntimeError


async def answers(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def asked(inner, headers):
    """Return the ids of the answer, and the lines of the log."""
    from ray.serve._private.http_util import RequestIdMiddleware

    app = RequestIdMiddleware(
        ProxyRequestIdMiddleware(RequestLog(ErrorReplies(inner, refused=lambda code: None)))
    )
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": "/", "headers": headers}
    log = io.StringIO()
    with kept_log():
        log_to(log)
        asyncio.run(app(scope, receive, send))
    found = [value.decode() for name, value in sent[0]["headers"] if name.lower() == b"x-request-id"]
    return found, [json.loads(line) for line in log.getvalue().splitlines()]


def test_a_clients_own_id_is_used_in_the_answer_and_the_log():
    found, (line,) = asked(answers, [(b"x-request-id", b"mine-1")])
    assert (found, line["request_id"]) == (["mine-1"], "mine-1")


def test_a_request_without_an_id_has_the_proxys_id_in_the_log_too():
    (found,), (line,) = asked(answers, [])
    assert line["request_id"] == found != ""


def test_an_error_is_logged_under_the_id_of_its_answer():
    found, lines = asked(fails, [(b"x-request-id", b"mine-2")])
    assert found == ["mine-2"] and [line["request_id"] for line in lines] == found * 2
    assert {line["message"] for line in lines} == {"error", "request"}


def test_an_id_that_must_not_be_logged_is_still_recognized():
    (found,), (line,) = asked(answers, [(b"x-request-id", b"my \x1b[1m id" + b"9" * 500)])
    assert found.startswith("my \x1b[1m id9")
    assert line["request_id"].startswith("my___1m_id9") and len(line["request_id"]) == 128


def test_scopes_other_than_http_pass_through():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    asyncio.run(ProxyRequestIdMiddleware(app)({"type": "lifespan"}, None, None))
    assert seen == [{"type": "lifespan"}]


def test_the_front_ends_application_leaves_ids_to_the_proxy_and_limits_the_rate():
    from pensieve_jax.server.replicas.serve_app import Front

    app = Front.__serve_build_asgi_app__(SimpleNamespace(_application=lambda: answers))
    assert (
        isinstance(app, ProxyRequestIdMiddleware)
        and isinstance(app._app, ChunkRateLimiter)
        and app._app._app is answers
    )
