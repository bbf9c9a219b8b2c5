"""The SQLite store's content, reads and refusals, on a file and in memory."""

import contextlib
import dataclasses
import sqlite3
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve_jax.core.errors import (
    ConfigError,
    HistoryCorruptError,
    HistoryError,
    InvalidRequestError,
    UnknownConversationError,
)
from pensieve_jax.history import (
    CUT_FINISH_REASON,
    ConversationInfo,
    HistoryStore,
    SQLiteHistoryStore,
    TurnRecord,
    history_fingerprint,
)
from tests.interruption import Interruption

FINGERPRINT = "model:a tokenizer:b"


def turn(conversation_id="alice", index=0, prompt=(1, 2, 3), output=(4, 5), **fields):
    base = TurnRecord(conversation_id, index, tuple(prompt), tuple(output), 7, "stop", 1000.0 + index)
    return dataclasses.replace(base, **fields)


def said(kept):
    """Return a turn without the tree position that the store gave it."""
    return dataclasses.replace(kept, turn_id="", parent_id=None)


def test_turns_are_read_as_they_were_written(store: HistoryStore):
    turns = [
        turn(
            index=0,
            seed=2**64 - 1,
            messages=({"role": "user", "content": "h\u00e9\n"},),
            output_text="\u4e2d",
        ),
        turn(index=1, prompt=(2**31 - 1, 0), output=(), finish_reason="length", seed=0),
        turn("b\u00f6b", index=0, output_text=""),
    ]
    store.commit(turns[:1])
    store.commit(turns[1:])
    record = store.load("alice")
    assert tuple(map(said, record.turns)) == tuple(turns[:2])
    assert record.token_ids.dtype == np.int32
    assert record.token_ids.tolist() == [1, 2, 3, 4, 5, 2**31 - 1, 0]
    assert record.last_active_s == 1001.0
    assert said(store.load("b\u00f6b").turns[0]) == turns[2]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_seed_may_be_any_of_64_bits(store, seed):
    store.commit([turn(seed=seed)])
    assert store.load("alice").turns[0].seed == seed


def test_numpy_ids_are_stored_as_ints(store):
    store.commit([dataclasses.replace(turn(), prompt_token_ids=np.array([9, 8], np.int64))])
    assert store.load("alice").turns[0].prompt_token_ids == (9, 8)


def test_listing_is_most_recent_first_with_sizes(store):
    store.commit([turn("a", created_at_s=1.0), turn("b", created_at_s=3.0), turn("c", created_at_s=1.0)])
    store.commit([turn("a", index=1, prompt=(1,), output=(), created_at_s=2.0)])
    assert store.conversations() == [
        ConversationInfo("b", 5, 1, 3.0),
        ConversationInfo("a", 6, 2, 2.0),
        ConversationInfo("c", 5, 1, 1.0),
    ]


def test_info_equals_the_entry_of_the_listing(store):
    store.commit([turn("a"), turn("b", created_at_s=3.0)])
    assert [store.info(info.conversation_id) for info in store.conversations()] == store.conversations()
    with pytest.raises(UnknownConversationError):
        store.info("c")


@pytest.mark.parametrize("distance", range(1, 6))
def test_an_interrupt_at_any_line_stores_all_of_a_commit_or_nothing(distance):
    """A second one comes during the cleanup; the caller may keep the traceback."""
    number, num_rolled_back, was_kept = 0, 0, False
    whole = [ConversationInfo("a", 10, 2, 1001.0), ConversationInfo("b", 5, 1, 1000.0)]
    while True:
        number += 1
        with SQLiteHistoryStore(None, fingerprint=FINGERPRINT) as store:
            store.commit([turn("a")])
            before = store.conversations()
            interruption, kept = Interruption(number, number + distance), None
            try:
                with interruption:
                    store.commit([turn("a", index=1), turn("b")])
            except KeyboardInterrupt as error:
                kept = error
            after = store.conversations()
            assert after in ([whole] if was_kept else [before, whole])
            was_kept = after == whole  # from the first line after the commit on, every interrupt keeps it
            num_rolled_back += not was_kept
            store.commit([turn("c")])
            assert len(store.conversations()) == len(after) + 1
            assert all(store.load(info.conversation_id).turns for info in store.conversations())
        if kept is None:
            break
    assert number > 20 and num_rolled_back > 20 and len(after) == 2


def test_two_turns_of_one_conversation_in_one_commit(store):
    store.commit([turn(index=0), turn(index=1)])
    assert len(store.load("alice").turns) == 2


