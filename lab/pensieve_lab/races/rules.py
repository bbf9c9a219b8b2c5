"""What the answers of racing requests may say: a sequential model of conversations, items and responses.

Owns: the rules on one round's record, and the sentence for each violation.
Does not know: quotas (`quota_rules`), or how requests are sent.

Each rule holds for every order of overlapping requests, so a violation is a fault of the server. A request
that ended before another one began came first.
"""

from __future__ import annotations

import graphlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from pensieve_lab.races.record import STORED, TERMINAL, Change, Record, Span, Status, Thing, Turn

GRACE_S: Final = 5.0
"""How long a conversation may stay locked after a client saw the end of its turn."""
_CODES_OF_CHANGES: Final = ("conversation_locked", "not_found")


def find_violations(record: Record) -> list[str]:
    """Return a sentence for each answer that no order of the requests explains."""
    _settle_background_turns(record)
    _see_items(record)
    found = [*record.problems]
    for thing in record.things.values():
        found += _of_thing(record, thing)
    for rule in (_of_strangers, _of_orders, _of_appends, _of_turns, _of_statuses, _of_conflicts):
        found += rule(record)
    return found


def _settle_background_turns(record: Record) -> None:
    """Take from the statuses of background responses whether their items were appended, and by when."""
    for turn in record.turns:
        if not turn.is_background or not turn.conversation:
            continue
        item = record.things["item", turn.text]
        ends = [one for one in record.statuses[turn.response] if one.status in TERMINAL]
        end_s = min((one.span.ended_s for one in ends), default=math.inf)
        record.changes[turn.conversation].append(Change(turn.text, Span(turn.span.began_s, end_s)))
        if ends:
            item.created = Span(turn.span.began_s, end_s) if ends[0].status in STORED else None


def _see_items(record: Record) -> None:
    """Turn each list of items into sightings of all items of its conversation."""
    items: dict[str, list[Thing]] = defaultdict(list)
    for item in record.things.values():
        if item.kind == "item":
            items[item.conversation].append(item)
    for listing in record.listings:
        there = {text for _, role, text in listing.items if role == "user"}
        known = {item.name for item in items[listing.conversation]}
        for text in there - known:
            record.problems.append(f"{listing.conversation} has {text[:60]!r}, which no request appended")
        for item in items[listing.conversation]:
            is_present = item.name in there
            if is_present or listing.is_whole:
                record.see(item.owner, "item", item.name, listing.span, is_present=is_present)


def _of_thing(record: Record, thing: Thing) -> Iterator[str]:
    name = f"{thing.kind} {thing.name[:60]!r} of {thing.owner}"
    for sighting in thing.seen:
        surely, maybe = record.was_there(thing, sighting.span)
        if sighting.is_present and not maybe:
            why = "its creation was refused" if thing.created is None else "it was not there yet, or deleted"
            yield f"{name} was seen, but {why}: {_shown(sighting.span)}"
        if not sighting.is_present and surely:
            yield f"{name} was missing, but nothing had deleted it: {_shown(sighting.span)}"
    removals = [one for one in thing.removed if one.is_certain]
    if len(removals) > 1:
        yield f"{name} was deleted {len(removals)} times"
    if removals and thing.created is None:
        yield f"{name} was deleted, but its creation was refused"


def _of_strangers(record: Record) -> Iterator[str]:
    """Unknown responses must be those of clients that left before they got the id."""
    for (kind, owner), seen in record.strangers.items():
        unknown = {name for name, _ in seen if (kind, name) not in record.things}
        lost = sum(one.owner == owner and one.is_lost for one in record.turns)
        if len(unknown) > (lost if kind == "response" else 0):
            yield f"{owner} has {len(unknown)} {kind}s that no request created, such as {min(unknown)}"


def _of_orders(record: Record) -> Iterator[str]:
    """Items stay in the order of their appends, which all lists show alike."""
    after: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for listing in record.listings:
        ids = [item_id for item_id, _, _ in listing.items]
        texts = [text for _, role, text in listing.items if role == "user"]
        if len(set(ids)) != len(ids) or len(set(texts)) != len(texts):
            yield f"conversation {listing.conversation} lists an item twice: {texts}"
        for before, later in itertools.pairwise(texts):
            after[listing.conversation][later].add(before)
    for conversation, spans in _ends_of_appends(record).items():
        for (_, last, one), (first, _, other) in itertools.permutations(spans, 2):
            if one.precedes(other):
                after[conversation][first].add(last)
    for conversation, graph in after.items():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            yield f"conversation {conversation} has its items in two orders: {error.args[1]}"


