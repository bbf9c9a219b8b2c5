"""Trees of responses, as a list of conversations shows them."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from pensieve_jax.core.outputs import Usage
from pensieve_jax.core.turn_node import new_turn_id, root_of
from pensieve_jax.history import SQLiteHistoryStore, TurnRecord, open_store, trees
from pensieve_jax.history.reader import HistoryReader
from pensieve_jax.history.server_tables.changes import DeleteResponse, ResponseDraft
from tests.deadlines import TIMEOUT_S

USAGE = Usage(3, 0, 1, 2, 3, 2)


def respond(store, at_s, text, parent=None, owner="ann", instructions=(), request=None):
    turn_id = new_turn_id(parent)
    items = [
        *instructions,
        {"id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": text}]},
    ]
    draft = ResponseDraft(
        response_id=f"resp_{turn_id}",
        owner=owner,
        request=json.dumps(request or {}),
        input_items=json.dumps(items),
        output_item_id="msg_2",
        created_at_s=at_s,
        expires_at_s=1e9,
    )
    turn = TurnRecord(
        *("", 0 if parent is None else 1, (1, 2), (3,), 7, "stop", at_s + 0.5),
        turn_id=turn_id,
        parent_id=parent,
        owner=owner,
        output_text=f"re: {text}",
        usage=USAGE,
    )
    assert store.commit([turn], [draft]) == {}
    return turn_id


def test_the_list_of_trees_reads_an_index_and_no_response(tmp_path):
    """This also holds for a history from before this index existed."""
    path = tmp_path / "chats.sqlite"
    for _ in range(2):
        with SQLiteHistoryStore(path, fingerprint="f") as store:
            queries: list[str] = []
            store._connection.set_trace_callback(queries.append)
            trees.trees(store._connection, "ann", 5)
            store._connection.set_trace_callback(None)
            steps = [row[3] for row in store._connection.execute(f"EXPLAIN QUERY PLAN {queries[0]}")]
            reads = [step for step in steps if step.startswith(("SCAN", "SEARCH"))]
            assert "COVERING INDEX responses_by_tree" in reads[0]
            assert [step.partition(" (")[0] for step in reads[1:]] == [
                "SCAN newest",
                "SEARCH conversations USING INDEX sqlite_autoindex_conversations_1",
            ]
            store._connection.execute("DROP INDEX responses_by_tree")


def test_trees_are_listed_with_their_first_text_and_read_turn_by_turn(location):
    with open_store(location, fingerprint="f") as store, HistoryReader(location, fingerprint="f") as reader:
        first = respond(
            store, 1.0, "hi", instructions=[{"id": "msg_0", "role": "system", "content": "be brief"}]
        )
        other = respond(store, 2.0, "something else")
        again = respond(store, 3.0, "and then?", first)
        fork = respond(store, 4.0, "or this?", first)
        respond(store, 5.0, "bob's", owner="bob")
        listed = reader.trees("ann")
        assert [(row.root, row.num_turns, row.first_text, row.last_active_s) for row in listed] == [
            (root_of(first), 3, "hi", 4.5),
            (root_of(other), 1, "something else", 2.5),
        ]
        assert len(reader.trees("ann", 1)) == 1
        told = reader.tree("ann", root_of(first))
        assert [(turn.id, turn.parent, turn.input, turn.output) for turn in told] == [
            (f"resp_{first}", None, "hi", "re: hi"),
            (f"resp_{again}", f"resp_{first}", "and then?", "re: and then?"),
            (f"resp_{fork}", f"resp_{first}", "or this?", "re: or this?"),
        ]
        assert [turn.id for turn in reader.tree("ann", root_of(first), 2)] == [
            *(f"resp_{again}", f"resp_{fork}"),
        ]
        assert {(turn.status, turn.usage) for turn in told} == {("completed", USAGE)}
        assert reader.tree("bob", root_of(first)) == reader.tree("ann", "%") == reader.tree("ann", "") == []


def test_a_turn_returns_its_own_instructions(location):
    with open_store(location, fingerprint="f") as store, HistoryReader(location, fingerprint="f") as reader:
        first = respond(store, 1.0, "hi", request={"instructions": "be brief"})
        respond(store, 2.0, "and then?", first, request={"instructions": None})
        respond(store, 3.0, "or this?", first, request={"instructions": ""})
        told = [turn.instructions for turn in reader.tree("ann", root_of(first))]
        assert told == ["be brief", None, None]


def test_readers_do_not_wait_for_each_other(location):
    """The event loop reads while threads run long work."""
    inside, goes_on = threading.Event(), threading.Event()

    def long_work(connection):
        inside.set()
        return goes_on.wait(TIMEOUT_S)

    with open_store(location, fingerprint="f"), HistoryReader(location, fingerprint="f") as reader:
        with ThreadPoolExecutor() as threads:
            working = threads.submit(reader._run, long_work)
            assert inside.wait(TIMEOUT_S)
            assert not reader.has_turn("ann", new_turn_id(None))
            goes_on.set()
            assert working.result(), "the other one was waited for"
        assert not reader.has_turn("ann", new_turn_id(None))


def test_long_texts_make_neither_a_list_nor_a_tree_long(location, monkeypatch):
    with open_store(location, fingerprint="f") as store, HistoryReader(location, fingerprint="f") as reader:
        first = respond(store, 1.0, "a" * 5000)
        second = respond(store, 2.0, "b" * 5000, first)
        third = respond(store, 3.0, "c" * 5000, first)
        (listed,) = reader.trees("ann")
        assert listed.num_turns == 3 and listed.first_text == "a" * 200
        root = root_of(first)
        assert [turn.input[0] for turn in reader.tree("ann", root)] == ["a", "b", "c"]
        monkeypatch.setattr(trees, "MAX_TREE_CHARACTERS", 25_000)
        told = reader.tree("ann", root)
        assert [turn.id for turn in told] == [f"resp_{second}", f"resp_{third}"]
        assert {turn.parent for turn in told} == {f"resp_{first}"}, "also where it is not told itself"
        monkeypatch.setattr(trees, "MAX_TREE_CHARACTERS", 1)
        assert [turn.id for turn in reader.tree("ann", root)] == [f"resp_{third}"]


def test_instructions_count_once_and_by_characters(location, monkeypatch):
    with open_store(location, fingerprint="f") as store, HistoryReader(location, fingerprint="f") as reader:
        words = "\u8bf4" * 1000  # six characters each as stored
        request = {"instructions": words}
        turns = [first := respond(store, 1.0, words, request=request)]
        turns += [respond(store, at_s, words, first, request=request) for at_s in range(2, 11)]
        root = root_of(first)
        monkeypatch.setattr(trees, "MAX_TREE_CHARACTERS", 22_000)  # ten of a request and its reply, and one
        told = reader.tree("ann", root)
        assert [turn.id for turn in told] == [f"resp_{turn}" for turn in turns]
        assert {turn.instructions for turn in told} == {words}
        monkeypatch.setattr(trees, "MAX_READ_CHARACTERS", 100_000)  # about 13,100 for each
        assert len(reader.tree("ann", root)) == 7


def test_a_turn_under_other_instructions_returns_the_response_that_it_continues(location):
    """Instructions come first, so its tokens begin a tree, or continue an earlier turn with the same ones."""
    with open_store(location, fingerprint="f") as store, HistoryReader(location, fingerprint="f") as reader:
        first = respond(store, 1.0, "hi", request={"instructions": "be brief"})
        asked = {"instructions": "be kind", "previous_response_id": f"resp_{first}"}
        second = respond(store, 2.0, "and then?", request=asked)
        asked = {"instructions": "be brief", "previous_response_id": f"resp_{second}"}
        third = respond(store, 3.0, "and?", first, request=asked)
        (told,) = reader.tree("ann", root_of(second))
        assert told.parent == f"resp_{first}"
        assert [(turn.id, turn.parent) for turn in reader.tree("ann", root_of(first))] == [
            (f"resp_{first}", None),
            (f"resp_{third}", f"resp_{second}"),
        ]


def test_a_turn_returns_its_parent_even_if_that_response_was_deleted(location):
    with open_store(location, fingerprint="f") as store, HistoryReader(location, fingerprint="f") as reader:
        first = respond(store, 1.0, "hi")
        second = respond(store, 2.0, "and then?", first)
        store.apply(DeleteResponse(owner="ann", response_id=f"resp_{first}"))
        (told,) = reader.tree("ann", root_of(first))
        assert (told.id, told.parent) == (f"resp_{second}", f"resp_{first}")
