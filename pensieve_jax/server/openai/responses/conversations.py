"""The routes of /v1/conversations. A conversation is a list of items; responses append their items to it.

Owns: the handlers of these routes, and the rule that a repeated request appends its items only once.
Does not know: how items are stored, or turns. The parent turn of a conversation follows from its items, so
deleting an item changes nothing else. Called by `server.app`.

Every append request gets a random name, and the ids of its items are derived from that name. A repeated
request finds the name and is answered with the same ids. For a request with an idempotency key, the history
stores the name and a digest of the body, so items that were deleted since are not appended again. Without a
key, the server remembers the name until the client has the response. Then only a request that is marked as a
retry (`x-stainless-retry-count`) reuses the name, because a client may send the same items twice on purpose.
A request for a new conversation needs an idempotency key to be recognized.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from pensieve_jax.core.errors import ConversationChangedError, InvalidRequestError, UnknownRecordError
from pensieve_jax.history.server_tables.changes import (
    AppendItems,
    ConversationRow,
    CreateConversation,
    DeleteConversation,
    DeleteItem,
    HistoryChange,
    Idempotency,
    UpdateConversation,
)
from pensieve_jax.history.server_tables.idempotency_table import NEW_CONVERSATION
from pensieve_jax.server.async_engine import UNANSWERED
from pensieve_jax.server.http.app import Route
from pensieve_jax.server.http.bodies import Body
from pensieve_jax.server.http.errors import ApiError, invalid_value, is_taken_key, unsupported
from pensieve_jax.server.http.pagination import page_object, page_of_items
from pensieve_jax.server.http.replies import BytesResponse, HttpResponse, encode_json, json_reply
from pensieve_jax.server.http.request import HttpRequest
from pensieve_jax.server.http.services import Services
from pensieve_jax.server.openai.responses.context import COMPACT, too_long
from pensieve_jax.server.openai.responses.retries import TtlCache, is_retry
from pensieve_jax.server.openai.responses.schemas import (
    MAX_ITEMS_OF_A_POST,
    ItemReference,
    parse_input,
)
from pensieve_jax.server.turns.checks import check_metadata
from pensieve_jax.server.turns.idempotency import check_same_body, idempotency_key, key_record
from pensieve_jax.server.turns.items import Item, named_id, with_named_ids, with_new_ids
from pensieve_jax.server.workers import SOME_WORK

_MAX_TRIES = 3  # attempts of a change, if concurrent changes of the conversation come first
# The history counts the characters of all items of a conversation.
_MEASURING: Final = SOME_WORK._replace(asks_history=True)
LIFETIME_S: Final = 600.0
MAX_UNANSWERED: Final = 10_000


class NewConversation(Body, kw_only=True):
    """Body of `POST /v1/conversations`."""

    items: list[Any] | None = None
    metadata: dict[str, str] | None = None


class Metadata(Body, kw_only=True):
    """Body of `POST /v1/conversations/{conversation_id}`."""

    metadata: dict[str, str] | None


class NewItems(Body, kw_only=True):
    """Body of `POST /v1/conversations/{conversation_id}/items`."""

    items: list[Any]


class Conversations:
    """The conversation handlers of one server."""

    def __init__(self, services: Services, locks: set[tuple[str, str]]) -> None:
        """`locks` contains the conversations with a running turn, by owner and id."""
        self._locks = locks
        self._appends = Appends()
        services.tables["appends_unanswered"] = lambda: len(self._appends)

    @property
    def routes(self) -> list[Route]:
        path = "/v1/conversations/{conversation_id}"
        return [
            Route("POST", "/v1/conversations", self.create, takes_key=True, has_body=False),
            Route("GET", path, self.retrieve),
            Route("POST", path, self.update),
            Route("DELETE", path, self.delete),
            Route("GET", f"{path}/items", self.items),
            Route("POST", f"{path}/items", self.append, takes_key=True),
            Route("GET", f"{path}/items/{{item_id}}", self.item),
            Route("DELETE", f"{path}/items/{{item_id}}", self.delete_item),
        ]

    async def create(self, call: HttpRequest) -> HttpResponse:
        """Create a conversation with its first items, or answer with the one of the same idempotency key."""
        body = await call.decode(NewConversation) if call.body else NewConversation()
        check_metadata(body.metadata)
        key, body_sha256 = idempotency_key(call.headers), hashlib.sha256(call.body).hexdigest()
        known = await _created_before(call, key, body_sha256)
        if known is not None:
            return json_reply(_conversation_object(known))
        call.ticket.charge("written_rows", 1 + len(body.items or ()))
        items = await call.run_cpu(
            lambda: json.dumps(with_new_ids(_new_items(call, body.items or [])), separators=COMPACT)
        )
        _check_size(len(body.items or []), len(items))
        row = ConversationRow(
            conversation_id=f"conv_{secrets.token_hex(16)}",
            owner=call.owner,
            version=0,
            metadata=json.dumps(body.metadata or {}),
            created_at_s=call.services.now_s(),
        )
        change = CreateConversation(
            owner=call.owner,
            conversation_id=row.conversation_id,
            metadata=row.metadata,
            created_at_s=row.created_at_s,
            items=items,
            idempotency=key_record(key, body_sha256, row.created_at_s),
            quota=call.services.settings.storage_quota,
        )
        try:
            await call.services.engine.apply(change)
        except UNANSWERED:
            if key is None or await _created_before(call, key, body_sha256) is None:
                raise
        except InvalidRequestError as error:
            # A request with the same key came between the look-up and the change.
            known = await _created_before(call, key, body_sha256) if is_taken_key(error) else None
            if known is None:
                raise
            row = known
        return json_reply(_conversation_object(row))

    async def retrieve(self, call: HttpRequest) -> HttpResponse:
        """Answer with a conversation, without its items."""
        return json_reply(_conversation_object(await _row(call)))

    async def update(self, call: HttpRequest) -> HttpResponse:
        """Replace the metadata of a conversation."""
        body = await call.decode(Metadata)
        check_metadata(body.metadata)
        change = UpdateConversation(
            owner=call.owner,
            conversation_id=call.path["conversation_id"],
            metadata=json.dumps(body.metadata or {}),
            updated_at_s=call.services.now_s(),
            quota=call.services.settings.storage_quota,
        )
        await call.services.engine.apply(change)
        return json_reply(_conversation_object(await _row(call)))

    async def delete(self, call: HttpRequest) -> HttpResponse:
        """Delete a conversation and its items; its responses stay.

        A long conversation is deleted in portions, so that engine steps run in between. The conversation is
        locked until the last portion. If one fails, the client gets the error and can repeat the request.
        """
        conversation_id = self._unlocked(call)
        change = DeleteConversation(owner=call.owner, conversation_id=conversation_id)
        lock = (call.owner, conversation_id)
        self._locks.add(lock)
        try:
            await call.services.engine.apply(change)
            with suppress(UnknownRecordError):
                while await _row(call):
                    await call.services.engine.apply(change)
        finally:
            self._locks.discard(lock)
        return json_reply({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def items(self, call: HttpRequest) -> HttpResponse:
        """Answer with a page of the items."""
        return await page_of_items(call, call.services.history.items, call.path["conversation_id"])

    async def append(self, call: HttpRequest) -> HttpResponse:
        """Append items, and answer with them."""
        body = await call.decode(NewItems)
        if not body.items:
            raise invalid_value("items", "items is empty, but must have at least one item.")
        call.ticket.charge("written_rows", len(body.items))
        new_items = await call.run_cpu(_new_items, call, body.items)
        key, now_s = idempotency_key(call.headers), call.services.now_s()
        append = self._appends.begin(
            call.owner,
            call.path["conversation_id"],
            key,
            hashlib.sha256(call.body).hexdigest(),
            is_retry=is_retry(call.headers),
            now_s=now_s,
        )
        items_json = await call.run_cpu(
            lambda: json.dumps(with_named_ids(new_items, append.name), separators=COMPACT)
        )

        async def change(row: ConversationRow) -> HistoryChange:
            history = call.services.history
            size = await call.services.run_cpu(
                row.owner, _MEASURING, history.size_of_items, row.owner, row.conversation_id
            )
            _check_size(size[0] + len(new_items), size[1] + len(items_json))
            return AppendItems(
                owner=row.owner,
                conversation_id=row.conversation_id,
                expected_version=row.version,
                items=items_json,
                idempotency=append.idempotency,
                name=append.name,
                appended_at_s=now_s,
                quota=call.services.settings.storage_quota,
            )

        async def stored_name() -> str | None:
            return await call.read(_stored_name, call, append, len(new_items))

        try:
            known = await self._change(call, change, stored_name if append.is_repeated else None)
        except UNANSWERED:  # the engine did not confirm the change, but may have applied it
            known = await stored_name()
            if known is None:
                raise
        self._appends.forget(append)
        page = await call.run_cpu(_page, new_items, known or append.name)

        def on_undelivered() -> None:
            self._appends.remember(append, call.services.now_s())

        return BytesResponse(page, "application/json", undelivered=on_undelivered)

    async def item(self, call: HttpRequest) -> HttpResponse:
        """Answer with one item as it is stored."""
        history, conversation_id = call.services.history, call.path["conversation_id"]
        row = await call.read(history.item, call.owner, conversation_id, call.path["item_id"])
        return BytesResponse(row.item.encode(), "application/json")

    async def delete_item(self, call: HttpRequest) -> HttpResponse:
        """Delete an item, and answer with the conversation."""
        conversation_id = self._unlocked(call)
        change = DeleteItem(owner=call.owner, conversation_id=conversation_id, item_id=call.path["item_id"])
        await call.services.engine.apply(change)
        return json_reply(_conversation_object(await _row(call)))

    # Private methods

    def _unlocked(self, call: HttpRequest) -> str:
        """Return the conversation's id; raise ApiError 409 if a turn of the conversation is running."""
        conversation_id = call.path["conversation_id"]
        check_unlocked(self._locks, call.owner, conversation_id)
        return conversation_id

    async def _change(
        self,
        call: HttpRequest,
        change_of: Callable[[ConversationRow], Awaitable[HistoryChange]],
        stored_name: Callable[[], Awaitable[str | None]] | None = None,
    ) -> str | None:
        """Apply a change unless it is already stored; try again if a concurrent change came first.

        Returns the name under which it was stored before, or None if it was applied now.
        """
        for tries_left in reversed(range(_MAX_TRIES)):
            # The row is read before `stored_name`, so that a change between the two reads is a conflict.
            row = await _row(call)
            if stored_name is not None and (known := await stored_name()) is not None:
                return known
            change = await change_of(row)
            self._unlocked(call)
            try:
                await call.services.engine.apply(change)
                return None
            except ConversationChangedError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")


