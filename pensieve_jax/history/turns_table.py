"""The tree of turns: adding a turn, reading the path to one, cutting one, and removing unneeded turns.

Owns: the statements on the table `turns`, and when a turn is garbage.
Does not know: transactions (the caller holds one), or why a turn is needed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pensieve_jax.core.errors import (
    HistoryCorruptError,
    InvalidRequestError,
    PensieveError,
    UnknownTurnError,
)
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.history import codec
from pensieve_jax.history.codec import TurnRow
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.store import CUT_FINISH_REASON, ConversationRecord, TurnKey, TurnRecord

_COLUMNS: Final = ", ".join(TurnRow._fields)
# With types, since Postgres cannot infer the type of a NULL value.
_VALUES: Final = {**dict.fromkeys(TurnRow._fields, "?"), "chain": "CAST(? AS BLOB)"}
_INSERT: Final = (
    f"INSERT INTO turns({_COLUMNS}) VALUES ({', '.join(_VALUES.values())}) ON CONFLICT DO NOTHING"
)
_INSERT_AFTER_PARENT: Final = (
    f"INSERT INTO turns({_COLUMNS}) "
    f"SELECT {', '.join({**_VALUES, 'num_tokens': 'before.num_tokens + ?'}.values())} FROM turns AS before "
    "WHERE before.owner = ? AND before.turn_id = ? AND before.turn_index + 1 = ? ON CONFLICT DO NOTHING"
)
# A turn that keeps a part of its parent's path: `num_tokens` is then given.
_INSERT_AFTER_PART: Final = (
    f"INSERT INTO turns({_COLUMNS}) SELECT {', '.join(_VALUES.values())} FROM turns AS before "
    "WHERE before.owner = ? AND before.turn_id = ? AND before.turn_index + 1 = ? AND before.num_tokens > ? "
    "ON CONFLICT DO NOTHING"
)

# From a turn up to its root. The numbers decrease on the way, so the query ends even in a damaged file.
PATH: Final = """WITH RECURSIVE path(owner, turn_id, parent_id, turn_index) AS (
  SELECT owner, turn_id, parent_id, turn_index FROM turns WHERE owner = ? AND turn_id = ?
  UNION ALL
  SELECT turns.owner, turns.turn_id, turns.parent_id, turns.turn_index
  FROM path JOIN turns ON turns.owner = path.owner AND turns.turn_id = path.parent_id
    AND turns.turn_index < path.turn_index
) """
_PATH_COLUMNS: Final = ", ".join(f"turns.{name}" for name in TurnRow._fields)
_PATH_ROWS: Final = f"{PATH}SELECT {_PATH_COLUMNS} FROM path JOIN turns USING (owner, turn_id)"
_UNNEEDED: Final = """SELECT parent_id FROM turns AS one WHERE owner = ? AND turn_id = ? AND kept = 0
  AND NOT EXISTS (SELECT 1 FROM turns WHERE owner = one.owner AND parent_id = one.turn_id)
  AND NOT EXISTS (SELECT 1 FROM conversations WHERE owner = one.owner AND head_turn = one.turn_id)
  AND NOT EXISTS (SELECT 1 FROM responses WHERE owner = one.owner AND turn_id = one.turn_id)"""


def insert(connection: Connection, row: TurnRow) -> None:
    """Add a turn as it is; raise InvalidRequestError for an id that is taken."""
    connection.execute_changing(_INSERT, row, lambda: _id_in_use(row))


def insert_placed(connection: Connection, row: TurnRow, keep: int | None, field: str) -> None:
    """Add a turn, whose row counts only its own tokens, after the parent that it names.

    It follows the first `keep` tokens of the parent's path, or all of them for None. Raises UnknownTurnError
    for a parent that does not exist. Raises InvalidRequestError for a `turn_index` that does not follow the
    parent's, a `keep` that is not below the length of its path, or an id that is taken.
    """
    if row.parent_id is None:
        if row.turn_index != 0:
            raise InvalidRequestError(f"{field}.turn_index", row.turn_index, "0, as its parent says")
        if keep is not None:
            raise InvalidRequestError(f"{field}.keep", keep, "None for a first turn")
        insert(connection, row)
        return
    parent = (row.owner, row.parent_id, row.turn_index)
    statement = _INSERT_AFTER_PARENT
    values: tuple[object, ...] = (*row, *parent)
    if keep is not None:
        placed = row._replace(num_tokens=keep + row.num_tokens)
        statement, values = _INSERT_AFTER_PART, (*placed, *parent, keep)
    connection.execute_changing(statement, values, lambda: _misplaced(connection, row, keep, field))


def _misplaced(connection: Connection, row: TurnRow, keep: int | None, field: str) -> PensieveError:
    """Return why a turn cannot be added after its parent."""
    query = "SELECT turn_index + 1, num_tokens FROM turns WHERE owner = ? AND turn_id = ?"
    parent = connection.execute(query, (row.owner, row.parent_id)).fetchone()
    if parent is None:
        return UnknownTurnError(str(row.parent_id))
    if row.turn_index != parent[0]:
        return InvalidRequestError(f"{field}.turn_index", row.turn_index, f"{parent[0]}, as its parent says")
    if keep is not None and keep >= parent[1]:
        limit = f"None, or fewer than the {parent[1]} tokens of its parent's path"
        return InvalidRequestError(f"{field}.keep", keep, limit)
    return _id_in_use(row)


def _id_in_use(row: TurnRow) -> PensieveError:
    return InvalidRequestError("turn_id", row.turn_id, "an id that no turn has yet")


def exists(connection: Connection, owner: str, turn_id: str) -> bool:
    """Return whether the turn exists."""
    query = "SELECT 1 FROM turns WHERE owner = ? AND turn_id = ?"
    return connection.execute(query, (owner, turn_id)).fetchone() is not None


def path_rows(connection: Connection, owner: str, turn_id: str | None) -> list[TurnRow]:
    """Return the turns from the first of a tree to this one; [] if the turn does not exist."""
    if turn_id is None:
        return []
    rows = connection.execute(_PATH_ROWS, (owner, turn_id))
    # Sort here, since a database would copy all texts to sort the rows.
    return sorted(map(TurnRow._make, rows), key=lambda row: row.turn_index)


def unpack_path(rows: list[TurnRow], owner: str, turn_id: str) -> ConversationRecord:
    """Return the record of `HistoryStore.load_turn` from the rows of a path."""
    if not rows:
        raise UnknownTurnError(turn_id)
    turns, token_ids = unpack_rows(rows)
    last = rows[-1]
    if not in_order(turns) or len(token_ids) != last.num_tokens:
        raise HistoryCorruptError(
            f"The path to turn {turn_id!r} is damaged: it should hold {last.turn_index + 1} turns of "
            f"{last.num_tokens} tokens, but {len(turns)} turns of {len(token_ids)} tokens were found. Delete "
            "the turns that continue it; all others are good."
        )
    return ConversationRecord(turn_id, token_ids, turns, last.created_at_s)


def unpack_rows(
    rows: list[TurnRow], conversation_id: str = ""
) -> tuple[tuple[TurnRecord, ...], NDArray[np.int32]]:
    """Return the turns of a path and its tokens; raise HistoryCorruptError for damaged ones."""
    turns, packed, num_tokens = [], bytearray(), 0
    for row in rows:
        turns.append(codec.unpack_turn(row, num_tokens, conversation_id))
        keep = turns[-1].keep
        if keep is not None:
            del packed[max(keep, 0) * codec.TOKEN_BYTES :]
        packed += row.prompt_ids + row.output_ids
        num_tokens = len(packed) // codec.TOKEN_BYTES
    return tuple(turns), codec.unpack_token_ids(bytes(packed))


def in_order(turns: tuple[TurnRecord, ...]) -> bool:
    """Return whether turns are numbered from 0 without gaps."""
    return all(turn.turn_index == index for index, turn in enumerate(turns))


def check_cut(num_tokens: object, num_tokens_there: int, conversation_id: str) -> int:
    """Return the length to cut to; raise InvalidRequestError unless it is an int within the conversation."""
    limit = f"an int from 0 to the {num_tokens_there} tokens of conversation {conversation_id!r}"
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int | np.integer):
        raise InvalidRequestError("num_tokens", num_tokens, limit)
    if not 0 <= num_tokens <= num_tokens_there:
        raise InvalidRequestError("num_tokens", num_tokens, limit)
    return int(num_tokens)


def cut(
    connection: Connection, head: str | None, num_tokens: int, conversation_id: str
) -> tuple[str | None, int]:
    """Return the turn that ends after `num_tokens` tokens of the path to a head, and its number + 1.

    If no turn ends there, a new turn is made of the beginning of one. Raises HistoryCorruptError instead of
    giving a damaged turn a new checksum.
    """
    if not num_tokens:
        return None, 0
    found: tuple[str | None, int] = None, 0
    num_tokens_before = 0
    part: tuple[str, int, int] | None = None
    for turn_id, turn_index, num_tokens_there, num_own_tokens in connection.execute(
        f"{PATH}SELECT turn_id, turn_index, num_tokens, (length(prompt_ids) + length(output_ids)) / "
        f"{codec.TOKEN_BYTES} FROM path JOIN turns USING (owner, turn_id, turn_index) ORDER BY turn_index",
        ("", head),
    ).fetchall():
        # The last turn that begins before the cut has the token before it: later ones keep at least that.
        if num_tokens_there - num_own_tokens < num_tokens:
            found = turn_id, turn_index + 1
            part = (turn_id, num_tokens, num_tokens_before) if num_tokens < num_tokens_there else None
        num_tokens_before = num_tokens_there
    if part is not None:
        found = _insert_beginning(connection, *part, conversation_id), found[1]
    return found


def turn_end(connection: Connection, head: str | None, num_turns: int) -> tuple[str | None, int]:
    """Return the last of the first `num_turns` turns of the path to a head, and the length of its path."""
    if not num_turns:
        return None, 0
    query = (
        f"{PATH}SELECT turn_id, num_tokens FROM path JOIN turns USING (owner, turn_id, turn_index) "
        "WHERE turn_index = ?"
    )
    turn_id, num_tokens = connection.execute(query, ("", head, num_turns - 1)).fetchone()
    return turn_id, num_tokens


def _insert_beginning(
    connection: Connection, turn_id: str, num_tokens: int, num_tokens_before: int, conversation_id: str
) -> str:
    """Add a turn next to this one whose path ends after `num_tokens` tokens; return its id.

    `num_tokens_before` is the length of the path to its parent.
    """
    query = f"SELECT {_COLUMNS} FROM turns WHERE owner = '' AND turn_id = ?"
    row = TurnRow._make(connection.execute(query, (turn_id,)).fetchone())
    keep = codec.kept_before(row, num_tokens_before)
    codec.check_undamaged(row, keep, conversation_id)
    prompt, output, messages = row.prompt_ids, row.output_ids, row.messages
    num_bytes = (num_tokens - row.num_tokens + codec.num_own_tokens(row)) * codec.TOKEN_BYTES
    if num_bytes < len(prompt):
        prompt, output, messages = prompt[:num_bytes], b"", None
    else:
        output = output[: num_bytes - len(prompt)]
    cut_id = new_turn_id(turn_id)
    insert(
        connection,
        row._replace(
            turn_id=cut_id,
            num_tokens=num_tokens,
            prompt_ids=prompt,
            output_ids=output,
            finish_reason=CUT_FINISH_REASON,
            messages=messages,
            output_text=None,
            usage=None,
            chain=None,
            checksum=codec.checksum(prompt, output, keep),
        ),
    )
    return cut_id


def collect_released(connection: Connection, in_use: Collection[str]) -> list[TurnKey]:
    """Remove the turns that were in use when they were released and are not in use now; return them."""
    released = connection.execute("SELECT owner, turn_id FROM released").fetchall()
    connection.execute("DELETE FROM released")
    return [key for owner, turn_id in released for key in collect(connection, owner, turn_id, in_use)]


def collect(
    connection: Connection, owner: str, turn_id: str | None, in_use: Collection[str] = ()
) -> list[TurnKey]:
    """Remove a released turn and the turns before it, as long as they are not needed; return them.

    A turn is needed by a later turn, a conversation's head or a response, or for itself (`kept`). A turn that
    is `in_use` is recorded instead, and `collect_released` checks it again.
    """
    removed: list[TurnKey] = []
    while turn_id is not None:
        row = connection.execute(_UNNEEDED, (owner, turn_id)).fetchone()
        if row is None:
            break
        if turn_id in in_use:
            connection.execute("INSERT INTO released VALUES (?, ?) ON CONFLICT DO NOTHING", (owner, turn_id))
            break
        connection.execute("DELETE FROM turns WHERE owner = ? AND turn_id = ?", (owner, turn_id))
        removed.append((owner, turn_id))
        turn_id = row[0]
    return removed
