"""What amounts and refusals a quota allows, given what clients created and deleted.

Owns: bounds of what an owner stored at any time, and the rules on amounts, refusals and successes.
Does not know: where a quota comes from.

The model counts what surely was there and what may have been. A look-up must lie between the two. A refusal
needs an upper bound that reaches the quota, and a success needs a lower bound below it. Turns are admitted
before they are stored, so an owner may exceed a quota by the turns that ran at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from pensieve_lab.races.record import Amounts, Kind, Record, Refusal, Span, Thing, Turn

MAX_TURN_BYTES: Final = 65_536
"""More than a turn of these clients stores, with its response and its items."""
_LEAVE_S: Final = 15.0
"""How long a turn may still be stored after its client left."""


class Quota(NamedTuple):
    """Limits of what one owner stores; None for no limit.

    Attributes:
      max_age_s: how old the amount may be that admits a turn.
    """

    num_conversations: int | None = None
    num_responses: int | None = None
    num_bytes: int | None = None
    max_age_s: float = 0.0


class Bounds(NamedTuple):
    """Least and most of what an owner stored during a span."""

    least: int
    most: int


def find_violations(record: Record, quota: Quota) -> list[str]:
    """Return a sentence for each amount, refusal or success that no order of the requests explains."""
    found: list[str] = []
    for amounts in record.amounts:
        found += _of_amounts(record, amounts, quota)
    for refusal in record.refusals:
        found += _of_refusal(record, refusal, quota)
    for thing in record.things.values():
        found += _of_success(record, thing, quota)
    return found


def bounds_of(record: Record, owner: str, amount: str, span: Span) -> Bounds:
    """Return what an owner stored at least during the whole of a span, and at most at a moment of it."""
    if amount == "bytes":
        return _bytes_of(record, owner, span)
    kind: Kind = "conversation" if amount == "conversations" else "response"
    seen = [record.was_there(one, span) for one in record.of(owner, kind)]
    lost = [one for one in record.turns if one.owner == owner and one.is_lost] if kind == "response" else []
    most = sum(maybe for _, maybe in seen) + sum(one.span.began_s <= span.ended_s for one in lost)
    return Bounds(sum(surely for surely, _ in seen), most)


def _bytes_of(record: Record, owner: str, span: Span) -> Bounds:
    least = most = 0
    for thing in record.things.values():
        if thing.owner == owner:
            surely, maybe = record.was_there(thing, span)
            least += thing.num_bytes[0] if surely else 0
            most += thing.num_bytes[1] if maybe else 0
    # Later turns and conversations may need the tokens of a turn whose response is deleted.
    turns = sum(one.owner == owner and one.span.began_s <= span.ended_s for one in record.turns)
    return Bounds(least, most + turns * MAX_TURN_BYTES)


def _of_refusal(record: Record, refusal: Refusal, quota: Quota) -> Iterator[str]:
    limit = getattr(quota, f"num_{refusal.amount}", None)
    bounds = bounds_of(record, refusal.owner, refusal.amount, refusal.span)
    own = refusal.num_bytes if refusal.amount == "bytes" else 1
    if limit is None or bounds.most + own <= limit:
        yield (
            f"{refusal.owner} was refused by the quota of {refusal.amount}, {limit}, "
            f"and stored at most {bounds.most}"
        )
    if not bounds.least <= refusal.stored <= bounds.most:
        yield (
            f"{refusal.owner} was told of {refusal.stored} {refusal.amount}, "
            f"which must be {bounds.least} to {bounds.most}"
        )


def _of_amounts(record: Record, seen: Amounts, quota: Quota) -> Iterator[str]:
    for name in ("conversations", "responses", "bytes"):
        stored = getattr(seen, f"num_{name}")
        bounds = bounds_of(record, seen.owner, name, seen.span)
        if not bounds.least <= stored <= bounds.most:
            yield f"{seen.owner} stores {stored} {name}, which must be {bounds.least} to {bounds.most}"
        limit = getattr(quota, f"num_{name}")
        if limit is not None and stored > limit + _excess(record, seen, name, quota):
            yield f"{seen.owner} stores {stored} {name}, beyond the quota of {limit}"


def _excess(record: Record, seen: Amounts, name: str, quota: Quota) -> int:
    """Return by how much the turns of an owner may have exceeded its quota until a look-up."""
    turns = [one for one in record.turns if one.owner == seen.owner and one.span.began_s <= seen.span.ended_s]
    match name:
        case "responses":  # a background response is stored when it is queued, within the quota
            return most_at_a_time([one for one in turns if not one.is_background], quota.max_age_s)
        case "bytes":
            return most_at_a_time(turns, quota.max_age_s) * MAX_TURN_BYTES
    return 0


def most_at_a_time(turns: list[Turn], after_s: float) -> int:
    """Return the most turns that ran at a time, each until `after_s` after its end."""
    changes: list[tuple[float, int]] = []
    for one in turns:
        ended_s = one.span.ended_s
        if one.is_background:
            ended_s = math.inf
        elif ended_s == math.inf:
            ended_s = one.span.began_s + _LEAVE_S
        changes += [(one.span.began_s, 1), (ended_s + after_s, -1)]
    running = most = 0
    for _, change in sorted(changes, key=lambda one: (one[0], -one[1])):
        running += change
        most = max(most, running)
    return most


def _of_success(record: Record, thing: Thing, quota: Quota) -> Iterator[str]:
    """A conversation or a response is stored only if it was within the quota at some moment."""
    if thing.kind not in ("conversation", "response", "item") or thing.created is None:
        return
    if not thing.created.is_certain:
        return
    span = Span(thing.created.began_s - quota.max_age_s, thing.created.ended_s)
    name = {"conversation": "conversations", "response": "responses", "item": "bytes"}[thing.kind]
    limit = getattr(quota, f"num_{name}")
    if limit is None:
        return
    least = bounds_of(record, thing.owner, name, span).least
    own = thing.num_bytes[0] if name == "bytes" else 1
    if least + own > limit:
        yield f"{thing.kind} {thing.name[:40]!r} was stored, although {thing.owner} had {least} {name}"