def check_unlocked(locks: set[tuple[str, str]], owner: str, conversation_id: str) -> None:
    """Raise ApiError 409 if a turn of the conversation is running."""
    if (owner, conversation_id) in locks:
        sentence = f"A turn of conversation {conversation_id!r} is running; try again when it has ended."
        headers = {"retry-after": "1"}
        raise ApiError(409, "conversation_locked", sentence, param="conversation", headers=headers)


async def _row(call: HttpRequest) -> ConversationRow:
    row: ConversationRow = await call.read(
        call.services.history.conversation, call.owner, call.path["conversation_id"]
    )
    return row


async def _created_before(call: HttpRequest, key: str | None, body_sha256: str) -> ConversationRow | None:
    """Return the conversation that a request with this key created, or None if no request did.

    Raises ApiError 422 if the key was used with another body.
    """
    if key is None:
        return None
    return await call.read(
        _created_with, call.services.history, call.owner, key, body_sha256, call.services.now_s()
    )


def _created_with(
    history: Any, owner: str, key: str, body_sha256: str, now_s: float
) -> ConversationRow | None:
    known = history.idempotent(owner, key, now_s, conversation_id=NEW_CONVERSATION)
    if known is None:
        return None
    check_same_body(body_sha256, known.body_sha256)
    try:
        row: ConversationRow = history.conversation(owner, known.result_id)
    except UnknownRecordError:  # it was deleted between the two reads, and its key with it
        return None
    return row


