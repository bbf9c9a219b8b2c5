"""The trees of responses that continue each other, for a list of conversations.

Owns: the statements on responses by tree. A response's id is resp_ and its turn's id, which begins with the
root that all turns of a tree share.
Does not know: transactions, or how a tree is displayed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.history import codec
from pensieve_jax.history.connection import Connection
from pensieve_jax.history.first_texts import read_first_text, text_of

_ROOT: Final = "substr(turn_id, 1, 16)"
_HAS_TURN: Final = "turn_id IS NOT NULL AND completed_at_s IS NOT NULL"  # a queued one names its parent
_OF_TREE: Final = f"owner = ? AND response_id >= ? AND response_id < ? AND {_HAS_TURN}"
_LAST_FIRST: Final = "ORDER BY responses.created_at_s DESC, responses.rowid DESC"
_TURN: Final = (
    "SELECT response_id, turns.parent_id, request, input_items, output_text, messages, status, "
    "usage FROM responses JOIN turns USING (owner, turn_id) WHERE responses.owner = ? AND response_id = ?"
)

TITLE_PREFIX: Final = "tree_"
"""With a tree's root, the id of the server's conversation whose metadata has the tree's title."""
MAX_FIRST_CHARACTERS: Final = 200
"""Limit of a first text: a list is read often, and a message may be very long."""
MAX_TREE_CHARACTERS: Final = 2_000_000
"""Limit of a tree's texts, with instructions counted once; the last response is returned at any length."""
MAX_READ_CHARACTERS: Final = 64_000_000
"""Limit of a tree's stored responses: each request repeats its instructions, as JSON in ASCII."""


@dataclass(frozen=True, slots=True)
class TreeSummary:
    """A line in a list of trees.

    Attributes:
      root: the beginning of the ids of all its turns.
      num_turns: number of turns that are responses.
      first_text: the user's first text, or the beginning of it.
      last_active_s: end of its last turn.
      title: the name that its owner gave it; None without one.
    """

    root: str
    num_turns: int
    first_text: str
    last_active_s: float
    title: str | None = None


@dataclass(frozen=True, slots=True)
class TreeTurn:
    """A response in its tree.

    Attributes:
      id: id of the response.
      parent: the response that it continues, which may be deleted, of another tree, or left out because of a
        limit; None for a first turn only.
      instructions: those of its own request, which the next request may or may not repeat; None if it had
        none.
      input: the user's last text in its request; "" if it has none, as when a client sends results only.
      results: the texts of the tools' results in its request.
      output: the text of the reply, with the marks of reasoning and calls.
      template_input: what its turn was rendered with, and how its text is read.
      status: status of the response.
      usage: where its tokens came from.
    """

    id: str
    parent: str | None
    instructions: str | None
    input: str
    results: tuple[str, ...]
    output: str
    template_input: TemplateInput
    status: str
    usage: Usage | None


def trees(connection: Connection, owner: str, limit: int) -> list[TreeSummary]:
    """Return an owner's trees, the most recently active first."""
    newest = (
        f"SELECT {_ROOT} AS root, count(*) AS num_turns, max(completed_at_s) AS last_s, min(rowid) AS first "
        f"FROM responses WHERE owner = ? AND {_HAS_TURN} GROUP BY 1 ORDER BY 3 DESC, 1 LIMIT ?"
    )
    query = (
        f"SELECT root, newest.num_turns, last_s, first, metadata FROM ({newest}) AS newest "
        "LEFT JOIN conversations ON owner = ? AND conversation_id = ? || root ORDER BY last_s DESC, root"
    )
    rows = connection.execute(query, (owner, limit, owner, TITLE_PREFIX)).fetchall()
    return [
        TreeSummary(
            root, count, read_first_text(connection, first)[:MAX_FIRST_CHARACTERS], last_s, _title(metadata)
        )
        for root, count, last_s, first, metadata in rows
    ]


def tree(connection: Connection, owner: str, root: str, limit: int) -> list[TreeTurn]:
    """Return the last responses of one tree, in order of creation; [] for an unknown tree.

    Fewer than `limit` are returned if their texts exceed `MAX_TREE_CHARACTERS`, or the stored texts read for
    them exceed `MAX_READ_CHARACTERS`.
    """
    query = f"SELECT response_id FROM responses WHERE {_OF_TREE} {_LAST_FIRST} LIMIT ?"
    turns: list[TreeTurn] = []
    instructions: dict[str | None, str | None] = {}  # each text is stored and counted once
    num_read = num_returned = 0
    for (response_id,) in connection.execute(query, (owner, *_bounds(root), limit)).fetchall():
        row = connection.execute(_TURN, (owner, response_id)).fetchone()
        turn = _turn(row)
        num_read += sum(len(text or "") for text in row[2:6])
        num_returned += sum(map(len, (turn.input, turn.output, *turn.results)))
        if turn.instructions not in instructions:
            num_returned += len(turn.instructions or "")
        if turns and (num_read > MAX_READ_CHARACTERS or num_returned > MAX_TREE_CHARACTERS):
            break
        same = instructions.setdefault(turn.instructions, turn.instructions)
        turns.append(replace(turn, instructions=same))
    return turns[::-1]


def _turn(row: Sequence[Any]) -> TreeTurn:
    response_id, parent_id, request, items, text, messages, status, usage = row
    asked = json.loads(request)
    # Not always the parent of the turn: with other instructions, the turn's tokens are in another tree.
    parent = asked.get("previous_response_id") or (parent_id and f"resp_{parent_id}")
    instructions = asked.get("instructions") or None
    _, template_input = codec.unpack_messages(messages)
    own_items = json.loads(items)
    return TreeTurn(
        id=response_id,
        parent=parent,
        instructions=instructions,
        input=_user_text(own_items),
        results=_results(own_items),
        output=text or "",
        template_input=template_input,
        status=status,
        usage=codec.unpack_usage(usage),
    )


def _title(metadata: str | None) -> str | None:
    title = None if metadata is None else json.loads(metadata).get("title")
    return title if isinstance(title, str) else None


def _bounds(root: str) -> tuple[str, str]:
    """Return bounds of the ids of a tree's responses (inclusive, exclusive); a root is hexadecimal."""
    return (f"resp_{root}", f"resp_{root}g") if len(root) == 16 else ("", "")


def _user_text(items: Sequence[dict[str, Any]]) -> str:
    """Return the user's text in a request, without the instructions before it."""
    user_items = [item for item in items if item.get("role") == "user"]
    return text_of(user_items[-1]) if user_items else ""


def _results(items: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the texts of the tools' results in a request."""
    results = [item for item in items if item.get("type") == "function_call_output"]
    return tuple(text_of({"content": item.get("output", "")}) for item in results)
