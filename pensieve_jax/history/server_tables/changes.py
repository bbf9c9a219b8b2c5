"""What a server keeps in the history beside turns, as values that travel between its two processes.

Owns: what is committed together with a turn (`ResponseDraft`), what a server changes between turns
(`HistoryChange`), and the rows it reads back.
Does not know: SQL, HTTP, or JSON schemas: what is JSON here is kept as it comes and given back.

Times are in seconds since the epoch. An id is only found together with its owner.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationAppend:
    """A turn's items, to be appended to a conversation in the turn's own transaction.

    Attributes:
      conversation_id: of the same owner.
      expected_version: what the conversation's version must still be; else ConversationChangedError, and
        nothing of the turn is kept.
      items: JSON list of the request's new items, ids included; the reply's item follows them.
    """

    conversation_id: str
    expected_version: int
    items: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """A request that must not run twice: its key, and a digest of its body."""

    key: str
    body_sha256: str
    expires_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseDraft:
    """A response before its end: what is kept of it when its turn is committed.

    Attributes:
      response_id: "resp_" and the turn's id.
      request: JSON object of the fields that the response echoes.
      input_items: JSON list of the request's own items, in order, ids included.
      output_item_id: id of the reply's item.
      background: it runs on when its client leaves, and its row exists before its turn does.
      body_sha256: digest of the request's body, by which a repeated one is known.
    """

    response_id: str
    owner: str
    request: str
    input_items: str
    output_item_id: str
    created_at_s: float
    expires_at_s: float
    background: bool = False
    body_sha256: str = ""
    conversation: ConversationAppend | None = None
    idempotency: Idempotency | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """A response as it is kept.

    Attributes:
      status: "queued", "completed", "incomplete", "cancelled" or "failed".
      turn_id: None until there is one.
      output_text, finish_reason, usage: of its turn; usage is a JSON object of `Usage`'s fields.
      error: JSON object of a failed one.
      job: of a queued background response, what it takes to run it again, as it was given.
    """

    response_id: str
    owner: str
    request: str
    input_items: str
    output_item_id: str
    created_at_s: float
    expires_at_s: float
    background: bool
    status: str
    turn_id: str | None = None
    completed_at_s: float | None = None
    output_text: str | None = None
    finish_reason: str | None = None
    usage: str | None = None
    error: str | None = None
    job: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A server's conversation; `version` counts changes of its items, and `metadata` is a JSON object."""

    conversation_id: str
    owner: str
    version: int
    metadata: str
    created_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRow:
    """An item of a conversation: a JSON object; `position` orders them."""

    item_id: str
    position: int
    item: str


# What a server changes between turns; each is one transaction. Those that name what does not exist, or is
# another owner's, raise UnknownRecordError; those that make what exists already, InvalidRequestError.


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueResponse:
    """Keep a background response as queued, before anybody is told that there is one.

    Attributes:
      parent_id: the turn that it goes on from, which stays as long as the response is queued.
    """

    draft: ResponseDraft
    job: bytes
    parent_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndResponse:
    """A queued response ended without a turn: "cancelled" or "failed". One that has ended stays as it is."""

    owner: str
    response_id: str
    status: str
    completed_at_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResponse:
    """Forget a response; its turn's tokens go when nothing else needs them."""

    owner: str
    response_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateConversation:
    """A new conversation with its first items, a JSON list, ids included."""

    owner: str
    conversation_id: str
    metadata: str
    created_at_s: float
    items: str = "[]"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConversation:
    """Replace a conversation's metadata."""

    owner: str
    conversation_id: str
    metadata: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteConversation:
    """Forget a conversation and its items; responses stay.

    Of a long one a part of its items goes, and it remains until the change finds no more than that: so call
    it again while the conversation is there.
    """

    owner: str
    conversation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendItems:
    """Append items, a JSON list, ids included; with the version that the conversation must still have.

    Attributes:
      idempotency: of the request; its key counts in this conversation.
      name: what is told of it to whoever sends the request again.
      appended_at_s: now: a key whose time has passed is free.
    """

    owner: str
    conversation_id: str
    expected_version: int
    items: str
    idempotency: Idempotency | None = None
    name: str = ""
    appended_at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteItem:
    """Take one item out of a conversation."""

    owner: str
    conversation_id: str
    item_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """Forget responses and idempotency keys whose time has passed; a few at a time, so call it again."""

    now_s: float


type HistoryChange = (
    QueueResponse
    | EndResponse
    | DeleteResponse
    | CreateConversation
    | UpdateConversation
    | DeleteConversation
    | AppendItems
    | DeleteItem
    | Expire
)
