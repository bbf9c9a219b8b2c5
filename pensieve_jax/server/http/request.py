"""Requests, as handlers see them.

Owns: the values of a request, reading its body, and noticing that its client has left.
Does not know: routes, what a body means, or how a response is written.
Called by the application, which makes requests, and by handlers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive

from pensieve_jax.server.http.bodies import decode_body
from pensieve_jax.server.http.body_values import num_charged_values
from pensieve_jax.server.http.errors import ApiError
from pensieve_jax.server.http.ledger import Ticket
from pensieve_jax.server.workers import SOME_WORK, WorkEstimate

if TYPE_CHECKING:
    from pensieve_jax.server.http.services import Services


class ClientGoneError(Exception):
    """The client has left or stalled, so that no response can be sent."""


@dataclass(slots=True)
class RequestNotes:
    """Metadata of a request for the log and the response headers.

    Attributes:
      request_id: the client's id, or a generated one.
      route: the path pattern of its route.
      owner: the owner of its key; None until the key is checked.
      ignored_fields: paths of body fields that this API does not know.
      counts: numbers and short names from fixed lists, such as token counts or a finish reason.
    """

    request_id: str
    route: str | None = None
    owner: str | None = None
    ignored_fields: tuple[str, ...] = ()
    counts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class HttpRequest:
    """One request.

    Attributes:
        services: the server's services.
        ticket: what it holds; it is closed when the answer has been sent.
        path: its path parameters.
        query, headers: its query parameters and headers.
        body: the whole body; b"" for methods without one.
        notes: its metadata for the log.
        receive: the ASGI channel that reports when the client leaves.
    """

    services: Services
    ticket: Ticket
    path: Mapping[str, str]
    query: QueryParams
    headers: Headers
    body: bytes
    notes: RequestNotes
    receive: Receive

    @property
    def owner(self) -> str:
        """The owner of its key; "" if the server has no keys."""
        return self.ticket.owner

    @property
    def is_operator(self) -> bool:
        """Whether it may read numbers about all owners."""
        return self.services.keys.is_operator(self.headers)

    async def decode[T](self, kind: type[T]) -> T:
        """Decode the body to `kind` and note its unknown fields; see `bodies`."""
        offers, texts = self.services.settings.tools, self.services.texts
        if texts is not None and len(self.body) >= texts.min_characters:
            self.ticket.charge("json_values", await self.run_cpu(num_charged_values, self.body))
            value, ignored = await self.run_cpu(texts.decode_body, self.body, kind, offers)
        else:
            value, ignored = await self.run_cpu(lambda: decode_body(self.body, kind, offers=offers))
        self.notes.ignored_fields += ignored
        return value

    def charge_stream(self, is_streamed: bool | None) -> None:
        """Charge an answer that is streamed, before its work begins; raise ApiError 429."""
        if is_streamed:
            self.ticket.charge("streams", 1)

    async def run_cpu[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, whose time grows with the body: in a thread if the body is long."""
        estimate = WorkEstimate.of(len(self.body))
        return await self.services.run_cpu(self.owner, estimate, work, *args, **kwargs)

    async def run_long[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, which may take long whatever the body, in a thread."""
        return await self.services.run_cpu(self.owner, SOME_WORK, work, *args, **kwargs)

    async def read[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, which reads the history; see `Services.read`."""
        return await self.services.read(self.owner, work, *args, **kwargs)

    async def unless_gone[T](self, work: Awaitable[T]) -> T:
        """Return the result of `work`; if the client leaves first, cancel it and raise ClientGoneError."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(until_disconnect(self.receive))
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGoneError
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            del task, watch, work  # a failure's traceback has this frame: no cycle may keep what it holds


def until_revoked(receive: Receive, revoked: asyncio.Future[None] | None) -> Receive:
    """Return a channel that reports the client as gone once its key is revoked.

    The body must have been read.
    """
    if revoked is None:
        return receive

    async def guarded() -> Message:
        message: asyncio.Future[Any] = asyncio.ensure_future(receive())
        try:
            await asyncio.wait([message, revoked], return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if revoked.done() else message.result()
        finally:
            message.cancel()

    return guarded


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client leaves; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(
    receive: Receive, headers: Headers, max_bytes: int, timeout_s: float, *, take: Callable[[int], None]
) -> bytes:
    """Read a request's body; `take` is called with the length of each part, and may raise.

    Raises ApiError 413 for a body longer than `max_bytes`, 408 if it takes longer than `timeout_s`, and
    ClientGoneError.
    """
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    parts, num_bytes = [], 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                take(len(part))
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        sentence = f"The body did not arrive within {timeout_s:g} s; send it again."
        raise ApiError(408, "request_timeout", sentence, headers={"connection": "close"}) from None


def _too_large(max_bytes: int) -> ApiError:
    sentence = f"The body is too long; it must be at most {max_bytes} bytes."
    return ApiError(413, "body_too_large", sentence, headers={"connection": "close"})
