"""The HTTP endpoints of conversations made of responses: their list, their turns, and their names.

Owns: what a client is told of such a tree, and where its name is stored: in the metadata of a conversation.
Does not know: how trees are read, or which client draws them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

from pensieve_jax.core.errors import InvalidRequestError, UnknownRecordError
from pensieve_jax.history.server_tables.changes import (
    CreateConversation,
    DeleteConversation,
    UpdateConversation,
)
from pensieve_jax.history.server_tables.reply_items import reply_items
from pensieve_jax.history.trees import TITLE_PREFIX, TreeTurn
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import invalid_value, not_found
from pensieve_jax.server.http.pagination import limit_of
from pensieve_jax.server.http.replies import HttpResponse, json_reply
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.turns.sampling import token_sources

_NUM_TREES: Final = 100
_MAX_TREES: Final = 1000
_MAX_TURNS: Final = 1000
MAX_TITLE_CHARACTERS: Final = 200


class TitleBody(Body, kw_only=True):
    """Request body with the name of a tree; None takes it away."""

    title: str | None


async def trees(call: HttpRequest) -> HttpResponse:
    """GET /v1/pensieve/trees: list conversations made of responses, the most recently active first.

    `limit` defaults to 100 and is at most 1,000.
    """
    return await call.run_long(_list_trees, call, limit_of(call.query, _NUM_TREES, _MAX_TREES))


async def tree(call: HttpRequest) -> HttpResponse:
    """GET /v1/pensieve/trees/{root}: list the latest turns of one conversation in order of creation.

    Each distinct `instructions` text is listed once, in order of first use. A turn has its index in the list.
    """
    return await call.run_long(_get_tree, call)


async def rename(call: HttpRequest) -> HttpResponse:
    """POST /v1/pensieve/trees/{root}: give a conversation a name, or take it away."""
    title, root = (await call.decode(TitleBody)).title, call.path["root"]
    if title is not None and not 0 < len(title) <= MAX_TITLE_CHARACTERS:
        limit = f"null or text of 1 to {MAX_TITLE_CHARACTERS} characters"
        raise invalid_value("title", f"title has {len(title)} characters; it must be {limit}.")
    if title is not None:
        await call.run_long(_check_tree, call, root)
    await _store_title(call, TITLE_PREFIX + root, title)
    return json_reply({"root": root, "title": title})


async def _store_title(call: HttpRequest, conversation_id: str, title: str | None) -> None:
    engine, owner = call.services.engine, call.owner
    if title is None:
        with suppress(UnknownRecordError):
            await engine.apply(DeleteConversation(owner=owner, conversation_id=conversation_id))
        return
    call.ticket.charge("written_rows", 1)
    metadata, now_s = json.dumps({"title": title}), call.services.now_s()
    quota = call.services.settings.storage_quota
    update = UpdateConversation(
        owner=owner, conversation_id=conversation_id, metadata=metadata, updated_at_s=now_s, quota=quota
    )
    create = CreateConversation(
        owner=owner, conversation_id=conversation_id, metadata=metadata, created_at_s=now_s, quota=quota
    )
    try:
        await engine.apply(update)
    except UnknownRecordError:
        try:
            await engine.apply(create)
        except InvalidRequestError:  # another request has created it since
            await engine.apply(update)


def _check_tree(call: HttpRequest, root: str) -> None:
    if not call.services.history.tree(call.owner, root, 1):
        raise not_found("conversation", root)


def _list_trees(call: HttpRequest, limit: int) -> HttpResponse:
    newest = call.services.history.trees(call.owner, limit)
    rows = [
        {
            "root": tree.root,
            "title": tree.title,
            "num_turns": tree.num_turns,
            "first_text": tree.first_text,
            "last_active": tree.last_active_s,
        }
        for tree in newest
    ]
    return json_reply({"data": rows})


def _get_tree(call: HttpRequest) -> HttpResponse:
    root = call.path["root"]
    turns = call.services.history.tree(call.owner, root, _MAX_TURNS)
    if not turns:
        raise not_found("conversation", root)
    numbers: dict[str, int] = {}
    data = [
        {
            "id": turn.id,
            "parent": turn.parent,
            "instructions": None
            if not turn.instructions
            else numbers.setdefault(turn.instructions, len(numbers)),
            "input": turn.input,
            "results": turn.results,
            "output": _items(turn),
            "status": turn.status,
            "usage": None if turn.usage is None else token_sources([turn.usage]),
        }
        for turn in turns
    ]
    return json_reply({"instructions": list(numbers), "data": data})


def _items(turn: TreeTurn) -> list[dict[str, Any]]:
    return reply_items(turn.id.removeprefix("resp_"), turn.output, turn.template_input, turn.status)


ROUTES: Final = (
    Route("GET", "/v1/pensieve/trees", trees),
    Route("GET", "/v1/pensieve/trees/{root}", tree),
    Route("POST", "/v1/pensieve/trees/{root}", rename),
)
