"""Middleware around every request.

Owns: request ids, the access log, errors as responses, the allowed Host names, and the allowed origins.
Does not know: routes, keys, bodies. Called by the application.

It is plain ASGI, so that nothing delays the message to a handler that its client left.
"""

from __future__ import annotations

import re
import secrets
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pensieve_jax.server.http.errors import ApiError, as_api_error, is_expected
from pensieve_jax.server.http.replies import ErrorReply, encode_json, error_reply
from pensieve_jax.server.http.request import ClientGoneError, RequestNotes
from pensieve_jax.server.http.settings import ServerSettings, is_loopback
from pensieve_jax.server.logs import log_error, log_request

NOTES: Final = "pensieve.notes"
"""The key of an ASGI scope under which its `RequestNotes` are."""
REQUEST_ID_CHARACTERS: Final = "A-Za-z0-9._:-"
"""Characters allowed in a client's request id, as a regular expression class."""
MAX_REQUEST_ID_LENGTH: Final = 128
_REQUEST_ID = re.compile(rf"[{REQUEST_ID_CHARACTERS}]{{1,{MAX_REQUEST_ID_LENGTH}}}\Z")
_ID_HEADERS: Final = ("x-request-id", "request-id")
"""Names of the request id in responses: OpenAI's, and Anthropic's."""
_MAX_IGNORED_BYTES: Final = 1000
_CHANGING: Final = frozenset({"POST", "DELETE"})
_PROBES: Final = frozenset({"/health", "/ready"})
"""Paths of health probes. Their 503 is a normal answer and not counted as a rejected request. They skip the
Host check, because probes often know only an address."""
CLIENT_GONE_STATUS: Final = 499
"""The status in the log for clients that left; it is never sent."""


class RequestLog:
    """Middleware that assigns request ids, and logs one line per request when it ends."""

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
                ids = [(name.encode(), request_id.encode()) for name in _ID_HEADERS]
                headers = [*message["headers"], *ids]
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
    """Middleware that converts every exception to an error response, without a traceback."""

    def __init__(
        self,
        app: ASGIApp,
        refused: Callable[[str], object],
        forms: Mapping[str, ErrorReply] = MappingProxyType({}),
    ) -> None:
        """Wrap `app`.

        Args:
          app: the application.
          refused: called with the code of each 429 and 503.
          forms: makes the responses of errors by path; the form of other paths is OpenAI's.
        """
        self._app = app
        self._refused = refused
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False
        reply = self._forms.get(scope["path"], error_reply)
        request_id = scope[NOTES].request_id

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientGoneError:
            raise
        except HTTPException as error:
            await reply(_of_routing(error, scope), request_id).send(receive, send)
        except Exception as error:  # outermost handler: the log has the exception under its request id
            if not is_expected(error):
                log_error(request_id, error)
            if started:  # a truncated response must not look complete
                raise ClientGoneError from error
            answer = as_api_error(error)
            if answer.status in (429, 503) and scope[NOTES].route not in _PROBES:
                self._refused(answer.code)
            response = reply(answer, request_id)
            del answer  # the error's traceback has this frame: no cycle may keep the request's texts
            await response.send(receive, send)


def _of_routing(error: HTTPException, scope: Scope) -> ApiError:
    """Convert an exception of Starlette's router, which is a 405 or a 404."""
    if error.status_code == 405:
        headers = dict(error.headers or {})
        sentence = (
            f"{scope['path']} does not accept {scope['method']}; it accepts {headers.get('Allow', '')}."
        )
        return ApiError(405, "method_not_allowed", sentence, headers=headers)
    return ApiError(404, "unknown_url", f"The route {scope['method']} {scope['path']} does not exist.")