def test_an_empty_commit_is_allowed(store):
    store.commit([])
    assert store.conversations() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conversation_id", ""),
        ("conversation_id", "\ud800"),
        ("conversation_id", 3),
        ("turn_index", -1),
        ("turn_index", 1),
        ("turn_index", True),
        ("prompt_token_ids", (1, -1)),
        ("prompt_token_ids", (1, 2**31)),
        ("prompt_token_ids", (1, 2**70)),
        ("prompt_token_ids", (1.0,)),
        ("prompt_token_ids", ("1",)),
        ("output_token_ids", (1, None)),
        ("output_token_ids", (True,)),
        ("output_token_ids", ((1,), (2,))),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.5),
        ("created_at_s", float("nan")),
        ("output_text", "\ud800"),
        ("finish_reason", None),
        ("messages", ({"role": "user", "content": object()},)),
        ("messages", ({"role": "user", "content": float("nan")},)),
        ("messages", (3,)),
    ],
)
def test_an_invalid_value_is_named_and_nothing_of_the_commit_is_stored(store, field, value):
    bad = dataclasses.replace(turn("new", 0), **{field: value})
    with pytest.raises(InvalidRequestError, match=rf"turns\[1\]\.{field}"):
        store.commit([turn("good"), bad])
    assert store.conversations() == []
    store.commit([turn("good")])


def test_a_second_turn_of_the_same_index_is_refused(store):
    store.commit([turn()])
    with pytest.raises(InvalidRequestError, match="must be 1, the next turn of 'alice'"):
        store.commit([turn("bob"), turn()])
    assert [info.conversation_id for info in store.conversations()] == ["alice"]


def test_unknown_conversations_are_refused(store):
    for call in (store.load, store.delete, lambda name: store.truncate(name, 0)):
        with pytest.raises(UnknownConversationError, match="'nobody'"):
            call("nobody")


def test_delete_removes_only_that_conversation(store):
    store.commit([turn("a"), turn("b")])
    store.delete("a")
    assert [info.conversation_id for info in store.conversations()] == ["b"]
    store.commit([turn("a", prompt=(9,))])
    assert store.load("a").token_ids.tolist() == [9, 4, 5]


def test_truncate_at_a_turn_boundary_keeps_the_turn_whole(store):
    store.commit([turn(index=0, output_text="x"), turn(index=1)])
    before = store.load("alice")
    store.truncate("alice", 10)
    assert store.load("alice").turns == before.turns
    store.truncate("alice", 5)
    assert store.load("alice").turns == before.turns[:1]
    assert store.load("alice").last_active_s == 1001.0


def test_truncate_within_a_reply_keeps_prompt_and_messages(store):
    message = {"role": "user", "content": "hi"}
    store.commit([turn(messages=(message,), output_text="xy")])
    store.truncate("alice", 4)
    (kept,) = store.load("alice").turns
    assert (kept.prompt_token_ids, kept.output_token_ids) == ((1, 2, 3), (4,))
    assert (kept.messages, kept.output_text, kept.finish_reason) == ((message,), None, CUT_FINISH_REASON)


def test_truncate_within_a_prompt_drops_its_messages(store):
    store.commit([turn(messages=({"role": "user", "content": "hi"},), output_text="xy")])
    store.truncate("alice", 2)
    (kept,) = store.load("alice").turns
    assert (kept.prompt_token_ids, kept.output_token_ids, kept.messages) == ((1, 2), (), None)


def test_truncate_at_the_end_of_a_prompt_keeps_its_messages(store):
    """The messages contain the prompt, and all of it is left."""
    message = {"role": "user", "content": "hi"}
    store.commit([turn(messages=(message,), output_text="xy")])
    store.truncate("alice", 3)
    (kept,) = store.load("alice").turns
    assert (kept.prompt_token_ids, kept.output_token_ids, kept.messages) == ((1, 2, 3), (), (message,))


def test_truncate_to_nothing_leaves_an_empty_conversation_that_can_be_continued(store):
    store.commit([turn()])
    store.truncate("alice", 0)
    assert store.load("alice").turns == ()
    assert store.conversations() == [ConversationInfo("alice", 0, 0, 1000.0)]
    store.commit([turn(prompt=(8,), output=())])
    assert store.load("alice").token_ids.tolist() == [8]


@pytest.mark.parametrize("num_tokens", [-1, 6, 2.0, True, None])
def test_truncate_refuses_more_tokens_than_there_are(store, num_tokens):
    store.commit([turn()])
    with pytest.raises(InvalidRequestError, match="num_tokens"):
        store.truncate("alice", num_tokens)
    assert len(store.load("alice").token_ids) == 5


ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(ids, ids), min_size=1, max_size=5), data=st.data())
def test_truncate_is_a_prefix(turns, data):
    tokens = [token for prompt, output in turns for token in (*prompt, *output)]
    with SQLiteHistoryStore(None, fingerprint=FINGERPRINT) as store:
        store.commit([turn(index=i, prompt=p, output=o) for i, (p, o) in enumerate(turns)])
        for _ in range(3):
            num_tokens = data.draw(st.integers(0, len(tokens)))
            tokens = tokens[:num_tokens]
            store.truncate("alice", num_tokens)
            record = store.load("alice")
            assert record.token_ids.tolist() == tokens
            assert store.conversations()[0].num_turns == len(record.turns)
            rejoined = [t for kept in record.turns for t in kept.prompt_token_ids + kept.output_token_ids]
            assert rejoined == tokens


