"""The data that a server stores in the history beside turns, as values passed between its two processes.

Owns: what is committed together with a turn (`ResponseDraft`), what a server changes between turns
(`HistoryChange`), and the rows that it reads back.
Does not know: SQL, HTTP, or JSON schemas: JSON is stored and returned as it is.

Times are in seconds since the epoch. An id is only found together with its owner.
"""

from __future__ import annotations

from dataclasses import dataclass

from pensieve_jax.core.template_input import NO_INPUT, TemplateInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationAppend:
    """A turn's items, to be appended to a conversation in the turn's own transaction.

    Attributes:
      conversation_id: a conversation of the same owner.
      expected_version: the version that the conversation must still have; otherwise ConversationChangedError
        is raised, and nothing of the turn is stored.
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
    """The data of a response that is stored when its turn is committed.

    Attributes:
      response_id: "resp_" and the turn's id.
      request: JSON object of the fields that the response echoes.
      input_items: JSON list of the request's own items, in order, ids included.
      output_item_id: id of the reply's item.
      background: whether it continues when its client disconnects; then its row exists before its turn does.
      body_sha256: digest of the request's body, by which a repeated request is recognized.
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
    """A stored response.

    Attributes:
      status: "queued", "completed", "incomplete", "cancelled" or "failed".
      turn_id: None before there is a turn.
      output_text, finish_reason, usage: data of its turn; usage is a JSON object of `Usage`'s fields.
      template_input: what its turn was rendered with, and how its text is read.
      error: JSON object of a failed response.
      job: for a queued background response, what is needed to run it again, as it was given.
      starts: number of runs without a known end; see `StartResponse`.
      logprobs: of each token of the reply, packed by `codec.pack_logprobs`; None if they were not requested.
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
    logprobs: bytes | None = None
    template_input: TemplateInput = NO_INPUT
    starts: int = 0


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
    """An item of a conversation: a JSON object; `position` orders items."""

    item_id: str
    position: int
    item: str


# Changes that a server makes between turns; each is one transaction. A change of something that does not
# exist, or is another owner's, raises UnknownRecordError. Creation of what exists already raises
# InvalidRequestError.


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageQuota:
    """The most that one owner may store; None does not limit.

    A change with a quota raises StorageQuotaError if it increases an amount beyond it; nothing is stored.
    """

    conversations: int | None = None
    responses: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueResponse:
    """Storage of a background response as queued, before its client learns that it exists.

    Attributes:
      parent_id: the turn that it continues, which stays as long as the response is queued.
    """

    draft: ResponseDraft
    job: bytes
    parent_id: str | None = None
    quota: StorageQuota | None = None

    @property
    def owner(self) -> str:
        return self.draft.owner


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResponse:
    """The number of a queued response's runs without a known end.

    It is stored before an engine gets the response. `TakeBackStart` follows if the run ends without a death
    of the engine. A response that has ended raises UnknownRecordError.

    Attributes:
      starts: the count from now on. As it is not a difference, storing it twice does no harm.
    """

    owner: str
    response_id: str
    starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBackStart:
    """One run less of a queued response; the run ended without a death. Others are not changed."""

    owner: str
    response_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndResponse:
    """The end of a queued response without a turn: "cancelled" or "failed"; others are not changed."""

    owner: str
    response_id: str
    status: str
    completed_at_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteResponse:
    """Deletion of a response; its turn's tokens are removed when nothing else needs them."""

    owner: str
    response_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateConversation:
    """A new conversation with its first items, a JSON list, ids included.

    Attributes:
      idempotency: key of the request; it is valid among the owner's requests for new conversations.
    """

    owner: str
    conversation_id: str
    metadata: str
    created_at_s: float
    items: str = "[]"
    idempotency: Idempotency | None = None
    quota: StorageQuota | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConversation:
    """Replacement of a conversation's metadata, which counts as activity at `updated_at_s`."""

    owner: str
    conversation_id: str
    metadata: str
    updated_at_s: float = 0.0
    quota: StorageQuota | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteConversation:
    """Deletion of a conversation and its items; responses stay.

    One change only deletes a limited part of the items. A longer conversation remains with the other items,
    so repeat the change while the conversation exists.
    """

    owner: str
    conversation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendItems:
    """Addition of items (a JSON list, ids included) to a conversation still at `expected_version`.

    Attributes:
      idempotency: key of the request; it is valid within this conversation.
      name: name from which the items' ids are derived, and which a repeated request gets from the history.
      appended_at_s: the current time, until which the conversation was active. A key that has expired by then
        may be used again.
    """

    owner: str
    conversation_id: str
    expected_version: int
    items: str
    idempotency: Idempotency | None = None
    name: str = ""
    appended_at_s: float = 0.0
    quota: StorageQuota | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteItem:
    """Removal of one item from a conversation."""

    owner: str
    conversation_id: str
    item_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """Deletion of expired responses and idempotency keys, and of idle conversations.

    One change deletes a few of them, so repeat it while `HistoryReader.has_expired`. Raises ClockAheadError
    if `now_s` is more than a day after the newest time in the history; see `clock_guard`.

    Attributes:
      confirmed_until_s: times up to this one are right, however far ahead they are; None confirms none.
      idle_s: time without activity after which a server's conversation is deleted; None deletes none.
      busy: owners and ids of conversations that stay, because a turn of them runs.
    """

    now_s: float
    idle_s: float | None = None
    busy: tuple[tuple[str, str], ...] = ()
    confirmed_until_s: float | None = None


type HistoryChange = (
    QueueResponse
    | StartResponse
    | TakeBackStart
    | EndResponse
    | DeleteResponse
    | CreateConversation
    | UpdateConversation
    | DeleteConversation
    | AppendItems
    | DeleteItem
    | Expire
)
