"""The ASGI application: it routes requests to handlers and sends their responses.

Owns: the description of a route, the middleware around the router, and the check of a request's key and body.
Does not know: any particular route, what handlers do, or sockets. Called by `server.app`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.routing import Route as StarletteRoute
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.ledger import Ticket
from pensieve_jax.server.http.middleware import NOTES, Cors, ErrorReplies, HostCheck, OriginCheck, RequestLog
from pensieve_jax.server.http.replies import ErrorReply, HttpResponse, error_reply
from pensieve_jax.server.http.request import (
    ClientGoneError,
    HttpRequest,
    RequestNotes,
    read_body,
    until_revoked,
)
from pensieve_jax.server.http.services import Services

type Lifespan = Callable[[], AbstractAsyncContextManager[None]]
type Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    Attributes:
        method: GET, POST or DELETE. A GET route answers HEAD too.
        path: with parameters in braces, as in "/v1/responses/{response_id}".
        handler: takes the request and returns the response, or raises.
        needs_key: whether the route rejects requests without a key if the server has keys.
        takes_key: whether a POST takes an idempotency key. Others list it as ignored: they create nothing.
        has_body: whether a POST must have a body. False checks the content type only if there is a body.
        error_reply: makes the response of an error, in the form of the route's API. The form of a path's
          first route also serves requests that reach no handler. A path with parameters has OpenAI's there.
    """

    method: str
    path: str
    handler: Handler
    needs_key: bool = True
    takes_key: bool = False
    has_body: bool = True
    error_reply: ErrorReply = error_reply


def make_app(services: Services, routes: Iterable[Route], lifespans: Sequence[Lifespan] = ()) -> ASGIApp:
    """Return the ASGI application that serves these routes.

    Args:
      services: passed to every handler.
      routes: the routes; several may share one path.
      lifespans: entered in order before the first request, exited in reverse order after the last.
    """
    by_path: dict[str, dict[str, Route]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route
    router = Router(
        [
            StarletteRoute(path, _Path(services, path, rows), methods=list(rows))
            for path, rows in by_path.items()
        ],
        redirect_slashes=False,
        lifespan=_all_of(lifespans),
    )
    settings = services.settings
    app: ASGIApp = HostCheck(OriginCheck(router, settings), settings)
    if services.tracing is not None:
        from pensieve_jax.server.tracing import TraceContext  # needs an optional dependency

        app = TraceContext(app)
    forms = {path: next(iter(rows.values())).error_reply for path, rows in by_path.items()}
    app = ErrorReplies(app, services.metrics.refused, forms)
    if settings.cors_origin:
        app = Cors(app, settings.cors_origin)  # outside ErrorReplies, so that pages can read errors too
    app = RequestLog(app)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = application  # makes the router raise for unknown paths, so that we write the error
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        await app(scope, receive, send)

    return application


class _Path:
    """ASGI endpoint for the routes of one path."""

    def __init__(self, services: Services, path: str, routes: Mapping[str, Route]) -> None:
        self._services = services
        self._path = path
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        route = self._routes["GET" if method == "HEAD" else method]
        notes: RequestNotes = scope[NOTES]
        notes.route = self._path
        headers = Headers(scope=scope)
        key_owner = self._key_owner(route, headers)
        notes.owner = owner = key_owner or ""
        if method == "POST" and not route.takes_key and "idempotency-key" in headers:
            notes.ignored_fields += ("Idempotency-Key",)
        keys, ledger = self._services.keys, self._services.ledger
        with ledger.ticket(owner) as ticket, keys.revocation(headers, key_owner) as revoked:
            body = await self._body(route, headers, receive, ticket) if method == "POST" else b""
            call = HttpRequest(
                services=self._services,
                ticket=ticket,
                path=scope["path_params"],
                query=QueryParams(scope["query_string"]),
                headers=headers,
                body=body,
                notes=notes,
                receive=until_revoked(receive, revoked),
            )
            try:
                reply = await route.handler(call)
                reply.charge(ticket)
                await reply.send(call.receive, send, self._services.settings.stall_timeout_s)
            except (ClientGoneError, ApiError):
                if revoked is not None and revoked.done():
                    raise _unknown_key() from None  # a client whose response has not begun gets this
                raise

    def _key_owner(self, route: Route, headers: Headers) -> str | None:
        """Return the owner of a request's key, None without a valid key; raise ApiError if it needs one."""
        owner = self._services.keys.owner(headers.get("authorization"), headers.get("x-api-key"))
        if owner is None and route.needs_key:
            raise _unknown_key()
        return owner

    async def _body(self, route: Route, headers: Headers, receive: Receive, ticket: Ticket) -> bytes:
        settings = self._services.settings
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = content_type == "application/json"
        body = b""
        if is_json or not route.has_body:
            body = await read_body(
                receive,
                headers,
                settings.max_body_bytes,
                settings.body_timeout_s,
                take=partial(ticket.charge, "body_bytes"),
            )
        if not is_json and (body or route.has_body):  # a form on any web page can send other types
            raise ApiError(415, "unsupported_media_type", "The body must be sent as application/json.")
        return body


def _unknown_key() -> ApiError:
    sentence = (
        "The API key is missing or unknown; send a valid one as Authorization: Bearer KEY or x-api-key: KEY."
    )
    return ApiError(401, "invalid_api_key", sentence, headers={"www-authenticate": "Bearer"})


def _all_of(lifespans: Sequence[Lifespan]) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        if not lifespans:
            yield
            return
        async with lifespans[0](), _all_of(lifespans[1:])(app):
            yield

    return lifespan