class HostCheck:
    """Middleware that rejects heads that HTTP forbids, and foreign Host headers, to prevent DNS rebinding.

    A request must have one Host, and its body no coding but `chunked`. Proxies differ in which of two hosts
    they take, and in whether they decode a body.

    Any web page can let its own domain name point to this machine, and its script then reaches a server on
    loopback that needs no key. With keys, every name is allowed unless `allowed_hosts` lists some. Probes are
    exempt, because they reveal nothing to a page.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        """Check names if the server has no keys or `allowed_hosts` is set."""
        self._app = app
        self._names = {name.lower() for name in settings.allowed_hosts}
        self._is_on = bool(self._names) or not settings.needs_keys
        self._names.add(settings.host.lower().strip("[]"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _check_head(scope)
        if self._is_on and scope["type"] == "http" and scope["path"] not in _PROBES:
            name = _host_name(Headers(scope=scope).get("host", ""))
            if name not in self._names and not is_loopback(name):
                sentence = "The Host header names another server; allow the name with --allowed_hosts."
                raise ApiError(403, "unknown_host", sentence)
        await self._app(scope, receive, send)


def _check_head(scope: Scope) -> None:
    """Raise ApiError for a missing or second Host, and for a transfer coding other than `chunked`."""
    headers = Headers(scope=scope)
    num_hosts = len(headers.getlist("host"))
    if num_hosts > 1 or (not num_hosts and scope.get("http_version") == "1.1"):
        sentence = f"The request has {num_hosts} Host headers; it must have one."
        raise ApiError(400, "invalid_value", sentence, param="Host")
    codings = ",".join(headers.getlist("transfer-encoding"))
    if codings and codings.strip(" \t").lower() != "chunked":
        sentence = (
            f"Transfer-Encoding is {codings[:100]!r}; it must be chunked. Send the body without a coding."
        )
        raise ApiError(501, "unsupported_transfer_coding", sentence, param="Transfer-Encoding")


class OriginCheck:
    """Middleware that rejects preflights, and requests by pages of other origins if the server has no keys.

    A preflight gets here only if `cors_origin` allows no origin; otherwise `Cors` answers it.

    A form, or a script that need not read the response, can send any request to a server on loopback. A GET
    of the API changes nothing, but takes a place, such as a map's. Only the browser's headers Origin and
    Sec-Fetch-Site tell them apart. Other programs send no such header and pass.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        """Allow pages of the server itself and of `cors_origin`; with keys, check nothing."""
        self._app = app
        self._origins = frozenset(settings.cors_origin)
        self._is_on = not settings.needs_keys and "*" not in self._origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if "origin" in headers and "access-control-request-method" in headers:
                raise _cors_refused()
        if self._is_on and scope["type"] == "http":
            is_checked = scope["method"] in _CHANGING or scope["path"].startswith("/v1/")
            if is_checked and self._is_foreign(Headers(scope=scope)):
                raise _cors_refused()
        await self._app(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        """Return whether a page of another origin sends the request; one for an image has no Origin."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        return not self._is_ours(origin, headers.get("host", ""))

    def _is_ours(self, origin: str, host: str) -> bool:
        own = origin.lower().partition("://")[2]
        return origin in self._origins or (own != "" and own == host.lower())


def _cors_refused() -> ApiError:
    return ApiError(
        403,
        "cors_refused",
        "Pages of this origin may not send requests; allow the origin with --cors_origin.",
    )


def _host_name(host: str) -> str:
    """Return a Host header's name in lower case, without its port and brackets."""
    name = host.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


class Cors(CORSMiddleware):
    """Starlette's CORS middleware with our error for a rejected preflight."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        """Allow pages of these origins to read responses."""
        super().__init__(
            app,
            allow_origins=tuple(origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(*_ID_HEADERS, "x-ignored-fields", "retry-after", "x-should-retry"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return a 204 for an allowed preflight, else our error."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return Response(status_code=204, headers=_without_body(response.headers))
        body = encode_json(_cors_refused().body)
        return Response(body, 403, _without_body(response.headers), "application/json")


def _without_body(headers: Iterable[str] | Headers) -> dict[str, str]:
    assert isinstance(headers, Headers)
    return {name: value for name, value in headers.items() if not name.startswith("content-")}


def _listed(names: tuple[str, ...]) -> bytes:
    """Encode field names for a header; names beyond its size limit are not processed."""
    quoted: list[str] = []
    room = _MAX_IGNORED_BYTES
    for name in names:
        if room <= 0:
            break
        quoted.append(urllib.parse.quote(name[:room], safe="[]"))  # quoting never shortens
        room -= len(quoted[-1]) + 1
    return ",".join(quoted).encode()[:_MAX_IGNORED_BYTES]
