"""Where a turn stands in the tree of turns, for whoever places turns itself.

Owns: the value, and how ids of turns are made and taken apart.
Does not know: conversations by name, which the engine places at their head, or what an attachment is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pensieve_jax.core.errors import InvalidRequestError
from pensieve_jax.core.options import is_utf8

_HALF = 16  # hexadecimal digits of a root, and of a turn's own part
_TURN_ID = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnNode:
    """A turn that goes on from another one, or begins a tree; turns never change once they are committed.

    Attributes:
      turn_id: 32 hexadecimal digits: 16 that all turns of a tree share, its root, and 16 of its own.
      parent_id: the turn that it goes on from; None for the first turn of a tree.
      owner: whose it is. No state and no history is shared between owners.
      durable: False keeps it in memory only: a later turn may go on from it while its state lasts.
      chain: what identifies the messages up to and including this turn's own; b"" for a turn without.
      attachment: what the history commits together with the turn; see `history.changes`.
    """

    turn_id: str
    parent_id: str | None = None
    owner: str = ""
    durable: bool = True
    chain: bytes = b""
    attachment: object = None

    def __post_init__(self) -> None:
        """Raise InvalidRequestError for a field of another type, or a parent of another tree."""
        check_turn_id("turn_id", self.turn_id)
        check_owner(self.owner)
        for field, kind, limit in (("durable", bool, "True or False"), ("chain", bytes, "bytes")):
            if not isinstance(getattr(self, field), kind):
                raise InvalidRequestError(field, getattr(self, field), limit)
        if self.parent_id is not None:
            check_turn_id("parent_id", self.parent_id)
            if root_of(self.parent_id) != root_of(self.turn_id):
                limit = f"a turn of the tree {root_of(self.turn_id)}, as turn_id says"
                raise InvalidRequestError("parent_id", self.parent_id, limit)


class TurnOrigin(NamedTuple):
    """What a placed turn was found to go on from in memory.

    Attributes:
      kind: "extended": its parent, which nothing had gone on from; "forked": its parent, or another choice of
        the same call; "loaded": its parent was read from the history; "chunks": it has no parent, and begins
        with the tokens of another turn of its owner; "new": nothing.
      num_tokens: leading tokens of its context that somebody in memory has as well; whether their state is in
        a tier or must be recomputed is told by `Usage`.
    """

    kind: Literal["extended", "forked", "loaded", "chunks", "new"]
    num_tokens: int


def check_turn_id(field: str, turn_id: object) -> None:
    """Raise InvalidRequestError, naming `field`, unless it is the id of a turn."""
    if not isinstance(turn_id, str) or not _TURN_ID.match(turn_id):
        raise InvalidRequestError(field, turn_id, "32 hexadecimal digits")


def check_owner(owner: object) -> None:
    """Raise InvalidRequestError unless turns can be this one's."""
    if not isinstance(owner, str) or not is_utf8(owner):
        raise InvalidRequestError("owner", owner, "a string that UTF-8 can hold")


def root_of(turn_id: str) -> str:
    """The part of a turn's id that all turns of its tree share."""
    return turn_id[:_HALF]


type RootFor = Callable[[int], str]
"""Names the root of a tree that begins, whose first prompt has about so many tokens."""


def new_root(num_tokens: int = 0) -> str:
    """Of a tree that begins, whatever its first prompt has: any name is as good as another."""
    return secrets.token_hex(_HALF // 2)


def root_of_digest(digest: bytes) -> str:
    """Of a tree that begins as all that have this digest: one digest, one root."""
    return digest.hex()[:_HALF]


def turn_id_under(root: str) -> str:
    """The id of a turn that begins a tree, or goes on in it."""
    return root + secrets.token_hex(_HALF // 2)


def new_turn_id(parent_id: str | None = None) -> str:
    """The id of a turn that goes on from `parent_id`, or begins a tree."""
    return turn_id_under(new_root() if parent_id is None else root_of(parent_id))
