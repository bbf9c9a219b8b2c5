"""What racing clients did and saw, with the time of each request.

Owns: things that come and go (conversations, items, keys, responses), turns, and what was seen of them.
Does not know: what may be true of it (`rules`, `quota_rules`), or HTTP.

A request is a span from its first byte to the end of its answer. What it changed became true at some moment
within it. So two overlapping requests may have happened in either order.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

TERMINAL: Final = ("completed", "incomplete", "failed", "cancelled")
STORED: Final = ("completed", "incomplete")
"""Statuses of responses that have a reply."""

type Kind = Literal["conversation", "response", "item", "key"]


class Span(NamedTuple):
    """A request, or the time in which its effect may have come.

    Attributes:
      began_s, ended_s: monotonic clock; the end is infinite if the client left.
      is_certain: whether the server confirmed the effect. Otherwise it may have none.
    """

    began_s: float
    ended_s: float = math.inf
    is_certain: bool = True

    def precedes(self, other: Span) -> bool:
        """Return whether this request had ended when the other one began."""
        return self.ended_s < other.began_s


class Sighting(NamedTuple):
    """A request that showed whether a thing was there."""

    span: Span
    is_present: bool


@dataclass(eq=False)
class Thing:
    """A row that a client created.

    Attributes:
      name: its id; for an item its text, which no other item has.
      created: when it came to be; None if the server refused it.
      conversation: name of the conversation that an item or a key is in.
      num_bytes: least and most bytes that it counts with.
      removed: requests to remove it that may have had an effect.
    """

    kind: Kind
    owner: str
    name: str
    created: Span | None
    conversation: str = ""
    num_bytes: tuple[int, int] = (0, 0)
    removed: list[Span] = field(default_factory=list)
    seen: list[Sighting] = field(default_factory=list)


class Listing(NamedTuple):
    """The items of a conversation: id, role and text of each."""

    conversation: str
    span: Span
    items: tuple[tuple[str, str, str], ...]
    is_whole: bool


class Append(NamedTuple):
    """The texts that one request appended, in order."""

    conversation: str
    span: Span
    texts: tuple[str, ...]


class Status(NamedTuple):
    """A response as a request showed it; `error` is the code of its error."""

    span: Span
    status: str
    text: str
    error: str = ""


@dataclass(eq=False)
class Turn:
    """A response that a client asked for; it is stored if it completes.

    Attributes:
      span: its request; for a background response, the request that queued it.
      conversation: the conversation that gets its items; "" without one.
      response: its id; "" if the client did not get it.
    """

    owner: str
    text: str
    span: Span
    conversation: str = ""
    response: str = ""
    is_background: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether the client left before it got the id."""
        return not self.response and self.span.ended_s == math.inf


class Amounts(NamedTuple):
    """What an owner stores, as the server said."""

    owner: str
    span: Span
    num_conversations: int
    num_responses: int
    num_bytes: int


class Refusal(NamedTuple):
    """A request that a quota refused.

    Attributes:
      amount: what the quota limits.
      stored: what the owner stores of it, as the answer said.
      num_bytes: bytes that the request would have added at most.
    """

    owner: str
    span: Span
    amount: str
    stored: int
    num_bytes: int


class Change(NamedTuple):
    """A request that may change a conversation, and keeps others out meanwhile.

    Attributes:
      name: what tells it from others.
      is_refused: whether it was refused because another one came first.
    """

    name: str
    span: Span
    is_refused: bool = False


class Record:
    """Everything that the clients of one round did and saw."""

    def __init__(self) -> None:
        self.things: dict[tuple[Kind, str], Thing] = {}
        self.listings: list[Listing] = []
        self.appends: list[Append] = []
        self.statuses: dict[str, list[Status]] = defaultdict(list)
        self.turns: list[Turn] = []
        self.amounts: list[Amounts] = []
        self.refusals: list[Refusal] = []
        self.strangers: dict[tuple[Kind, str], list[tuple[str, Span]]] = defaultdict(list)
        self.changes: dict[str, list[Change]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def add(self, thing: Thing) -> Thing:
        """Record a thing that was created; one that is known stays as it is."""
        return self.things.setdefault((thing.kind, thing.name), thing)

    def of(self, owner: str, kind: Kind) -> Iterator[Thing]:
        """Iterate over the things of one kind that an owner created."""
        return (one for one in self.things.values() if one.owner == owner and one.kind == kind)

    def removals(self, thing: Thing) -> list[Span]:
        """Return the requests that may have removed a thing, alone or with its conversation."""
        if not thing.conversation:
            return thing.removed
        return thing.removed + self.things["conversation", thing.conversation].removed

    def see(self, owner: str, kind: Kind, name: str, span: Span, *, is_present: bool) -> None:
        """Record that a thing was there, or was not."""
        thing = self.things.get((kind, name))
        if thing is not None:
            thing.seen.append(Sighting(span, is_present))
        elif is_present:
            self.strangers[kind, owner].append((name, span))

    def was_there(self, thing: Thing, during: Span) -> tuple[bool, bool]:
        """Return whether a thing was there surely all the time, and whether it may have been at any."""
        created, removals = thing.created, self.removals(thing)
        if created is None:
            return False, False
        surely = created.is_certain and created.precedes(during)
        surely = surely and not any(one.began_s <= during.ended_s for one in removals)
        maybe = created.began_s <= during.ended_s
        maybe = maybe and not any(one.is_certain and one.precedes(during) for one in removals)
        return surely, maybe
