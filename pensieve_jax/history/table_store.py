"""A history store in the tables of any of the databases.

Owns: the statements of each method of `HistoryStore`, and which turns of a commit are refused individually.
Does not know: how a transaction begins and ends, locks, or what a database's own errors mean.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import ClassVar, NamedTuple, Self

from pensieve_jax.core.errors import ConversationChangedError, InvalidRequestError, PensieveError
from pensieve_jax.history import codec, named_conversations, stored_amounts, turns_table
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.server_tables import clock_guard, quotas, responses_table, server_conversations
from pensieve_jax.history.server_tables.changes import (
    AppendItems,
    CreateConversation,
    DeleteConversation,
    DeleteItem,
    DeleteResponse,
    EndResponse,
    Expire,
    HistoryChange,
    QueueResponse,
    ResponseDraft,
    StartResponse,
    TakeBackStart,
    UpdateConversation,
)
from pensieve_jax.history.store import (
    LOCK_WAIT_S,
    ConversationInfo,
    ConversationRecord,
    Cut,
    TurnKey,
    TurnRecord,
)

_LIMITED = (QueueResponse, CreateConversation, UpdateConversation, AppendItems)
_NOTES = "note:"  # prefix of the names of notes among the keys of `meta`


class Commit(NamedTuple):
    """A turn to add, checked and packed.

    Attributes:
      field: the turn's name in errors, such as "turns[0]".
      items: the items that it adds to the conversation of `draft`, those of its reply included.
      logprobs: packed log-probabilities of its reply, which are stored with `draft`.
      refusal: why its attachment cannot be stored.
    """

    field: str
    conversation_id: str
    row: codec.TurnRow
    keep: int | None
    draft: ResponseDraft | None
    items: Sequence[server_conversations.Item]
    refusal: InvalidRequestError | None
    logprobs: bytes | None = None


class TableHistoryStore(ABC):
    """A `HistoryStore` without its transactions. See the protocol for the contract of each method."""

    is_shared: ClassVar[bool] = False
    lock_wait_s: float = LOCK_WAIT_S
    is_damaged: bool = False

    def conversations(self) -> list[ConversationInfo]:
        """Return all named conversations, the most recently active first, equal times by id."""
        return self._run(named_conversations.listing)

    def idle(self, before_s: float | None, num_kept: int | None, busy: Collection[str] = ()) -> list[str]:
        """Return named conversations that are idle for too long or too many; see `HistoryStore.idle`."""
        return self._run(lambda connection: named_conversations.idle(connection, before_s, num_kept, busy))

    def info(self, conversation_id: str) -> ConversationInfo:
        """Return a conversation's line of the listing without reading its tokens."""
        return self._run(lambda connection: named_conversations.info(connection, conversation_id))

    def head(self, conversation_id: str) -> str | None:
        """Return the turn at the end of a conversation."""
        return self._run(lambda connection: named_conversations.head(connection, conversation_id))

    def load(self, conversation_id: str) -> ConversationRecord:
        """Read a whole conversation; also raise HistoryCorruptError if its tokens are damaged."""
        return named_conversations.unpack(
            *self._run(lambda connection: named_conversations.read(connection, conversation_id))
        )

    def load_turn(self, owner: str, turn_id: str) -> ConversationRecord:
        """Read the path to a turn; also raise HistoryCorruptError if its tokens are damaged."""
        rows = self._run(lambda connection: turns_table.path_rows(connection, owner, turn_id))
        return turns_table.unpack_path(rows, owner, turn_id)

    def has_turn(self, owner: str, turn_id: str) -> bool:
        """Return whether a turn exists, without reading its tokens."""
        return self._run(lambda connection: turns_table.exists(connection, owner, turn_id))

    def commit(
        self,
        turns: Sequence[TurnRecord],
        attachments: Sequence[object] = (),
        in_use: Collection[str] = (),
    ) -> Mapping[int, PensieveError]:
        """Append finished turns in one transaction; see `HistoryStore.commit`."""
        attached = attachments or itertools.repeat(None)
        commits = [
            _prepare(turn, attachment, index)
            for index, (turn, attachment) in enumerate(zip(turns, attached, strict=bool(attachments)))
        ]
        return self._commit(commits, in_use) if commits else {}

    def apply(self, change: HistoryChange, in_use: Collection[str] = ()) -> Sequence[TurnKey]:
        """Change data stored beside turns, in one transaction; see `HistoryStore.apply`."""
        _check_texts(change)
        return self._transact(lambda connection: _apply(connection, change, in_use))

    def truncate(self, conversation_id: str, num_tokens: int) -> Cut:
        """Keep the first `num_tokens` tokens; see `HistoryStore.truncate` for a turn that is cut."""
        return self._transact(
            lambda connection: named_conversations.truncate(connection, conversation_id, num_tokens)
        )

    def truncate_turns(self, conversation_id: str, num_turns: int) -> Cut:
        """Keep the first `num_turns` turns; see `HistoryStore.truncate_turns`."""
        return self._transact(
            lambda connection: named_conversations.truncate_turns(connection, conversation_id, num_turns)
        )

    def fork(
        self,
        conversation_id: str,
        new_conversation_id: str,
        num_tokens: int | None = None,
        *,
        at_s: float | None = None,
    ) -> Cut:
        """Begin a new conversation with the first tokens of another one; see `HistoryStore.fork`."""
        self._check_name(new_conversation_id, "new_conversation_id")
        return self._transact(
            lambda connection: named_conversations.fork(
                connection, conversation_id, new_conversation_id, num_tokens, at_s
            )
        )

    def delete(self, conversation_id: str) -> None:
        """Forget a conversation; later ones reuse its space."""
        self._transact(lambda connection: named_conversations.delete(connection, conversation_id))

    def note(self, name: str) -> str | None:
        """Return a text that is stored beside the turns."""
        query = "SELECT value FROM meta WHERE key = ?"
        row = self._run(lambda connection: connection.execute(query, (_NOTES + name,)).fetchone())
        return None if row is None else str(row[0])

    def keep_note(self, name: str, text: str | None) -> None:
        """Store a text in place of the one of that name; None removes it."""
        self._transact(lambda connection: _keep_note(connection, _NOTES + name, text))

    def read[T](self, work: Callable[[Connection], T]) -> T:
        """Run `work` on one consistent snapshot and return its result."""
        return self._run(work)

    def change[T](self, change: Callable[[Connection], T]) -> T:
        """Run `change` and return its result. All changes are stored, or none if it raises."""
        return self._transact(change)

    @abstractmethod
    def close(self) -> None:
        """Release all resources; a second call does nothing, any other raises HistoryError."""

    def __enter__(self) -> Self:
        """Return the store, which is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_name(self, name: str, field: str) -> None:
        """Raise InvalidRequestError for a name that no conversation in this kind of history can have."""
        codec.check_text(name, field)

    @abstractmethod
    def _run[T](self, work: Callable[[Connection], T]) -> T:
        """Run `work` on one consistent state; turn errors of the database into errors of the history."""

    @abstractmethod
    def _transact[T](self, change: Callable[[Connection], T]) -> T:
        """Make all of a change or nothing, isolated from other changes."""

    @abstractmethod
    def _commit(self, commits: Sequence[Commit], in_use: Collection[str]) -> Mapping[int, PensieveError]:
        """Add turns in one transaction; return why some were refused."""


def append_all(connection: Connection, commits: Sequence[Commit]) -> dict[int, PensieveError]:
    """Add turns within a transaction; return why some were refused. Nothing of these is stored."""
    refused: dict[int, PensieveError] = {}
    for index, commit in enumerate(commits):
        if commit.refusal is not None:
            refused[index] = commit.refusal
            continue
        connection.execute("SAVEPOINT placed")
        try:
            append(connection, commit)
        except PensieveError as error:
            if commit.conversation_id and not isinstance(error, ConversationChangedError):
                raise
            connection.execute("ROLLBACK TO SAVEPOINT placed")
            refused[index] = error
        connection.execute("RELEASE SAVEPOINT placed")
    return refused


def append(connection: Connection, commit: Commit) -> None:
    """Add one turn with its attachment; raise the reason if it is refused."""
    if commit.conversation_id:
        named_conversations.append(connection, commit.conversation_id, commit.row, commit.keep, commit.field)
        return
    turns_table.insert_placed(connection, commit.row, commit.keep, commit.field)
    if commit.draft is not None:
        responses_table.complete(connection, commit.draft, commit.items, commit.row, commit.logprobs)


def moves_heads(commits: Sequence[Commit]) -> bool:
    """Return whether a commit may release heads of a server's conversations, for `collect_released`."""
    return any(commit.draft is not None and commit.draft.conversation is not None for commit in commits)


