"""What happens to every request, whatever it asks for.

Owns: request ids, the access log, errors as answers, names that a server may be called by, which pages may
ask and read.
Does not know: routes, keys, bodies.
Plain ASGI: nothing here stands between a handler and the news
that its client left.
"""

from __future__ import annotations

import re
import secrets
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pensieve_jax.server.http.errors import ApiError, as_api_error, is_expected
from pensieve_jax.server.http.replies import encode_json, error_reply
from pensieve_jax.server.http.request import ClientGoneError, RequestNotes
from pensieve_jax.server.http.settings import ServerSettings, is_loopback
from pensieve_jax.server.logs import log_error, log_request

NOTES: Final = "pensieve.notes"
"""Where a scope holds its `RequestNotes`."""
REQUEST_ID_CHARACTERS: Final = "A-Za-z0-9._:-"
"""Those of a client's id that is taken as it is, as in a regular expression."""
MAX_REQUEST_ID_LENGTH: Final = 128
_REQUEST_ID = re.compile(rf"[{REQUEST_ID_CHARACTERS}]{{1,{MAX_REQUEST_ID_LENGTH}}}\Z")
_MAX_IGNORED_BYTES: Final = 1000
_CHANGING: Final = frozenset({"POST", "DELETE"})
_PROBES: Final = frozenset({"/health", "/ready"})
"""Their 503 is what they were asked for, and refuses nobody. Whoever asks knows an address and no name."""
CLIENT_GONE_STATUS: Final = 499
"""In the log, for clients that left; nothing is sent."""


class RequestLog:
    """Gives requests their ids, and writes one line of each when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.match(given) else f"req_{secrets.token_hex(16)}"
        notes = scope[NOTES] = RequestNotes(request_id)
        began_s, status, num_bytes = time.perf_counter(), CLIENT_GONE_STATUS, 0

        async def noted(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message["headers"], (b"x-request-id", request_id.encode())]
                if notes.ignored_fields:
                    headers.append((b"x-ignored-fields", _listed(notes.ignored_fields)))
                message = {**message, "headers": headers}
            else:
                num_bytes += len(message.get("body", b""))
            await send(message)

        gone = False
        try:
            await self._app(scope, receive, noted)
        except ClientGoneError:
            gone = True
        finally:
            log_request(
                request_id,
                method=scope["method"],
                route=notes.route,
                status=status,
                owner=notes.owner,
                duration_ms=round((time.perf_counter() - began_s) * 1000, 3),
                bytes_sent=num_bytes,
                client_gone=gone,
                counts=notes.counts,
            )


class ErrorReplies:
    """Makes an answer of whatever is raised, and never a trace of it."""

    def __init__(self, app: ASGIApp, refused: Callable[[str], object]) -> None:
        """Around everything that may raise; `refused` is told the code of each answer 429 or 503."""
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientGoneError:
            raise
        except HTTPException as error:
            await error_reply(_of_routing(error, scope)).send(receive, send)
        except Exception as error:  # the outermost: what nobody expected is told apart by its id in the log
            if not is_expected(error):
                log_error(scope[NOTES].request_id, error)
            if started:  # an answer that broke off must not look whole
                raise ClientGoneError from error
            answer = as_api_error(error)
            if answer.status in (429, 503) and scope[NOTES].route not in _PROBES:
                self._refused(answer.code)
            await error_reply(answer).send(receive, send)


def _of_routing(error: HTTPException, scope: Scope) -> ApiError:
    """What Starlette's router says, in our words; it says one of two things."""
    if error.status_code == 405:
        headers = dict(error.headers or {})
        sentence = f"{scope['path']} does not take {scope['method']}, but {headers.get('Allow', '')}."
        return ApiError(405, "method_not_allowed", sentence, headers=headers)
    return ApiError(404, "unknown_url", f"There is no {scope['method']} {scope['path']} here.")


class HostCheck:
    """Refuses requests under a name that this server does not have.

    A page of anybody's may let its own name point to this machine, and its script then reaches a server on
    loopback that asks for no key. Behind keys any name will do, unless names are given. Probes tell a page
    nothing.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        """Check names where no keys are asked for, or names are given."""
        self._app = app
        self._names = {name.lower() for name in settings.allowed_hosts}
        self._is_on = bool(self._names) or settings.api_keys_file is None
        self._names.add(settings.host.lower().strip("[]"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_on and scope["type"] == "http" and scope["path"] not in _PROBES:
            name = _host_name(Headers(scope=scope).get("host", ""))
            if name not in self._names and not is_loopback(name):
                sentence = "This server does not go by the name in the Host header; see --allowed_hosts."
                raise ApiError(403, "unknown_host", sentence)
        await self._app(scope, receive, send)


class OriginCheck:
    """Refuses what a page of another origin would change, while no keys are asked for.

    A form, or a script that does not want to read the answer, sends what it likes to a server on loopback;
    only a browser's Origin header tells. Programs that are no browsers send none.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        """Pages of the server itself and of `cors_origin` may ask; behind keys, whoever has one."""
        self._app = app
        self._origins = frozenset(settings.cors_origin)
        self._is_on = settings.api_keys_file is None and "*" not in self._origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_on and scope["type"] == "http" and scope["method"] in _CHANGING:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._is_ours(origin, headers.get("host", "")):
                raise _cors_refused()
        await self._app(scope, receive, send)

    def _is_ours(self, origin: str, host: str) -> bool:
        own = origin.lower().partition("://")[2]
        return origin in self._origins or (own != "" and own == host.lower())


def _cors_refused() -> ApiError:
    return ApiError(403, "cors_refused", "Pages of this origin may not ask here; see --cors_origin.")


def _host_name(host: str) -> str:
    """Return a Host header's name in lower case, without its port and brackets."""
    name = host.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


class Cors(CORSMiddleware):
    """Starlette's, but for the words of a refusal."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        """Pages of these origins may read what we answer."""
        super().__init__(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "x-ignored-fields", "retry-after", "x-should-retry"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Leave to go on, or an error of our shape."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return Response(status_code=204, headers=_without_body(response.headers))
        body = encode_json(_cors_refused().body)
        return Response(body, 403, _without_body(response.headers), "application/json")


def _without_body(headers: Iterable[str] | Headers) -> dict[str, str]:
    assert isinstance(headers, Headers)
    return {name: value for name, value in headers.items() if not name.startswith("content-")}


def _listed(names: tuple[str, ...]) -> bytes:
    """Names from a body as a header can hold them; of those that it has no room for none is looked at."""
    quoted: list[str] = []
    room = _MAX_IGNORED_BYTES
    for name in names:
        if room <= 0:
            break
        quoted.append(urllib.parse.quote(name[:room], safe="[]"))  # which is at least as long
        room -= len(quoted[-1]) + 1
    return ",".join(quoted).encode()[:_MAX_IGNORED_BYTES]
