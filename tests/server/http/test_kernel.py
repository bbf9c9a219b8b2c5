"""The path of every request to its handler and back: error format, keys, names, bodies, ids, and the log."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import json
import logging
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest

from pensieve_jax.core import errors as core
from pensieve_jax.core.errors import ConfigError
from pensieve_jax.server.http import middleware
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.bodies import MAX_IGNORED, Body, convert
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.keys import ApiKeys
from pensieve_jax.server.http.replies import HttpResponse, json_reply
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.http.settings import ServerSettings
from pensieve_jax.server.logs import LOGGER, JsonLines
from tests.server.fakes import Harness, Open

SECRET = "the secret words of a prompt"


class Inner(Body):
    size: int = 0


class Outer(Body):
    name: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()

    UNSUPPORTED: ClassVar = {"tools": ([],), "penalty": (0,)}
    IGNORED: ClassVar = frozenset({"user"})


async def echo(call: HttpRequest) -> HttpResponse:
    body = await call.decode(Outer)
    return json_reply({"owner": call.owner, "name": body.name})


async def show(call: HttpRequest) -> HttpResponse:
    return json_reply({"id": call.path["thing_id"], "owner": call.owner})


async def unexpected(call: HttpRequest) -> HttpResponse:
    raise RuntimeError(SECRET)


def raising(error: Exception) -> Route:
    async def handler(call: HttpRequest) -> HttpResponse:
        raise error

    return Route("GET", "/raise", handler)


ROUTES = [
    Route("POST", "/echo", echo),
    Route("GET", "/things/{thing_id}", show),
    Route("DELETE", "/things/{thing_id}", show),
    Route("GET", "/unexpected", unexpected),
    Route("GET", "/open", unexpected, needs_key=False),
    Route("POST", "/act", lambda call: _done(), has_body=False),
]


async def _done() -> HttpResponse:
    return json_reply({})


def run(coroutine):
    return asyncio.run(coroutine)


async def ask(harness: Harness, method: str, path: str, body=None, headers=None):
    status, headers_out, raw = await harness.open(method, path, body, headers).whole()
    return status, headers_out, raw


@pytest.fixture
def lines():
    """Yield the log's lines."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    LOGGER.addHandler(handler)
    level, LOGGER.level = LOGGER.level, logging.INFO
    LOGGER.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(level)


def test_a_request_reaches_its_handler_and_ignored_fields_are_listed():
    body = {"name": "n", "user": "u", "tools": [], "penalty": 0, "odd é": 1, "many": [{"size": 1, "x": 2}]}
    status, headers, raw = run(ask(Harness(ROUTES), "POST", "/echo", body))
    assert (status, json.loads(raw)) == (200, {"owner": "", "name": "n"})
    assert headers["x-ignored-fields"] == "odd%20%C3%A9,many[].x"
    assert headers["content-type"] == "application/json"


def test_names_beyond_the_size_of_the_header_are_not_examined(monkeypatch):
    """One body may hold a million, and the header is written on the event loop."""
    quoted, quote = [], middleware.urllib.parse.quote

    def noted(name, **options):
        quoted.append(name)
        return quote(name, **options)

    monkeypatch.setattr(middleware.urllib.parse, "quote", noted)
    names = [f"x{number}" for number in range(5 * MAX_IGNORED)]
    _, headers, _ = run(ask(Harness(ROUTES), "POST", "/echo", {"name": "n", **dict.fromkeys(names, 0)}))
    assert headers["x-ignored-fields"] == ",".join(names)[:1000].removesuffix(",")
    assert len(quoted) <= 1000
    _, headers, _ = run(ask(Harness(ROUTES), "POST", "/echo", {"name": "n", "é" * 100_000: 0}))
    assert headers["x-ignored-fields"] == ("%C3%A9" * 200)[:1000]
    assert len(quoted[-1]) <= 1000


def test_a_name_in_many_places_is_listed_once():
    many = [{"size": 1, "x": 2}] * (2 * MAX_IGNORED)
    _, headers, _ = run(ask(Harness(ROUTES), "POST", "/echo", {"name": "n", "many": many, "y": 0}))
    assert headers["x-ignored-fields"] == "many[].x,y"
    found, ignored = convert({"name": "n", **{f"x{number}": 0 for number in range(2 * MAX_IGNORED)}}, Outer)
    assert found.name == "n" and len(ignored) == MAX_IGNORED