def test_a_reopened_file_has_everything(tmp_path):
    path = tmp_path / "chats.sqlite"
    for synchronous, index in (("normal", 0), ("full", 1)):
        with SQLiteHistoryStore(path, fingerprint=FINGERPRINT, synchronous=synchronous) as store:
            store.commit([turn(index=index)])
    assert not path.with_name("chats.sqlite-wal").exists()
    with SQLiteHistoryStore(str(path), fingerprint=FINGERPRINT) as store:
        assert len(store.load("alice").turns) == 2


@pytest.mark.parametrize(("synchronous", "level"), [("normal", 1), ("full", 2)])
def test_durability_follows_the_option(tmp_path, synchronous, level):
    with SQLiteHistoryStore(tmp_path / "h", fingerprint=FINGERPRINT, synchronous=synchronous) as store:
        assert store._connection.execute("PRAGMA synchronous").fetchone() == (level,)
        assert store._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_an_interrupt_in_the_middle_of_a_commit_leaves_no_trace(store, monkeypatch):
    from pensieve_jax.history import table_store

    append = table_store.append

    def interrupted(connection, *rest):
        append(connection, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(table_store, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.commit([turn("a"), turn("b")])
    monkeypatch.undo()
    assert store.conversations() == []
    store.commit([turn("a")])


def test_a_full_disk_is_an_error_and_stores_nothing(tmp_path):
    with SQLiteHistoryStore(tmp_path / "h", fingerprint=FINGERPRINT) as store:
        store.commit([turn("a")])
        (num_pages,) = store._connection.execute("PRAGMA page_count").fetchone()
        store._connection.execute(f"PRAGMA max_page_count = {num_pages}")
        with pytest.raises(HistoryError, match="nothing of this call was stored"):
            store.commit([turn("b"), turn("c", prompt=range(100_000))])
        assert [info.conversation_id for info in store.conversations()] == ["a"]


def test_damaged_ids_are_detected_and_affect_only_their_conversation(store):
    store.commit([turn("a"), turn("b")])
    head = "(SELECT head_turn FROM conversations WHERE conversation_id = 'a')"
    store._connection.execute(
        f"UPDATE turns SET output_ids = ? WHERE turn_id = {head}", (b"\4\0\0\0\xff\0\0\0",)
    )
    with pytest.raises(HistoryCorruptError, match="Turn 0 of conversation 'a'"):
        store.load("a")
    with pytest.raises(HistoryCorruptError):
        store.truncate("a", 4)
    assert len(store.load("b").turns) == 1


def test_a_missing_turn_is_detected(store):
    store.commit([turn(index=0), turn(index=1)])
    store._connection.execute("DELETE FROM turns WHERE turn_index = 0")
    with pytest.raises(HistoryCorruptError, match="should hold 2 turns of 10 tokens, but 1 turns of 5"):
        store.load("alice")


def test_a_closed_store_refuses_calls_and_closes_twice(tmp_path):
    store = SQLiteHistoryStore(tmp_path / "h", fingerprint=FINGERPRINT)
    store.close()
    store.close()
    for call in (store.conversations, lambda: store.load("a"), lambda: store.commit([turn()])):
        with pytest.raises(HistoryError, match="closed"):
            call()


def test_readers_in_other_threads_see_whole_commits(tmp_path):
    failures: list[str] = []
    done = threading.Event()
    with SQLiteHistoryStore(tmp_path / "h", fingerprint=FINGERPRINT) as store:
        store.commit([turn("a"), turn("b")])

        def read():
            while not done.is_set():
                sizes = {info.num_turns for info in store.conversations()}
                if len(sizes) != 1 or len(store.load("a").turns) < max(sizes):
                    failures.append(f"saw {sizes}")

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for index in range(1, 60):
            store.commit([turn("a", index=index), turn("b", index=index)])
        done.set()
        for reader in readers:
            reader.join()
    assert failures == []


@pytest.mark.parametrize(
    "options", [{"path": ""}, {"path": ":memory:"}, {"path": None, "synchronous": "off"}]
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError):
        SQLiteHistoryStore(**options, fingerprint=FINGERPRINT)


def test_invalid_paths_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "such" / "dir.sqlite"):
        with pytest.raises(HistoryError, match="cannot be"):
            SQLiteHistoryStore(path, fingerprint=FINGERPRINT)


def test_the_file_holds_ids_as_little_endian_int32(tmp_path):
    path = tmp_path / "h"
    with SQLiteHistoryStore(path, fingerprint=FINGERPRINT) as store:
        store.commit([turn(prompt=(1, 258))])
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT prompt_ids FROM turns").fetchone() == (b"\1\0\0\0\2\1\0\0",)


def test_fingerprint_is_stable_and_distinguishes_models():
    one = history_fingerprint({"layers": 2, "name": "tiny"}, "t1")
    assert one == history_fingerprint({"name": "tiny", "layers": 2}, "t1")
    assert one != history_fingerprint({"name": "tiny", "layers": 3}, "t1")
    assert one != history_fingerprint({"name": "tiny", "layers": 2}, "t2")
    assert history_fingerprint({}, None).endswith("tokenizer:none")