def _stored_name(call: HttpRequest, append: Append, num_items: int) -> str | None:
    """Return the name under which the request's items are stored; None if they are not.

    Raises ApiError 422 if its key was used with another body.
    """
    history, conversation_id = call.services.history, call.path["conversation_id"]
    if append.idempotency is not None:
        now_s = call.services.now_s()
        known = history.idempotent(call.owner, append.idempotency.key, now_s, conversation_id=conversation_id)
        if known is None:
            return None
        check_same_body(append.idempotency.body_sha256, known.body_sha256)
        return str(known.result_id)
    for index in range(num_items):  # look for any of the items, since others may have been deleted
        with suppress(UnknownRecordError):
            history.item(call.owner, conversation_id, named_id(append.name, index))
            return append.name
    return None


def _conversation_object(row: ConversationRow) -> dict[str, Any]:
    return {
        "id": row.conversation_id,
        "object": "conversation",
        "created_at": int(row.created_at_s),
        "metadata": json.loads(row.metadata),
    }


def _check_size(num_items: int, num_characters: int) -> None:
    """Raise ApiError 400 if the items would make the conversation too long for a turn."""
    problem = too_long(num_items, num_characters)
    if problem is not None:
        raise invalid_value("items", f"With these items the conversation has {problem}")


def _page(new_items: Sequence[Item], name: str) -> bytes:
    return encode_json(page_object(with_named_ids(new_items, name), has_more=False))