def _prepare(turn: TurnRecord, attachment: object, index: int) -> Commit:
    name = f"turns[{index}]"
    row = codec.pack_turn(turn, name)
    if attachment is None:
        # Nothing else will need it, so it is kept for itself.
        placed = row if turn.conversation_id else row._replace(kept=1)
        return Commit(name, turn.conversation_id, placed, turn.keep, None, (), None)
    field = f"attachments[{index}]"
    try:
        if turn.conversation_id:
            raise InvalidRequestError(field, attachment, "None for a turn of a named conversation")
        draft, items = responses_table.check_draft(attachment, turn.owner, field)
    except InvalidRequestError as error:
        return Commit(name, "", row, turn.keep, None, (), error)
    if draft.conversation is not None:
        items = [*items, *server_conversations.packed_reply(draft.output_item_id, row)]
    logprobs = None if turn.logprobs is None else codec.pack_logprobs(turn.logprobs)
    return Commit(name, "", row, turn.keep, draft, items, None, logprobs)


def _check_texts(change: HistoryChange) -> None:
    if not isinstance(change, HistoryChange.__value__):
        raise InvalidRequestError("change", change, "one of those in history.changes")
    for field in dataclasses.fields(change):
        value = getattr(change, field.name)
        if field.type == "str" or isinstance(value, str):
            codec.check_text(value, field.name)


