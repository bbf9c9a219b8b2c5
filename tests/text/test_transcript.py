"""How many messages of a new turn a conversation already has, position by position."""

from __future__ import annotations

import pytest

from pensieve_jax.text.chat import EarlierTurn
from pensieve_jax.text.transcript import num_messages_held


def message(role, content):
    return {"role": role, "content": content}


def user(content):
    return message("user", content)


def assistant(content):
    return message("assistant", content)


def past(*messages, reply):
    return EarlierTurn(messages, reply, (1, 2), "stop")


SYSTEM = message("system", "be brief")
FIRST = past(SYSTEM, user("a"), reply="A")
SECOND = past(user("b"), reply="B")
NEW = user("new")


@pytest.mark.parametrize(
    ("earlier", "messages", "num_held"),
    [
        ([], [user("a"), assistant("A"), NEW], 0),
        ([FIRST], [NEW], 0),
        ([FIRST], [SYSTEM, user("a"), assistant("A"), NEW], 3),
        ([FIRST], [SYSTEM, user("a"), assistant("edited"), NEW], 3),
        ([FIRST], [user("a"), assistant("A"), NEW], 2),
        ([FIRST], [message("system", "other"), user("a"), assistant("A"), NEW], 3),
        ([FIRST], [message("developer", "other"), SYSTEM, user("a"), assistant("A"), NEW], 4),
        ([FIRST], [message("tool", "other"), user("a"), assistant("A"), NEW], 0),
        ([FIRST], [SYSTEM, user("a"), assistant("A")], 3),
        ([FIRST], [SYSTEM, user("a")], 0),
        ([FIRST], [SYSTEM, user("a"), NEW], 0),
        ([FIRST], [user("A"), assistant("A"), NEW], 0),
        ([FIRST, SECOND], [SYSTEM, user("a"), assistant("A"), user("b"), assistant("B"), NEW], 5),
        ([FIRST, SECOND], [SYSTEM, user("a"), assistant("A"), user("c"), assistant("B"), NEW], 3),
        ([FIRST, SECOND], [user("b"), assistant(" B\n"), NEW], 2),
        ([FIRST, SECOND], [user("b"), assistant("not B"), NEW], 0),
        (
            [FIRST, SECOND, past(user("c"), reply="C")],
            [user("b"), assistant("B"), user("c"), assistant("x")],
            4,
        ),
        ([EarlierTurn(None, "A", (1,), "stop")], [user("a"), assistant("A"), NEW], 0),
        ([past(user("a"), reply=None)], [user("a"), assistant("A"), NEW], 2),
        ([FIRST, EarlierTurn(None, "B", (1,), "stop")], [user("a"), assistant("A"), assistant("B"), NEW], 2),
        ([FIRST, EarlierTurn(None, "B", (1,), "stop")], [assistant("B"), NEW], 0),
    ],
)
def test_messages_that_a_conversation_already_has_are_counted(earlier, messages, num_held):
    assert num_messages_held(earlier, messages) == num_held


def test_of_several_matches_the_longest_counts():
    """The first turn itself contains an exchange that ends like it."""
    first = past(user("a"), assistant("A"), user("a"), reply="A")
    messages = [user("a"), assistant("A"), user("a"), assistant("A"), NEW]
    assert num_messages_held([first], messages) == 4


def test_in_a_window_the_first_turn_that_matches_counts():
    turns = [past(user("x"), reply="X"), past(user("b"), reply="B"), past(user("c"), reply="C")]
    messages = [user("b"), assistant("B"), user("c"), assistant("C"), NEW]
    assert num_messages_held(turns, messages) == 4
    assert num_messages_held([turns[0], turns[1], turns[1]], [user("b"), assistant("B"), NEW]) == 2
