"""The rules of the race checker: each finds an answer that no order of the requests explains."""

from __future__ import annotations

import math

import pytest

from pensieve_lab.races import quota_rules, rules
from pensieve_lab.races.quota_rules import MAX_TURN_BYTES, Quota, most_at_a_time
from pensieve_lab.races.record import (
    Amounts,
    Append,
    Change,
    Listing,
    Record,
    Refusal,
    Sighting,
    Span,
    Status,
    Thing,
    Turn,
)


def thing(record, name="conv_1", kind="conversation", began_s=0.0, **fields):
    return record.add(Thing(kind, "ann", name, Span(began_s, began_s + 1), **fields))


def item(record, text, began_s=2.0, conversation="conv_1"):
    return thing(record, text, "item", began_s, conversation=conversation)


def listing(record, span, *texts, is_whole=True, **replies):
    """Record a list of items; a text that `replies` has is followed by its reply."""
    rows = []
    for text in texts:
        rows.append((f"id {text}", "user", text))
        if text in replies:
            rows.append((f"id reply {text}", "assistant", replies[text]))
    record.listings.append(Listing("conv_1", span, tuple(rows), is_whole))


@pytest.fixture
def record():
    record = Record()
    thing(record)
    return record


def only(sentences, part):
    (sentence,) = sentences
    assert part in sentence


def test_what_some_order_explains_is_no_violation(record):
    """A deletion and a list overlap, so that the list may come before or after."""
    for number, text in enumerate(("a", "b")):
        item(record, text, 2.0 + 2 * number)
        record.appends.append(Append("conv_1", Span(2.0 + 2 * number, 3.0 + 2 * number), (text,)))
    record.things["item", "a"].removed.append(Span(10.0, 12.0))
    listing(record, Span(6.0, 7.0), "a", "b")
    listing(record, Span(11.0, 11.5), "a", "b")
    listing(record, Span(11.0, 11.6), "b")
    listing(record, Span(13.0, 14.0), "b")
    assert rules.find_violations(record) == []


def test_a_lost_item_is_found(record):
    item(record, "a")
    listing(record, Span(4.0, 5.0))
    only(rules.find_violations(record), "was missing")


def test_an_item_that_stays_after_its_deletion_is_found(record):
    item(record, "a").removed.append(Span(4.0, 5.0))
    listing(record, Span(6.0, 7.0), "a")
    only(rules.find_violations(record), "was seen, but it was not there yet, or deleted")


def test_an_item_of_a_deleted_conversation_is_found(record):
    item(record, "a")
    record.things["conversation", "conv_1"].removed.append(Span(4.0, 5.0))
    listing(record, Span(6.0, 7.0), "a")
    only(rules.find_violations(record), "or deleted")


def test_a_refused_item_that_is_there_is_found(record):
    item(record, "a").created = None
    listing(record, Span(4.0, 5.0), "a")
    only(rules.find_violations(record), "its creation was refused")


def test_an_item_of_no_request_is_found(record):
    listing(record, Span(4.0, 5.0), "a")
    only(rules.find_violations(record), "which no request appended")


def test_a_second_deletion_is_found(record):
    record.things["conversation", "conv_1"].removed += [Span(4.0, 5.0), Span(4.0, 5.5)]
    only(rules.find_violations(record), "was deleted 2 times")


def test_two_orders_are_found(record):
    for text in ("a", "b"):
        item(record, text)
    listing(record, Span(4.0, 5.0), "a", "b")
    listing(record, Span(4.0, 5.0), "b", "a")
    only(rules.find_violations(record), "in two orders")


def test_an_order_against_time_is_found(record):
    for number, text in enumerate(("a", "b")):
        item(record, text, 2.0 + 2 * number)
        record.appends.append(Append("conv_1", Span(2.0 + 2 * number, 3.0 + 2 * number), (text,)))
    listing(record, Span(6.0, 7.0), "b", "a")
    only(rules.find_violations(record), "in two orders")


def test_a_torn_append_is_found(record):
    for text in ("a", "b", "c"):
        item(record, text)
    record.appends.append(Append("conv_1", Span(2.0, 3.0), ("a", "c")))
    listing(record, Span(4.0, 5.0), "a", "b", "c")
    only(rules.find_violations(record), "items of one append stand at [0, 2]")


def turn(record, text="a", status="completed", is_background=False):
    one = Turn("ann", text, Span(2.0, 3.0), "conv_1", f"resp_{text}", is_background)
    record.turns.append(one)
    record.statuses[one.response].append(Status(Span(2.0, 3.0), status, "hello"))
    item(record, text)
    thing(record, one.response, "response", 2.0)
    return one


def test_a_turn_without_its_reply_and_with_another_is_found(record):
    turn(record)
    listing(record, Span(4.0, 5.0), "a", a="hello")
    assert rules.find_violations(record) == []
    listing(record, Span(4.0, 5.0), "a", a="ho")
    listing(record, Span(4.0, 5.0), "a")
    wrong, missing = rules.find_violations(record)
    assert "has the reply 'ho'" in wrong and "no reply behind it" in missing


