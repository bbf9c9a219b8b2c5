"""A history of the first version becomes one of this version, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from pensieve_jax.core.errors import HistoryCorruptError, HistoryError, HistoryMismatchError
from pensieve_jax.core.turn_node import check_turn_id, root_of
from pensieve_jax.history import ConversationInfo, SQLiteHistoryStore, TurnRecord, database, schema
from pensieve_jax.history.connection import SQLiteConnection
from tests.history import version_1
from tests.history.test_database_file import PREAMBLE
from tests.seeds import new_seed

FINGERPRINT = "model:a tokenizer:b"
CONVERSATIONS = [
    ("alice", [((1, 2, 3), (4, 5)), ((6,), (2**31 - 1,)), ((), (7,))]),
    ("b\u00f6b", [((9,) * 300, (8,))]),
    ("empty", []),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chats.sqlite"


@pytest.fixture(params=["WAL", "rollback journal"])
def old(request, path):
    version_1.make(path, FINGERPRINT, CONVERSATIONS, wal=request.param == "WAL")
    return path


def open_store(path):
    return SQLiteHistoryStore(path, fingerprint=FINGERPRINT)


def run_sql(path, *statements):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return [connection.execute(statement).fetchall() for statement in statements][-1]


def version(path):
    return run_sql(path, "PRAGMA user_version")[0][0]


def dump(path):
    """All of a database, as statements."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def check_all_is_there(path):
    with open_store(path) as store:
        assert store.conversations() == [
            ConversationInfo("empty", 0, 0, 3.0),
            ConversationInfo("alice", 8, 3, 2.5),
            ConversationInfo("b\u00f6b", 301, 1, 0.5),
        ]
        for name, said in CONVERSATIONS:
            turns = store.load(name).turns
            assert [(turn.prompt_token_ids, turn.output_token_ids) for turn in turns] == said
            for index, turn in enumerate(turns):
                check_turn_id("turn_id", turn.turn_id)
                assert turn.parent_id == (turns[index - 1].turn_id if index else None)
                assert root_of(turn.turn_id) == root_of(turns[0].turn_id)
                assert turn.seed == (2**64 - 1 if index % 2 else 2**62)
                assert (turn.turn_index, turn.created_at_s) == (index, index + 0.5)
                assert turn.messages == ({"role": "user", "content": "hi"},)
                assert (turn.output_text, turn.finish_reason) == ("ho", "stop")
                assert (turn.usage, turn.chain, turn.owner) == (None, b"", "")
            if turns:
                assert store.load_turn("", turns[-1].turn_id).token_ids.tolist() == [
                    token for prompt, output in said for token in (*prompt, *output)
                ]
        assert store.note("experience") == "learned"
        roots = {root_of(store.load(name).turns[0].turn_id) for name, said in CONVERSATIONS if said}
        assert len(roots) == 2


def test_everything_of_an_old_file_is_there_and_goes_on(old):
    check_all_is_there(old)
    assert version(old) == schema.SCHEMA_VERSION == 2
    with open_store(old) as store:
        store.commit([TurnRecord("alice", 3, (1,), (2,), 0, "stop", 9.0)])
        store.truncate("alice", 6)
        store.delete("b\u00f6b")
        store.commit([TurnRecord("empty", 0, (1,), (2,), 0, "stop", 9.0)])
        assert store.load("alice").token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    (names,) = run_sql(old, "SELECT group_concat(name) FROM sqlite_schema WHERE type = 'table'")
    assert set(names[0].split(",")) == schema.newest_columns().keys()


def test_it_is_as_if_it_had_been_made_by_this_release(old, tmp_path):
    open_store(old).close()
    open_store(tmp_path / "new.sqlite").close()
    query = "SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name"
    assert run_sql(old, query) == run_sql(tmp_path / "new.sqlite", query)


def test_damage_in_one_conversation_is_told_there_and_loses_no_other(path):
    """Ids that are not those that were written, a turn that is gone, all turns gone, a wrong count."""
    version_1.make(path, FINGERPRINT, [(name, [((1, 2), (3,)), ((4,), (5,))]) for name in "abcde"])
    run_sql(
        path,
        "UPDATE turns SET output_ids = x'ff000000' WHERE conversation_id = 'a' AND turn_index = 0",
        "DELETE FROM turns WHERE conversation_id = 'b' AND turn_index = 0",
        "DELETE FROM turns WHERE conversation_id = 'c'",
        "UPDATE conversations SET num_tokens = 4 WHERE conversation_id = 'd'",
    )
    with open_store(path) as store:
        for name, words in (
            ("a", "Turn 0 of conversation 'a' is damaged"),
            ("b", "should hold 2 turns of 5 tokens, but 1 turns of 2"),
            ("c", "should hold 2 turns of 5 tokens, but 0 turns of 0"),
            ("d", "should hold 2 turns of 4 tokens, but 2 turns of 5"),
        ):
            with pytest.raises(HistoryCorruptError, match=words):
                store.load(name)
        assert store.load("e").token_ids.tolist() == [1, 2, 3, 4, 5]
        for name in "abcd":
            store.delete(name)
        assert [info.conversation_id for info in store.conversations()] == ["e"]
    assert run_sql(path, "SELECT count(*) FROM turns") == [(2,)]