def _apply(connection: Connection, change: HistoryChange, in_use: Collection[str]) -> list[TurnKey]:
    """Make a change within its quota, if it has one; return the turns that were removed."""
    if not isinstance(change, _LIMITED) or change.quota is None:
        return _apply_anyhow(connection, change, in_use)
    before = stored_amounts.find(connection, change.owner)
    removed = _apply_anyhow(connection, change, in_use)
    quotas.check_growth(before, stored_amounts.find(connection, change.owner), change.quota)
    return removed


def _apply_anyhow(connection: Connection, change: HistoryChange, in_use: Collection[str]) -> list[TurnKey]:
    removed: list[TurnKey] = []
    match change:
        case QueueResponse():
            responses_table.queue(connection, change)
        case StartResponse():
            responses_table.start(connection, change)
        case TakeBackStart():
            responses_table.take_back_start(connection, change)
        case EndResponse():
            removed = responses_table.end(connection, change, in_use)
        case DeleteResponse():
            removed = responses_table.delete(connection, change, in_use)
        case Expire():
            clock_guard.check(connection, change)
            removed = responses_table.expire(connection, change, in_use)
            removed += server_conversations.expire(connection, change, in_use)
        case CreateConversation():
            server_conversations.create(connection, change)
        case UpdateConversation():
            server_conversations.update(connection, change)
        case DeleteConversation():
            removed = server_conversations.delete(connection, change, in_use)
        case AppendItems():
            server_conversations.append_items(connection, change)
        case DeleteItem():
            removed = server_conversations.delete_item(connection, change, in_use)
    return removed + turns_table.collect_released(connection, in_use)


def _keep_note(connection: Connection, key: str, text: str | None) -> None:
    connection.execute("DELETE FROM meta WHERE key = ?", (key,))
    if text is not None:
        connection.execute("INSERT INTO meta VALUES (?, ?)", (key, text))