def _ends_of_appends(record: Record) -> dict[str, list[tuple[str, str, Span]]]:
    """Return first text, last text and time of each append that succeeded and was seen, by conversation."""
    found: dict[str, list[tuple[str, str, Span]]] = defaultdict(list)
    for one in record.appends:
        found[one.conversation].append((one.texts[0], one.texts[-1], one.span))
    return found


def _of_appends(record: Record) -> Iterator[str]:
    """The items of one append follow each other, whatever came at the same time."""
    for listing in record.listings:
        place = {text: index for index, (_, role, text) in enumerate(listing.items) if role == "user"}
        for append in record.appends:
            if append.conversation == listing.conversation:
                places = [place[text] for text in append.texts if text in place]
                if places and places != list(range(places[0], places[0] + len(places))):
                    yield f"items of one append stand at {places} of {append.conversation}: {append.texts}"


def _of_turns(record: Record) -> Iterator[str]:
    """A turn's message has its reply behind it, the one that the client got."""
    turns = {one.text: one for one in record.turns if one.conversation}
    for listing in record.listings:
        for index, (_, role, text) in enumerate(listing.items):
            turn = turns.get(text) if role == "user" else None
            if turn is None:
                continue
            behind = listing.items[index + 1 : index + 2]
            if not behind and not listing.is_whole:
                continue
            if not behind or behind[0][1] != "assistant":
                yield f"the turn {text!r} of {listing.conversation} has no reply behind it"
            elif (reply := _reply_of(record, turn)) is not None and reply != behind[0][2]:
                yield f"the turn {text!r} has the reply {behind[0][2]!r}; its client got {reply!r}"


def _reply_of(record: Record, turn: Turn) -> str | None:
    """Return the reply that a client got; None if none did."""
    replies = [one.text for one in record.statuses[turn.response] if one.status in STORED]
    return replies[0] if turn.response and replies else None


def _of_statuses(record: Record) -> Iterator[str]:
    """A response that has ended stays as it is, and fails only if its conversation changed."""
    turns = {one.response: one for one in record.turns if one.response}
    for response, seen in record.statuses.items():
        ends = [one for one in seen if one.status in TERMINAL]
        if len({(one.status, one.text) for one in ends}) > 1:
            yield f"response {response} ended as {sorted({(one.status, one.text) for one in ends})}"
        for end, other in itertools.product(ends[:1], seen):
            if other.status not in TERMINAL and end.span.precedes(other.span):
                yield f"response {response} was {other.status} after it had ended as {end.status}"
        turn = turns.get(response)
        if ends and ends[0].status == "failed" and not _may_fail(record, turn, ends[0]):
            yield f"response {response} failed without a reason: {ends[0].error!r}"


def _may_fail(record: Record, turn: Turn | None, end: Status) -> bool:
    if turn is None or not turn.conversation or end.error not in _CODES_OF_CHANGES:
        return False
    own = Change(turn.text, Span(turn.span.began_s, end.span.ended_s))
    return _met_another(record, turn.conversation, own)


def _of_conflicts(record: Record) -> Iterator[str]:
    """A request is refused as a conflict only if another one may have changed the conversation meanwhile."""
    for conversation, changes in record.changes.items():
        for one in changes:
            if one.is_refused and not _met_another(record, conversation, one):
                yield f"{one.name!r} was refused, but met no change of {conversation}: {_shown(one.span)}"


def _met_another(record: Record, conversation: str, own: Change) -> bool:
    """Return whether another change of a conversation may have come during this one.

    It may be one that was refused itself at its end, for a change that was not.
    """
    met = [
        one for one in record.changes[conversation] if one.name != own.name and _overlap(one.span, own.span)
    ]
    real = [one for one in record.changes[conversation] if not one.is_refused and one.name != own.name]
    return any(not one.is_refused or any(_overlap(one.span, each.span) for each in real) for one in met)


def _overlap(one: Span, other: Span) -> bool:
    return one.began_s <= other.ended_s + GRACE_S and other.began_s <= one.ended_s + GRACE_S


def _shown(span: Span) -> str:
    return f"from {span.began_s:.3f} to {span.ended_s:.3f} s"