@pytest.mark.parametrize(("status", "is_there"), [("completed", False), ("cancelled", True)])
def test_a_background_turn_has_its_items_if_it_completed(record, status, is_there):
    turn(record, status=status, is_background=True)
    listing(record, Span(4.0, 5.0), *(["a"] if is_there else []), a="hello")
    assert len(rules.find_violations(record)) == 1


def test_an_ended_response_stays(record):
    one = turn(record)
    for status, text in (("completed", "hello"), ("queued", ""), ("incomplete", "hell")):
        record.statuses[one.response].append(Status(Span(4.0, 5.0), status, text))
    again, queued = rules.find_violations(record)
    assert "ended as" in again and "was queued after it had ended" in queued


def test_a_response_fails_only_for_another_change(record):
    one = turn(record, status="failed", is_background=True)
    record.statuses[one.response][0] = Status(Span(2.0, 3.0), "failed", "", "conversation_locked")
    only(rules.find_violations(record), "failed without a reason")
    record.changes["conv_1"].append(Change("b", Span(2.5, 2.6)))
    assert rules.find_violations(record) == []


def test_a_conflict_needs_another_change(record):
    refused = Change("a", Span(20.0, 21.0), is_refused=True)
    record.changes["conv_1"] += [refused, Change("b", Span(20.0, 21.0), is_refused=True)]
    record.changes["conv_1"].append(Change("old", Span(1.0, 2.0)))
    assert len(rules.find_violations(record)) == 2, "two refused requests explain nothing"
    record.changes["conv_1"].append(Change("c", Span(20.5, 20.6)))
    assert rules.find_violations(record) == []


def test_unknown_responses_are_those_of_clients_that_left(record):
    record.see("ann", "response", "resp_x", Span(4.0, 5.0), is_present=True)
    only(rules.find_violations(record), "that no request created")
    record.turns.append(Turn("ann", "a", Span(2.0)))
    assert rules.find_violations(record) == []


def test_a_sighting_of_another_state_is_found(record):
    record.things["conversation", "conv_1"].seen.append(Sighting(Span(4.0, 5.0), is_present=False))
    only(rules.find_violations(record), "nothing had deleted it")


# --- quotas


def amounts(record, conversations=1, responses=0, num_bytes=300, began_s=4.0):
    span = Span(began_s, began_s + 1)
    record.amounts.append(Amounts("ann", span, conversations, responses, num_bytes))


@pytest.fixture
def stored():
    record = Record()
    thing(record, num_bytes=(300, 300))
    return record


def test_amounts_are_those_of_the_things_there(stored):
    amounts(stored)
    assert quota_rules.find_violations(stored, Quota()) == []
    amounts(stored, conversations=2)
    amounts(stored, responses=1)
    amounts(stored, num_bytes=299)
    found = quota_rules.find_violations(stored, Quota())
    assert [sentence.split()[3] for sentence in found] == ["conversations,", "responses,", "bytes,"]


def test_a_deletion_gives_its_room_back(stored):
    stored.things["conversation", "conv_1"].removed.append(Span(2.0, 3.0))
    amounts(stored, conversations=0, num_bytes=0)
    assert quota_rules.find_violations(stored, Quota()) == []
    amounts(stored, conversations=1, num_bytes=0)
    only(quota_rules.find_violations(stored, Quota()), "must be 0 to 0")


def test_a_refusal_needs_what_may_have_been_stored(stored):
    stored.refusals.append(Refusal("ann", Span(4.0, 5.0), "conversations", 1, 1))
    assert quota_rules.find_violations(stored, Quota(num_conversations=1)) == []
    only(quota_rules.find_violations(stored, Quota(num_conversations=2)), "was refused by the quota")
    stored.refusals.append(Refusal("ann", Span(4.0, 5.0), "conversations", 2, 1))
    only(quota_rules.find_violations(stored, Quota(num_conversations=1)), "was told of 2")


def test_a_success_beyond_the_quota_is_found(stored):
    thing(stored, "conv_2", began_s=5.0)
    only(quota_rules.find_violations(stored, Quota(num_conversations=1)), "was stored, although")
    thing(stored, "item", "item", 7.0, conversation="conv_2", num_bytes=(200, 200))
    assert len(quota_rules.find_violations(stored, Quota(num_bytes=400))) == 1


def test_turns_may_exceed_the_quota_by_those_at_a_time():
    record = Record()
    for number in range(3):
        record.turns.append(Turn("ann", f"{number}", Span(1.0, 2.0), response=f"resp_{number}"))
        thing(record, f"resp_{number}", "response", 1.0)
    amounts(record, 0, 3, 3000)
    quota = Quota(num_responses=1)
    assert quota_rules.find_violations(record, quota) == []
    thing(record, "resp_x", "response", 1.0)
    thing(record, "resp_y", "response", 1.0)
    amounts(record, 0, 5, 3000)
    assert any("beyond the quota" in one for one in quota_rules.find_violations(record, quota))


def test_the_most_turns_at_a_time():
    spans = [Span(0.0, 2.0), Span(1.0, 3.0), Span(2.5, 4.0)]
    turns = [Turn("ann", "", span, response="r") for span in spans]
    assert most_at_a_time(turns, 0.0) == 2 and most_at_a_time(turns, 1.0) == 3
    assert most_at_a_time([Turn("ann", "", Span(0.0, math.inf))], 0.0) == 1
    assert MAX_TURN_BYTES > 1000