def _new_items(call: HttpRequest, given: Sequence[Any]) -> list[Item]:
    if len(given) > MAX_ITEMS_OF_A_POST:
        sentence = f"items has {len(given)} items, but must have at most {MAX_ITEMS_OF_A_POST}."
        raise invalid_value("items", sentence)
    items, ignored = parse_input(given, "items")
    call.notes.ignored_fields += ignored
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            raise unsupported(f"items[{index}].type", "a conversation contains only messages")
    return [item for item in items if not isinstance(item, ItemReference)]


class Append(NamedTuple):
    """One request to append items.

    Attributes:
      name: random name from which the ids of its items are derived.
      is_repeated: whether its items may already be stored.
      idempotency: its idempotency key, which is stored with the items; None without a key.
      request: owner, conversation and body digest, by which a retry is recognized; None with a key.
    """

    name: str
    is_repeated: bool
    idempotency: Idempotency | None
    request: tuple[str, str, str] | None


class Appends:
    """The append requests whose clients may retry them. Used by the event loop's thread only."""

    def __init__(self) -> None:
        self._unanswered = TtlCache[tuple[str, str, str], str](LIFETIME_S, MAX_UNANSWERED)

    def __len__(self) -> int:
        """Return the number of requests that `remember` holds."""
        return len(self._unanswered)

    def begin(
        self,
        owner: str,
        conversation_id: str,
        key: str | None,
        body_sha256: str,
        *,
        is_retry: bool,
        now_s: float,
    ) -> Append:
        """Start a request to append items; the caller calls `forget` once the change is applied."""
        idempotency = key_record(key, body_sha256, now_s)
        if idempotency is not None:
            return Append(secrets.token_hex(24), True, idempotency, None)
        request = (owner, conversation_id, body_sha256)
        known = self._unanswered.get(request, now_s) if is_retry else None
        append = Append(known or secrets.token_hex(24), known is not None, None, request)
        self.remember(append, now_s)
        return append

    def forget(self, append: Append) -> None:
        """Forget a request when its response is sent."""
        if append.request is not None:
            self._unanswered.drop(append.request, append.name)

    def remember(self, append: Append, now_s: float) -> None:
        """Remember a request whose client may not get the response and may retry."""
        if append.request is not None:
            self._unanswered.put(append.request, append.name, now_s)
