"""Pagination of lists.

Owns: the query parameters of a page, and the list object that contains it.
Does not know: what the list contains. Called by handlers that return lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams

from pensieve_jax.history.reader import Order, Page
from pensieve_jax.history.server_tables.changes import ItemRow
from pensieve_jax.server.http.errors import invalid_value
from pensieve_jax.server.http.replies import BytesResponse, HttpResponse, encode_json
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.workers import SOME_WORK

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 100
_READING: Final = SOME_WORK._replace(asks_history=True)  # an item may have megabytes


@dataclass(frozen=True, slots=True)
class PageQuery:
    """A requested page of a list: at most `limit` entries after the one with the id `after`."""

    after: str | None
    limit: int
    order: Order


def page_query(query: QueryParams) -> PageQuery:
    """Read the page from a request's query; raise ApiError 400."""
    limit = limit_of(query, DEFAULT_LIMIT, MAX_LIMIT)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_value("order", f"order is {order[:20]!r}, but must be asc or desc.")
    return PageQuery(query.get("after"), limit, "asc" if order == "asc" else "desc")


def limit_of(query: QueryParams, default: int, max_limit: int) -> int:
    """Read the `limit` of a request's query; raise ApiError 400 unless it is from 1 to `max_limit`."""
    given = query.get("limit", str(default))
    is_number = given.isascii() and given.isdecimal() and len(given) < 10
    if not is_number or not 1 <= int(given) <= max_limit:
        raise invalid_value("limit", f"limit is {given[:20]!r}, but must be from 1 to {max_limit}.")
    return int(given)


async def page_of_items(call: HttpRequest, read: Callable[..., Page[ItemRow]], name: str) -> HttpResponse:
    """Return the requested page of the items that `read` finds under `name` in the history."""
    query = page_query(call.query)
    body = await call.services.run_cpu(call.owner, _READING, _page_of_items, read, call.owner, name, query)
    return BytesResponse(body, "application/json")


def _page_of_items(read: Callable[..., Page[ItemRow]], owner: str, name: str, query: PageQuery) -> bytes:
    page = read(owner, name, after=query.after, limit=query.limit, order=query.order)
    listed = _list_object([row.item_id for row in page.rows], has_more=page.has_more)
    return encode_json({**listed, "data": [msgspec.Raw(row.item.encode()) for row in page.rows]})


def page_object(
    data: Sequence[dict[str, Any]] | Iterable[dict[str, Any]], *, has_more: bool
) -> dict[str, Any]:
    """Return the list object; an empty list has "" as ids, because OpenAI's schema allows no null."""
    listed = list(data)
    return {**_list_object([one["id"] for one in listed], has_more=has_more), "data": listed}


def _list_object(ids: Sequence[str], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [],
        "first_id": ids[0] if ids else "",
        "last_id": ids[-1] if ids else "",
        "has_more": has_more,
    }