def test_a_file_without_room_for_both_versions_stays_the_old_one(old, monkeypatch):
    before, connect = dump(old), database._connect

    def small(path):
        connection = connect(path)
        (num_pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {num_pages}")
        return connection

    monkeypatch.setattr(database, "_connect", small)
    with pytest.raises(HistoryError, match=r"schema version 1 .* full.* it is as it was.*make room"):
        open_store(old)
    monkeypatch.undo()
    assert dump(old) == before and version(old) == 1
    check_all_is_there(old)


def test_a_read_only_file_stays_the_old_one_and_says_so(old, monkeypatch):
    """As on a file system that is mounted read-only, whose lock could be taken."""
    before = old.read_bytes()
    open_read_only(monkeypatch)
    with pytest.raises(HistoryError, match=r"schema version 1 .*readonly.* it is as it was"):
        open_store(old)
    monkeypatch.undo()
    assert old.read_bytes() == before
    check_all_is_there(old)


def test_a_read_only_file_of_this_version_can_be_read_and_loses_nothing(old, monkeypatch):
    check_all_is_there(old)
    open_read_only(monkeypatch)
    with open_store(old) as store:
        with pytest.raises(HistoryError, match=r"readonly.*nothing of this call was kept"):
            store.commit([TurnRecord("alice", 3, (1,), (2,), 0, "stop", 9.0)])
        assert store.load("alice").token_ids.tolist()[:3] == [1, 2, 3]
    monkeypatch.undo()
    check_all_is_there(old)


def open_read_only(monkeypatch):
    monkeypatch.setattr(
        database,
        "_connect",
        lambda path: sqlite3.connect(
            f"file:{path}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            factory=SQLiteConnection,
        ),
    )


def test_another_models_old_file_is_refused_as_it_is(old):
    before, names = old.read_bytes(), sorted(old.parent.iterdir())
    with pytest.raises(HistoryMismatchError, match="model:z"):
        SQLiteHistoryStore(old, fingerprint="model:z tokenizer:b")
    assert old.read_bytes() == before and sorted(old.parent.iterdir()) == names


def test_a_damaged_old_file_is_set_aside_unchanged(old, tmp_path):
    run_sql(old, "ALTER TABLE turns RENAME COLUMN seed TO grain")
    content = old.read_bytes()
    with pytest.raises(HistoryCorruptError, match="corrupt-1"):
        open_store(old)
    assert (tmp_path / "chats.sqlite.corrupt-1").read_bytes() == content


def killed_migration(path, step):
    """Kill a process in its migration after `step` statements; returns whether it got so far."""
    code = (
        PREAMBLE + "import os, signal\n"
        "from pensieve_jax.history import SQLiteHistoryStore, database, migration\n"
        "steps = list(migration._STEPS)\n"
        "steps.insert(int(sys.argv[2]), 'SELECT die()')\n"
        "migration._STEPS = steps\n"
        "connect = database._connect\n"
        "def dying(path):\n"
        "    connection = connect(path)\n"
        "    connection.execute('PRAGMA cache_size = 1')\n"  # what is written is with the kernel at once
        "    connection.create_function('die', 0, lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "    return connection\n"
        "database._connect = dying\n"
        f"SQLiteHistoryStore(sys.argv[1], fingerprint={FINGERPRINT!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code, os.fspath(path), str(step)], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("step", [1, 12, 21, -1])
def test_a_kill_in_the_middle_leaves_the_old_version_whole(old, step):
    before = dump(old)
    killed_migration(old, step)
    copy = old.with_name("copy.sqlite")
    for suffix in ("", "-wal", "-journal"):
        source = old.with_name(old.name + suffix)
        if source.exists():
            copy.with_name(copy.name + suffix).write_bytes(source.read_bytes())
    assert dump(copy) == before and version(copy) == 1
    check_all_is_there(old)


@pytest.mark.long
def test_a_kill_at_any_moment_leaves_one_version_or_the_other(tmp_path):
    """Of a larger file, at random moments from the first look at it on."""
    rng = np.random.default_rng(new_seed())
    said = [(range(1000), range(50))] * 40
    code = (
        PREAMBLE + "from pensieve_jax.history import SQLiteHistoryStore\n"
        "print('opening', flush=True)\n"
        f"SQLiteHistoryStore(sys.argv[1], fingerprint={FINGERPRINT!r})\n"
    )
    versions = []
    for life in range(6):
        path = tmp_path / f"{life}.sqlite"
        version_1.make(path, FINGERPRINT, [(str(name), said) for name in range(20)])
        child = subprocess.Popen([sys.executable, "-c", code, os.fspath(path)], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"opening\n"
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(rng.uniform(0, 0.08))
        child.kill()
        child.communicate()
        versions.append(version(path))
        with open_store(path) as store:
            records = [store.load(info.conversation_id) for info in store.conversations()]
        assert len(records) == 20
        assert all(record.token_ids.tolist() == [*range(1000), *range(50)] * 40 for record in records)
    assert set(versions) <= {1, 2}
