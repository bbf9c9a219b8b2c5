"""Trees of turns: placing, reading a path, forks of named conversations, and what is removed when."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.core.errors import (
    ConversationChangedError,
    HistoryCorruptError,
    InvalidRequestError,
    UnknownConversationError,
    UnknownTurnError,
)
from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.turn_node import new_turn_id, root_of
from pensieve_jax.history import CUT_FINISH_REASON, SQLiteHistoryStore, TurnRecord

FINGERPRINT = "model:a tokenizer:b"


def named(index=0, conversation_id="alice", prompt=(1, 2, 3), output=(4, 5), **fields):
    base = TurnRecord(conversation_id, index, tuple(prompt), tuple(output), 7, "stop", 1000.0 + index)
    return dataclasses.replace(base, **fields)


def placed(parent=None, owner="ann", **fields):
    """Return a turn behind another one."""
    parent_id, index = (None, 0) if parent is None else (parent.turn_id, parent.turn_index + 1)
    place = {"turn_id": new_turn_id(parent_id), "parent_id": parent_id, "owner": owner}
    return named(index, "", **{**place, **fields})


def num_turns(store):
    return store._connection.execute("SELECT count(*) FROM turns").fetchone()[0]


def test_a_placed_turn_is_read_as_it_was_written(store):
    usage = Usage(3, 0, 1, 2, 3, 2, num_suspensions=1)
    first = placed(
        messages=({"role": "user", "content": "hi"},), output_text="ho", chain=b"\1\2", usage=usage
    )
    second = placed(first, prompt=(9,), output=())
    assert store.commit([first]) == {} and store.commit([second]) == {}
    record = store.load_turn("ann", second.turn_id)
    assert record.turns == (first, second)
    assert record.token_ids.tolist() == [1, 2, 3, 4, 5, 9]
    assert (record.conversation_id, record.last_active_s) == (second.turn_id, 1001.0)
    assert store.load_turn("ann", first.turn_id).turns == (first,)
    assert store.conversations() == []


def test_branches_share_their_common_path(store):
    root = placed()
    left, right = placed(root, prompt=(7,)), placed(root, prompt=(8,))
    store.commit([root])
    store.commit([left, right])
    assert num_turns(store) == 3
    assert store.load_turn("ann", left.turn_id).turns == (root, left)
    assert store.load_turn("ann", right.turn_id).turns == (root, right)


def test_a_parent_may_be_in_the_same_commit(store):
    root = placed()
    assert store.commit([root, placed(root)]) == {}


def test_missing_turns_and_another_owners_are_unknown(store):
    root = placed()
    store.commit([root])
    for owner, turn_id in (("bob", root.turn_id), ("", root.turn_id), ("ann", new_turn_id())):
        with pytest.raises(UnknownTurnError, match=turn_id):
            store.load_turn(owner, turn_id)


def test_only_the_turn_whose_parent_is_gone_is_refused(store):
    root, missing = placed(), placed()
    strangers = placed(root, owner="bob")
    store.commit([root])
    refused = store.commit([named(), placed(missing), placed(root), strangers])
    assert sorted(refused) == [1, 3]
    assert all(isinstance(error, UnknownTurnError) for error in refused.values())
    assert num_turns(store) == 3
    assert store.info("alice").num_turns == 1


def test_only_a_turn_that_continues_an_older_head_is_refused(store):
    """A turn of a named conversation that has an id names the turn that it continues."""
    store.commit([named()])
    head = store.head("alice")

    def behind(parent_id, index=1):
        return named(index, turn_id=new_turn_id(parent_id), parent_id=parent_id)

    first, second = behind(head), behind(head)
    assert store.commit([first]) == {} and store.head("alice") == first.turn_id
    late = behind(first.turn_id)  # of a number that is taken
    anew = named(0, turn_id=new_turn_id())
    gone = named(3, "nobody", turn_id=new_turn_id(), parent_id=new_turn_id())
    other = placed()
    refused = store.commit([second, late, anew, gone, other], [])
    assert list(refused) == [0, 1, 2, 3]
    assert all(isinstance(error, ConversationChangedError) for error in refused.values())
    assert [turn.turn_id for turn in store.load("alice").turns] == [head, first.turn_id]
    assert num_turns(store) == 3 and store.info("alice").num_tokens == 10
    cut = store.truncate("alice", 0)
    assert cut == (0, None, first.turn_id, 0) and store.head("alice") is None
    assert list(store.commit([behind(first.turn_id, 2)])) == [0]
    assert store.commit([anew]) == {} and store.load("alice").turns == (anew,)


def test_a_turn_that_exists_already_is_refused_and_stays(store):
    root = placed()
    store.commit([root])
    refused = store.commit([dataclasses.replace(root, prompt_token_ids=(9,)), placed()])
    assert list(refused) == [0] and isinstance(refused[0], InvalidRequestError)
    assert store.load_turn("ann", root.turn_id).turns == (root,)


@pytest.mark.parametrize(
    ("field", "value"),
    [("turn_id", "x"), ("turn_id", "A" * 32), ("turn_id", 3), ("owner", "\ud800"), ("owner", None)],
)
def test_an_invalid_position_is_named_and_nothing_of_the_commit_is_stored(store, field, value):
    with pytest.raises(InvalidRequestError, match=rf"turns\[1\]\.{field}"):
        store.commit([named(), dataclasses.replace(placed(), **{field: value})])
    assert store.conversations() == []


def test_a_number_that_does_not_follow_the_parents_is_refused(store):
    root = placed()
    store.commit([root])
    (refused,) = store.commit([placed(root, turn_index=3)]).values()
    assert isinstance(refused, InvalidRequestError) and "turn_index" in str(refused)


def test_named_conversations_are_paths_too(store):
    store.commit([named(0), named(1, prompt=(6,))])
    first, second = store.load("alice").turns
    assert (first.parent_id, second.parent_id) == (None, first.turn_id)
    assert root_of(first.turn_id) == root_of(second.turn_id)
    assert store.load_turn("", second.turn_id).token_ids.tolist() == [1, 2, 3, 4, 5, 6, 4, 5]


def test_a_truncated_conversation_keeps_its_uncut_turns_unchanged(store):
    store.commit([named(0), named(1), named(2)])
    before = store.load("alice").turns
    assert store.truncate("alice", 7).num_turns == 2
    first, second = store.load("alice").turns
    assert first == before[0]
    assert second.turn_id != before[1].turn_id and second.parent_id == first.turn_id
    assert (second.prompt_token_ids, second.output_token_ids) == ((1, 2), ())
    assert num_turns(store) == 2  # the rest was removed, including the turn that was cut
    with pytest.raises(UnknownTurnError):
        store.load_turn("", before[1].turn_id)


def test_a_fork_shares_all_turns_and_continues_separately(store):
    store.commit([named(0), named(1)])
    assert store.fork("alice", "bob").num_turns == 2
    assert num_turns(store) == 2
    store.commit([named(2, prompt=(8,)), named(2, "bob", prompt=(9,))])
    alice, bob = store.load("alice"), store.load("bob")
    assert alice.token_ids.tolist() == [1, 2, 3, 4, 5] * 2 + [8, 4, 5]
    assert bob.token_ids.tolist() == [1, 2, 3, 4, 5] * 2 + [9, 4, 5]
    assert [turn.turn_id for turn in alice.turns[:2]] == [turn.turn_id for turn in bob.turns[:2]]
    assert {turn.conversation_id for turn in bob.turns} == {"bob"}
    assert store.info("bob").last_active_s == 1002.0
    store.fork("alice", "carol", at_s=2000.5)
    assert [info.conversation_id for info in store.conversations()] == ["carol", "alice", "bob"]
    assert store.info("carol").last_active_s == 2000.5


@pytest.mark.parametrize(
    ("num_tokens", "num_turns_then", "num_rows"), [(0, 0, 2), (3, 1, 3), (5, 1, 2), (6, 2, 3)]
)
def test_a_fork_of_a_part_copies_at_most_a_cut_turn(store, num_tokens, num_turns_then, num_rows):
    store.commit([named(0), named(1)])
    assert store.fork("alice", "bob", num_tokens).num_turns == num_turns_then
    assert store.load("bob").token_ids.tolist() == ([1, 2, 3, 4, 5] * 2)[:num_tokens]
    assert len(store.load("alice").token_ids) == 10
    assert num_turns(store) == num_rows
    last = store.load("bob").turns[-1:]
    assert all((turn.finish_reason == CUT_FINISH_REASON) == (num_tokens % 5 != 0) for turn in last)


def test_invalid_forks_are_refused(store):
    store.commit([named(), named(0, "bob")])
    with pytest.raises(UnknownConversationError, match="nobody"):
        store.fork("nobody", "carol")
    for name in ("bob", "alice", "", "\ud800", None):
        with pytest.raises(InvalidRequestError, match="new_conversation_id"):
            store.fork("alice", name)
    for num_tokens in (-1, 6, 2.0, True):
        with pytest.raises(InvalidRequestError, match="num_tokens"):
            store.fork("alice", "carol", num_tokens)
    assert len(store.conversations()) == 2


def test_a_fork_keeps_its_turns_when_its_source_is_deleted(store):
    store.commit([named(0), named(1), named(2)])
    store.fork("alice", "bob", 5)
    store.delete("alice")
    assert num_turns(store) == 1
    assert store.load("bob").token_ids.tolist() == [1, 2, 3, 4, 5]
    store.delete("bob")
    assert num_turns(store) == 0


def test_a_path_with_a_missing_turn_is_reported_and_a_loop_ends(store):
    first = placed()
    second = placed(first)
    third = placed(second)
    store.commit([first, second, third])
    store._connection.execute("DELETE FROM turns WHERE turn_id = ?", (second.turn_id,))
    with pytest.raises(HistoryCorruptError, match="3 turns of 15 tokens, but 1 turns of 5"):
        store.load_turn("ann", third.turn_id)
    store._connection.execute("UPDATE turns SET parent_id = turn_id")
    with pytest.raises(HistoryCorruptError):
        store.load_turn("ann", third.turn_id)
    store._connection.execute("UPDATE turns SET output_ids = ?", (bytes(4),))
    with pytest.raises(HistoryCorruptError, match=f"Turn '{first.turn_id}' is damaged"):
        store.load_turn("ann", first.turn_id)


operations = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "replace", "fork", "truncate", "truncate_turns", "delete"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.floats(0, 1),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(operations=operations)
def test_conversations_equal_plain_lists_and_nothing_else_is_stored(operations):
    """Compares with lists of tokens; afterwards every turn in the table is on the path to a head.

    A conversation is a list of its turns, each with its own tokens and all tokens at its end.
    """
    said: dict[str, list[tuple[list[int], list[int]]]] = {}
    with SQLiteHistoryStore(None, fingerprint=FINGERPRINT) as store:
        for step, (what, one, other, part) in enumerate(operations):
            name, new = f"c{one}", f"c{other}"
            before = said[name][-1][1] if said.get(name) else []
            num_tokens = int(part * len(before))
            if what in ("commit", "replace"):
                turns = said.setdefault(name, [])
                keep = num_tokens if what == "replace" and num_tokens < len(before) else None
                store.commit([named(len(turns), name, prompt=(step,), output=(step, one), keep=keep)])
                turns.append(([step, step, one], [*before[:keep], step, step, one]))
            elif name not in said or (what == "fork" and new in said):
                continue
            elif what == "fork":
                store.fork(name, new, num_tokens)
                said[new] = beginning(said[name], num_tokens)
            elif what == "truncate":
                store.truncate(name, num_tokens)
                said[name] = beginning(said[name], num_tokens)
            elif what == "truncate_turns":
                del said[name][other:]
                cut = store.truncate_turns(name, len(said[name]))
                assert cut.num_tokens == (len(said[name][-1][1]) if said[name] else 0)
            else:
                store.delete(name)
                del said[name]
        needed = set()
        for name, turns in said.items():
            record = store.load(name)
            own = [list(turn.prompt_token_ids + turn.output_token_ids) for turn in record.turns]
            assert own == [own for own, _ in turns]
            assert record.token_ids.tolist() == (turns[-1][1] if turns else [])
            assert store.info(name).num_tokens == len(record.token_ids)
            needed.update(turn.turn_id for turn in record.turns)
        assert {info.conversation_id for info in store.conversations()} == said.keys()
        rows = store._connection.execute("SELECT turn_id FROM turns").fetchall()
        assert {turn_id for (turn_id,) in rows} == needed


def beginning(turns, num_tokens):
    """Return the first tokens, grouped by their turns: the last that has the final one is cut behind it."""
    begun = [i for i, (own, context) in enumerate(turns) if len(context) - len(own) < num_tokens]
    if not begun:
        return []
    own, context = turns[begun[-1]]
    num_own = num_tokens - (len(context) - len(own))
    return [*turns[: begun[-1]], (own[:num_own], context[:num_tokens])]


# --- turns that replace tokens before them


def test_a_turn_that_replaces_tokens_is_read_as_it_was_written(store):
    first, last = placed(), named(1, prompt=(8, 9), keep=2)
    second = placed(first, prompt=(6, 7), keep=1)
    third = placed(second, prompt=(9,))
    assert store.commit([first, second, third, named(), last]) == {}
    record = store.load_turn("ann", third.turn_id)
    assert record.turns == (first, second, third)
    assert record.token_ids.tolist() == [1, 6, 7, 4, 5, 9, 4, 5]
    assert store.load_turn("ann", first.turn_id).token_ids.tolist() == [1, 2, 3, 4, 5]
    assert store.load("alice").token_ids.tolist() == [1, 2, 8, 9, 4, 5]
    assert store.info("alice").num_tokens == 6 and store.info("alice").num_turns == 2


@pytest.mark.parametrize("keep", [-1, 5, 6, 2.0, True, "2"])
def test_a_turn_keeps_a_part_of_the_tokens_before_it(store, keep):
    root = placed()
    store.commit([root])
    try:
        (refused,) = store.commit([placed(root, keep=keep)]).values()
    except InvalidRequestError as error:
        refused = error
    assert isinstance(refused, InvalidRequestError) and "keep" in str(refused)
    assert num_turns(store) == 1


def test_a_first_turn_has_nothing_to_keep(store):
    (refused,) = store.commit([placed(keep=0)]).values()
    assert "keep is 0" in str(refused)
    with pytest.raises(InvalidRequestError, match="keep is 0"):
        store.commit([named(keep=0)])
    assert store.conversations() == [] and not num_turns(store)


def test_a_changed_number_of_kept_tokens_is_detected(store):
    first = placed()
    second = placed(first, keep=3)
    store.commit([first, second])
    store._connection.execute("UPDATE turns SET num_tokens = num_tokens - 1 WHERE turn_index = 1")
    with pytest.raises(HistoryCorruptError, match=f"Turn '{second.turn_id}' is damaged"):
        store.load_turn("ann", second.turn_id)


@pytest.mark.parametrize(
    ("num_kept", "turns", "tokens"), [(2, 2, [1, 9, 4, 5]), (1, 1, [1, 2, 3, 4, 5]), (0, 0, [])]
)
def test_turns_that_later_ones_have_replaced_come_back(store, num_kept, turns, tokens):
    store.commit([named(0), named(1, prompt=(9,), keep=1), named(2, prompt=(8,), keep=2)])
    assert store.load("alice").token_ids.tolist() == [1, 9, 8, 4, 5]
    cut = store.truncate_turns("alice", num_kept)
    assert (cut.num_turns, cut.num_tokens) == (turns, len(tokens))
    assert store.load("alice").token_ids.tolist() == tokens and num_turns(store) == turns


@pytest.mark.parametrize("number", [-1, 2, 1.0, True, None])
def test_only_turns_that_exist_can_be_kept(store, number):
    store.commit([named(0)])
    with pytest.raises(InvalidRequestError, match="num_turns"):
        store.truncate_turns("alice", number)
    with pytest.raises(UnknownConversationError):
        store.truncate_turns("nobody", 0)
