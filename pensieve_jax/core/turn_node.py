"""The position of a turn in the tree of turns, for callers that place turns themselves.

Owns: this value, and how ids of turns are built and split.
Does not know: named conversations, whose turns the engine places at their head, or what an attachment is.
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
    """A turn that continues another turn or begins a tree; committed turns never change.

    Attributes:
      turn_id: 32 hexadecimal digits: 16 that all turns of a tree share, its root, and 16 of its own.
      parent_id: the turn that it continues; None for the first turn of a tree.
      owner: owner of the turn. Owners share neither KV state nor history.
      durable: False keeps the turn in memory only; a later turn may continue it while its state lasts.
      chain: digest that identifies the messages up to and including this turn's own; b"" without one.
      attachment: what the history commits together with the turn; see `history.changes`.
    """

    turn_id: str
    parent_id: str | None = None
    owner: str = ""
    durable: bool = True
    chain: bytes = b""
    attachment: object = None

    def __post_init__(self) -> None:
        """Raise InvalidRequestError if a field has a wrong type or the parent is in another tree."""
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
    """What a placed turn was found to continue in memory.

    Attributes:
      kind: "extended": its parent, which no turn had continued before; "forked": its parent, or another
        choice of the same call; "loaded": its parent, read from the history; "chunks": it has no parent, and
        begins with the tokens of another turn of its owner; "new": nothing.
      num_tokens: number of leading context tokens that a turn in memory shares. `Usage` tells whether their
        KV state is in a tier or must be recomputed.
    """

    kind: Literal["extended", "forked", "loaded", "chunks", "new"]
    num_tokens: int


def check_turn_id(field: str, turn_id: object) -> None:
    """Raise InvalidRequestError, naming `field`, unless `turn_id` is a valid id."""
    if not isinstance(turn_id, str) or not _TURN_ID.match(turn_id):
        raise InvalidRequestError(field, turn_id, "32 hexadecimal digits")


def check_owner(owner: object) -> None:
    """Raise InvalidRequestError unless `owner` is a valid owner of turns."""
    if not isinstance(owner, str) or not is_utf8(owner):
        raise InvalidRequestError("owner", owner, "a string that UTF-8 can hold")


def root_of(turn_id: str) -> str:
    """Return the part of a turn's id that all turns of its tree share."""
    return turn_id[:_HALF]


type RootFor = Callable[[int], str]
"""Returns the root of a new tree, given the approximate number of tokens in its first prompt."""


def new_root(num_tokens: int = 0) -> str:
    """Return a random root for a new tree; it does not depend on the prompt's length."""
    return secrets.token_hex(_HALF // 2)


def root_of_digest(digest: bytes) -> str:
    """Return the root of all trees with this digest."""
    return digest.hex()[:_HALF]


def turn_id_under(root: str) -> str:
    """Return the id of a turn that begins or continues the tree of `root`."""
    return root + secrets.token_hex(_HALF // 2)


def new_turn_id(parent_id: str | None = None) -> str:
    """Return the id of a turn that continues `parent_id`, or begins a tree."""
    return turn_id_under(new_root() if parent_id is None else root_of(parent_id))