NOT_RETRIED = ("step_failed", "history_failed", "logits_not_finite")


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (core.InvalidRequestError("top_p", 2, "at most 1"), 400, "invalid_value", "top_p"),
        (core.ContextLengthError("prompt", 9, "at most 8"), 400, "context_length_exceeded", "prompt"),
        (core.TokenizerMissingError(), 400, "invalid_value", None),
        (core.ChatTemplateError("no template"), 400, "invalid_value", None),
        (core.UnknownTurnError("0" * 32), 404, "previous_response_not_found", None),
        (core.UnknownRecordError("response", "resp_1"), 404, "not_found", None),
        (core.UnknownConversationError("c"), 404, "not_found", None),
        (core.ConversationBusyError("c"), 409, "conversation_locked", None),
        (core.ConversationChangedError("c"), 409, "conversation_locked", None),
        (core.StepFailedError("a step failed"), 500, "step_failed", None),
        (core.LogitsError(3), 500, "logits_not_finite", None),
        (core.HistoryError("read-only"), 500, "history_failed", None),
        (core.HistoryLockedError("open"), 500, "history_failed", None),
        (core.EngineClosedError("closed"), 503, "overloaded", None),
        (core.ConfigError("port", 1, "2"), 500, "internal_error", None),
        (ApiError(422, "other_body", "Another body."), 422, "other_body", None),
        (ValueError(SECRET), 500, "internal_error", None),
        (RecursionError(), 500, "internal_error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_error_has_one_shape(error, status, code, param):
    answered, headers, raw = run(ask(Harness([raising(error)]), "GET", "/raise"))
    described = json.loads(raw)["error"]
    assert (answered, described["code"], described["param"]) == (status, code, param)
    assert described.keys() == {"message", "type", "param", "code"} and json.loads(raw).keys() == {"error"}
    assert described["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert SECRET not in raw.decode() and "Traceback" not in raw.decode()
    assert headers.get("retry-after") == ("1" if status in (409, 503) else None)
    assert headers.get("x-should-retry") == ("false" if code in NOT_RETRIED else None)


@pytest.mark.parametrize("refuses_all", [False, True])
def test_clients_are_told_to_change_messages_only_where_that_helps(refuses_all):
    error = core.ChatTemplateError("no", "edit the model directory", refuses_all=refuses_all)
    _, _, raw = run(ask(Harness([raising(error)]), "GET", "/raise"))
    message = json.loads(raw)["error"]["message"]
    assert message == f"no; {'' if refuses_all else 'change the messages, or '}send text to /v1/completions."


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/echo/", 404, "unknown_url"),
        ("GET", "/things/a/b", 404, "unknown_url"),
        ("GET", "/echo", 405, "method_not_allowed"),
        ("PUT", "/things/a", 405, "method_not_allowed"),
        ("OPTIONS", "/echo", 405, "method_not_allowed"),
    ],
)
def test_errors_of_unknown_routes_have_the_servers_format(method, path, status, code):
    answered, headers, raw = run(ask(Harness(ROUTES), method, path))
    assert (answered, json.loads(raw)["error"]["code"]) == (status, code)
    if path == "/things/a":
        assert {word.strip() for word in headers["allow"].split(",")} == {"GET", "HEAD", "DELETE"}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"\xff", "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (b'{"name": "n", "inner": ' + b'{"inner": ' * 5_000, "invalid_json", None),
        ([], "invalid_value", None),
        ({}, "missing_required_parameter", "name"),
        ({"name": 1}, "invalid_value", "name"),
        ({"name": "n", "inner": {"size": "1"}}, "invalid_value", "inner.size"),
        ({"name": "n", "many": [{}, {"size": 1.5}]}, "invalid_value", "many[1].size"),
        ({"name": "n", "many": [{"size": 1}, 3]}, "invalid_value", "many[1]"),
        ({"name": "n", "tools": [{}]}, "unsupported_parameter", "tools"),
        ({"name": "n", "penalty": 0.5}, "unsupported_parameter", "penalty"),
        ({"name": "n", "penalty": False}, "unsupported_parameter", "penalty"),
    ],
)
def test_an_invalid_body_is_reported_with_the_path_of_its_field(body, code, param):
    status, _, raw = run(ask(Harness(ROUTES), "POST", "/echo", body))
    error = json.loads(raw)["error"]
    assert (status, error["code"], error["param"]) == (400, code, param)


