"""Which turns the index remembers, for how long, and which of several equal turns it finds."""

from __future__ import annotations

import pytest

from pensieve_jax.core.errors import UnknownTurnError
from pensieve_jax.core.template_input import TemplateInput
from pensieve_jax.server.context.turn_index import PastTurn, TurnIndex
from tests.server.context.no_turns import NoTurns


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def past(turn_id: str, parent_id: str | None = None, *, owner: str = "ann", text: str = "fine", **fields):
    """Return a turn whose chain depends on its text alone."""
    known = {"before": b"before", "num_tokens": 10, "messages": None, "durable": True}
    known |= {"prompt_token_ids": [3], "output_token_ids": [1, 2]}
    return PastTurn(turn_id=turn_id, parent_id=parent_id, owner=owner, reply=said(text), **(known | fields))


def find(index: TurnIndex, text: str = "fine", *, durable: bool = True) -> str | None:
    found = index.find("ann", b"before", said(text), durable=durable)
    return None if found is None else found.turn_id


@pytest.mark.parametrize(("forgotten", "left"), [("older", "newer"), ("newer", None)])
def test_forgetting_one_of_two_equal_turns(forgotten, left):
    """The index finds the newest of two equal turns; the chain no longer belongs to the older one."""
    index = TurnIndex(NoTurns())
    for turn_id in ("older", "newer"):
        index.add(past(turn_id))
    assert find(index) == "newer"
    index.forget("ann", forgotten)
    assert find(index) == left and len(index) == 1


def test_a_turn_that_is_added_again_counts_once():
    index = TurnIndex(NoTurns())
    turn = past("one")
    index.add(turn)
    index.add(past("one", text="another"))
    assert index.num_bytes == past("one", text="another").num_bytes and len(index) == 1
    assert find(index) is None and find(index, "another") == "one"


def test_a_turn_larger_than_the_budget_is_remembered_alone():
    index = TurnIndex(NoTurns(), max_bytes=1)
    for turn_id in ("a", "b"):
        index.add(past(turn_id, text=turn_id))
        assert len(index) == 1 and find(index, turn_id) == turn_id
    assert not index.remembers("ann", "a") and index.remembers("ann", "b")
    assert index.num_bytes == past("b", text="b").num_bytes


def test_turns_that_fill_the_budget_exactly_stay():
    size = past("a", text="a").num_bytes
    index = TurnIndex(NoTurns(), max_bytes=3 * size)
    for turn_id in "abc":
        index.add(past(turn_id, text=turn_id))
    assert len(index) == 3 and index.num_bytes == 3 * size
    assert find(index, "a") == "a", "and it is the newest now"
    index.add(past("d", text="d"))
    assert [index.remembers("ann", turn_id) for turn_id in "abcd"] == [True, False, True, True]


def test_the_size_of_a_turn_counts_its_messages_texts_and_ids():
    size = past("a").num_bytes
    assert 1000 < size < 1200
    assert past("a", output_token_ids=[1] * 12).num_bytes == size + 40
    assert past("a", text="fine" + "x" * 7).num_bytes == size + 7
    message = {"role": "user", "content": "x" * 100}
    assert 400 < past("a", messages=(message,)).num_bytes - size < 500


def test_a_turn_in_memory_only_is_of_one_epoch():
    index = TurnIndex(NoTurns())
    index.see_epoch(1)
    index.add(past("kept"), 1)
    index.add(past("temporary", durable=False), 1)
    index.add(past("late", durable=False, text="late"), 2)
    index.add(past("early", durable=False, text="early"))
    assert find(index, durable=False) == "temporary" and find(index) == "kept"
    assert not index.remembers("ann", "late") and not index.remembers("ann", "early")
    index.see_epoch(1)
    assert index.remembers("ann", "temporary")
    index.see_epoch(2)
    assert not index.remembers("ann", "temporary") and find(index, durable=False) == "kept"


def test_lookup_by_id():
    index = TurnIndex(NoTurns())
    root, child = past("root", text="a", num_tokens=10), past("child", "root", text="b", num_tokens=25)
    index.add(root)
    index.add(child)
    assert index.turn("ann", "child") is child and index.path(child) == [root, child]
    assert (index.num_tokens("ann", "child"), index.num_tokens("bob", "child")) == (25, None)
    index.forget("ann", "nothing")
    index.forget("ann", "root")
    with pytest.raises(UnknownTurnError, match="root"):
        index.path(child)


def test_the_size_of_a_turn_counts_tools_of_any_depth():
    """A schema of a tool may be nested deeper than Python's stack."""
    deep = {"a": "x"}
    for _ in range(5_000):
        deep = {"a": [deep]}
    size = past("a").num_bytes
    given = past("a", template_input=TemplateInput(({"type": "function", "function": deep},)))
    assert given.num_bytes > size + 5_000 * 200