def test_bodies_are_json_of_limited_length():
    harness = Harness(ROUTES, settings=ServerSettings(max_body_bytes=100))
    whole = {"name": "n" * 200}
    assert run(ask(harness, "POST", "/echo", whole))[0] == 413
    assert run(ask(harness, "POST", "/echo", whole, {"content-length": "300"}))[0] == 413
    assert run(ask(harness, "POST", "/echo", {"name": "n"}, {"content-type": "text/plain"}))[0] == 415
    utf8 = {"content-type": "Application/JSON; charset=utf-8"}
    assert run(ask(harness, "POST", "/echo", {"name": "n"}, utf8))[0] == 200
    assert run(ask(harness, "POST", "/act", None, {"content-type": ""}))[0] == 200
    assert run(ask(harness, "POST", "/act", {}, {"content-type": "text/plain"}))[0] == 415
    assert run(ask(harness, "POST", "/act", {}))[0] == 200


@pytest.mark.parametrize("has_keys", [False, True])
def test_bodies_have_a_total_budget_and_one_per_key(tmp_path, has_keys):
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name}:{hashlib.sha256(name.encode()).hexdigest()}\n" for name in "abcde"))
    held = asyncio.Event()

    async def hold(call: HttpRequest) -> HttpResponse:
        await held.wait()
        return json_reply({})

    async def scenario():
        settings = ServerSettings(
            max_body_bytes=1000,
            api_keys_file=str(keys) if has_keys else None,
            budgets={"body_bytes": 1000},
            key_budgets={"body_bytes": 250} if has_keys else {},
        )
        harness = Harness([Route("POST", "/hold", hold), *ROUTES], settings=settings)

        def send(name: str, length: int) -> Open:
            body = b"x" * length
            return harness.open("POST", "/hold", body, {"authorization": f"Bearer {name}"})

        first = [send(name, 240) for name in "abcd"]
        await asyncio.sleep(0)
        status, headers, raw = await send("a", 100).whole()
        assert (status, json.loads(raw)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert headers["retry-after"] == "1"
        status, _, raw = await send("e", 100).whole()
        expected = (503, "overloaded") if has_keys else (429, "rate_limit_exceeded")
        assert (status, json.loads(raw)["error"]["code"]) == expected
        held.set()
        for request in (*first, send("a", 100), send("e", 240)):
            assert (await request.whole())[0] == 200

    asyncio.run(scenario())


def test_a_body_that_does_not_arrive_times_out():
    async def scenario():
        request = Open(
            Harness(ROUTES, settings=ServerSettings(body_timeout_s=0.01)).app, "POST", "/echo", b"", {}
        )
        request._incoming.get_nowait()
        request._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        return await request.whole()

    status, headers, raw = run(scenario())
    assert (status, json.loads(raw)["error"]["code"]) == (408, "request_timeout")
    assert headers["connection"] == "close"


def test_unknown_host_names_are_refused_while_no_key_is_required(tmp_path):
    harness = Harness(ROUTES)
    for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert run(ask(harness, "GET", "/things/a", headers={"host": host}))[0] == 200
    for host in ("evil.example", "localhost.evil.example:8000", ""):
        status, _, raw = run(ask(harness, "GET", "/things/a", headers={"host": host}))
        assert (status, json.loads(raw)["error"]["code"]) == (403, "unknown_host")
    named = Harness(ROUTES, settings=ServerSettings(allowed_hosts=("chat.example",)))
    assert run(ask(named, "GET", "/things/a", headers={"host": "chat.example"}))[0] == 200
    keyed = Harness(ROUTES, settings=ServerSettings(api_keys_file=str(keys_file(tmp_path, alice="a"))))
    headers = {"host": "any.example", "authorization": "Bearer a"}
    assert run(ask(keyed, "GET", "/things/a", headers=headers))[0] == 200


def keys_file(directory, **keys: str):
    path = directory / "keys"
    path.write_text("# whose: which\n\n" + "".join(f"{o}:{digest(k)}\n" for o, k in keys.items()))
    return path


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_keys_have_owners(tmp_path):
    path = keys_file(tmp_path, alice="key-a", bob="key-b")
    harness = Harness(ROUTES, settings=ServerSettings(host="0.0.0.0", api_keys_file=str(path)))

    def owner(authorization: str):
        status, _, raw = run(ask(harness, "GET", "/things/a", headers={"authorization": authorization}))
        return json.loads(raw)["owner"] if status == 200 else (status, json.loads(raw)["error"]["code"])

    assert owner("Bearer key-a") == "alice" and owner("bearer  key-b") == "bob"
    wrong = (401, "invalid_api_key")
    assert [owner(text) for text in ("", "Bearer", "Bearer key-c", "Basic key-a", "key-a", "Bearer é")] == [
        wrong
    ] * 6
    assert run(ask(harness, "GET", "/open"))[0] == 500  # reached without a key

    path.write_text(f"dora:{digest('voilà')}\n")
    harness.services.keys.reload()
    assert owner("Bearer voilà") == "dora"  # sent in UTF-8, from which its digest was computed

    path.write_text(f"carol:{digest('key-c')}\n")
    assert harness.services.keys.reload() == 1 and owner("Bearer key-c") == "carol"
    assert owner("Bearer key-a") == wrong


@pytest.mark.parametrize(
    ("headers", "owner"),
    [
        ({"x-api-key": "key-a"}, "alice"),
        ({"x-api-key": "key-a", "authorization": "Bearer key-b"}, "bob"),
        ({"x-api-key": "key-a", "authorization": "Bearer other"}, "alice"),
        ({"x-api-key": "key-a", "authorization": "Basic key-b"}, "alice"),
        ({"x-api-key": "other", "authorization": "Bearer key-b"}, "bob"),
        ({"x-api-key": "other"}, None),
        ({"x-api-key": ""}, None),
    ],
)
def test_a_key_may_be_sent_as_x_api_key(tmp_path, headers, owner):
    path = keys_file(tmp_path, alice="key-a", bob="key-b")
    harness = Harness(ROUTES, settings=ServerSettings(host="0.0.0.0", api_keys_file=str(path)))
    status, _, raw = run(ask(harness, "GET", "/things/a", headers=headers))
    assert (json.loads(raw)["owner"] if status == 200 else None) == owner


def test_a_route_has_the_errors_of_its_api():
    """Also those of requests that reach no handler, and of unexpected exceptions."""

    def reply(error: ApiError, request_id: str):
        return json_reply({"other": error.code, "id": request_id}, error.status, error.headers)

    routes = [*ROUTES, Route("POST", "/mine", unexpected, error_reply=reply)]
    harness = Harness(routes)
    asked = [
        ("POST", {}, {}, 500, "internal_error"),
        ("GET", None, {}, 405, "method_not_allowed"),
        ("POST", {}, {"host": "elsewhere.example"}, 403, "unknown_host"),
        ("POST", {}, {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    ]
    for method, body, headers, status, code in asked:
        found, headers_out, raw = run(ask(harness, method, "/mine", body, {"x-request-id": "r-1"} | headers))
        assert (found, json.loads(raw)) == (status, {"other": code, "id": "r-1"})
        assert headers_out["request-id"] == headers_out["x-request-id"] == "r-1"
    assert json.loads(run(ask(harness, "GET", "/unexpected"))[2])["error"]["code"] == "internal_error"


@pytest.mark.parametrize("text", ["alice\n", "alice:12\n", "a b:" + "0" * 64, "", "# none\n", "sk-secret\n"])
def test_an_invalid_keys_file_keeps_the_old_keys_and_its_lines_are_not_shown(tmp_path, text):
    path = keys_file(tmp_path, alice="a")
    keys = ApiKeys(path)
    path.write_text(text)
    with pytest.raises(ConfigError, match="api_keys_file") as caught:
        keys.reload()
    assert keys.owner("Bearer a") == "alice"
    assert "sk-secret" not in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match="readable"):
        keys.reload()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.1", "example.com", "::"])
def test_without_keys_only_this_machine_is_served(host):
    with pytest.raises(ConfigError, match="loopback"):
        ServerSettings(host=host)
    ServerSettings(host=host, api_keys_file="keys")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_keys(host):
    assert ServerSettings(host=host).is_loopback


def test_a_request_has_an_id_and_a_log_line_without_its_text(lines):
    harness = Harness(ROUTES)
    _, headers, _ = run(ask(harness, "POST", "/echo", {"name": SECRET}, {"x-request-id": "mine-1"}))
    assert headers["x-request-id"] == "mine-1"
    _, headers, _ = run(ask(harness, "GET", f"/things/{SECRET}", headers={"x-request-id": "with space"}))
    made = headers["x-request-id"]
    assert made.startswith("req_")
    status, headers, raw = run(ask(harness, "GET", "/unexpected"))
    first, second, error, third = lines()
    assert (first["request_id"], first["route"], first["status"]) == ("mine-1", "/echo", 200)
    assert (second["request_id"], second["route"]) == (made, "/things/{thing_id}")
    assert (
        error["error"]["kind"] == "builtins.RuntimeError" and error["request_id"] == headers["x-request-id"]
    )
    assert any("test_kernel.py" in place for place in error["error"]["at"])
    assert third["status"] == status == 500
    assert SECRET not in json.dumps(lines()) and SECRET not in raw.decode()


def test_pages_of_other_origins_read_nothing_unless_allowed():
    origin = {"origin": "https://chat.example"}
    preflight = origin | {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    assert (
        "access-control-allow-origin" not in run(ask(Harness(ROUTES), "GET", "/things/a", headers=origin))[1]
    )
    harness = Harness(ROUTES, settings=ServerSettings(cors_origin=("https://chat.example",)))
    _, headers, _ = run(ask(harness, "GET", "/things/a", headers=origin))
    assert headers["access-control-allow-origin"] == "https://chat.example"
    status, headers, raw = run(ask(harness, "OPTIONS", "/echo", headers=preflight))
    assert (status, raw, headers["access-control-allow-origin"]) == (204, b"", "https://chat.example")
    status, _, raw = run(ask(harness, "OPTIONS", "/echo", headers=preflight | {"origin": "https://other"}))
    assert (status, json.loads(raw)["error"]["code"]) == (403, "cors_refused")


@pytest.mark.parametrize("keyed", [False, True])
def test_a_preflight_is_refused_where_no_origin_is_allowed(tmp_path, keyed):
    keys = str(keys_file(tmp_path, alice="a")) if keyed else None
    harness = Harness(ROUTES, settings=ServerSettings(api_keys_file=keys))
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    status, _, raw = run(ask(harness, "OPTIONS", "/echo", headers=asked))
    assert (status, json.loads(raw)["error"]["code"]) == (403, "cors_refused")
    for headers in ({}, {"origin": "https://chat.example"}):  # no preflight
        assert run(ask(harness, "OPTIONS", "/echo", headers=headers))[0] == 405


@pytest.mark.parametrize("path", ["/things/a", "/health"])
@pytest.mark.parametrize(
    ("headers", "http_version", "expected"),
    [
        ([("host", "localhost")], "1.1", 200),
        ([("host", "localhost"), ("host", "localhost")], "1.1", 400),
        ([("host", "localhost"), ("host", "evil.example")], "1.1", 400),
        ([], "1.1", 400),
        ([], "1.0", 200),
        ([("host", "localhost"), ("transfer-encoding", "chunked")], "1.1", 200),
        ([("host", "localhost"), ("transfer-encoding", " Chunked\t")], "1.1", 200),
        ([("host", "localhost"), ("transfer-encoding", "gzip, chunked")], "1.1", 501),
        (
            [("host", "localhost"), ("transfer-encoding", "gzip"), ("transfer-encoding", "chunked")],
            "1.1",
            501,
        ),
        ([("host", "localhost"), ("transfer-encoding", "chunked, chunked")], "1.1", 501),
    ],
)
def test_a_head_has_one_host_and_no_coding_but_chunked(tmp_path, path, headers, http_version, expected):
    settings = ServerSettings(api_keys_file=str(keys_file(tmp_path, alice="a")))
    harness = Harness(
        [*ROUTES, Route("GET", "/health", lambda call: _done(), needs_key=False)], settings=settings
    )
    sent = [(name.encode(), value.encode()) for name, value in [*headers, ("authorization", "Bearer a")]]
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": sent,
        "http_version": http_version,
    }
    messages = []

    async def send(message):
        messages.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    run(harness.app(scope, receive, send))
    assert messages[0]["status"] == expected, messages


def test_allowed_pages_may_read_errors_too(tmp_path):
    origin = {"origin": "https://chat.example"}
    open_ = ServerSettings(cors_origin=("https://chat.example",))
    keys = str(keys_file(tmp_path, alice="a"))
    keyed = ServerSettings(cors_origin=("https://chat.example",), api_keys_file=keys)
    for settings, path, expected in (
        (open_, "/unexpected", 500),
        (open_, "/nowhere", 404),
        (keyed, "/things/a", 401),
    ):
        status, headers, _ = run(ask(Harness(ROUTES, settings=settings), "GET", path, headers=origin))
        assert status == expected and headers["access-control-allow-origin"] == "https://chat.example"


def test_without_keys_pages_of_other_origins_take_no_places(tmp_path):
    """An answer that a page cannot read costs as much: its maps and stats kept the user's own page out."""
    routes = [Route("GET", path, show) for path in ("/v1/pensieve/{thing_id}", "/things/{thing_id}")]

    def status(settings=None, path="/v1/pensieve/chunks", method="GET", **headers):
        asked = {"host": "localhost:8000", **{name.replace("_", "-"): one for name, one in headers.items()}}
        return run(ask(Harness(routes, settings=settings), method, path, headers=asked))[0]

    for method in ("GET", "HEAD"):
        assert status(method=method) == status(method=method, origin="http://localhost:8000") == 200
        assert status(method=method, origin="https://evil.example") == 403
    # A request without CORS, as for an image, has no Origin. A browser still says whose page it is.
    assert status(sec_fetch_site="cross-site") == status(sec_fetch_site="same-site") == 403
    assert status(sec_fetch_site="same-origin") == status(sec_fetch_site="none") == 200
    assert status(sec_fetch_site="cross-site", origin="http://localhost:8000") == 200
    assert status(path="/things/a", sec_fetch_site="cross-site") == 200
    for allowed in ("https://chat.example", "*"):
        settings = ServerSettings(cors_origin=(allowed,))
        assert status(settings, origin="https://chat.example", sec_fetch_site="cross-site") == 200
    keyed = ServerSettings(api_keys_file=str(keys_file(tmp_path, alice="a")))
    assert status(keyed, sec_fetch_site="cross-site", authorization="Bearer a") == 200


def test_without_keys_pages_of_other_origins_change_nothing(tmp_path):
    """A form, or a script that does not read the answer, sends its request without a preflight."""

    def code(harness, method, path, **headers):
        body = {"name": "n"} if path == "/echo" else None
        status, _, raw = run(ask(harness, method, path, body, headers))
        return status if status < 400 else json.loads(raw)["error"]["code"]

    harness = Harness(ROUTES)
    asked = [("POST", "/echo"), ("POST", "/act"), ("DELETE", "/things/a")]
    own = {"origin": "http://LOCALHOST:8000", "host": "localhost:8000"}
    others = ("https://evil.example", "null", "", "http://localhost:3000", "http://localhost")
    for method, path in asked:
        assert code(harness, method, path) == code(harness, method, path, **own) == 200
        for origin in others:
            assert code(harness, method, path, host="localhost:8000", origin=origin) == "cors_refused"
    assert code(harness, "GET", "/things/a", origin="https://evil.example") == 200  # which it cannot read
    for allowed in ("https://chat.example", "*"):
        told = Harness(ROUTES, settings=ServerSettings(cors_origin=(allowed,)))
        assert code(told, "POST", "/act", origin="https://chat.example") == 200
    keyed = Harness(ROUTES, settings=ServerSettings(api_keys_file=str(keys_file(tmp_path, alice="a"))))
    headers = {"origin": "https://any.example", "authorization": "Bearer a"}
    assert code(keyed, "POST", "/act", **headers) == 200


def test_the_log_has_the_milliseconds_of_a_request(lines, monkeypatch):
    times_s = iter((100.0, 101.2345678))
    monkeypatch.setattr(middleware, "time", SimpleNamespace(perf_counter=lambda: next(times_s)))
    run(ask(Harness(ROUTES), "GET", "/things/7"))
    (line,) = lines()
    assert line["duration_ms"] == 1234.568


class Text:
    """A long text, which a test can see go."""


@pytest.mark.parametrize("is_typed", [True, False])
def test_a_failed_request_keeps_nothing_alive(is_typed):
    """Its error's traceback held the frames that held the text, until the garbage collector ran."""
    left = []

    async def fail(call):
        text = Text()
        left.append(weakref.ref(text))
        await asyncio.sleep(0)
        raise ApiError(400, "invalid_value", "No.") if is_typed else KeyError("expected")

    gc.disable()
    try:
        status, _, _ = run(ask(Harness([Route("GET", "/fails", fail)]), "GET", "/fails"))
        assert status == (400 if is_typed else 500) and left[0]() is None
    finally:
        gc.enable()
