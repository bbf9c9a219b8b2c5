"""A history that is copied from a file to Postgres and back keeps its content."""

from __future__ import annotations

import sqlite3

import pytest

from pensieve_jax.core.errors import ConfigError, HistoryError, HistoryLockedError, HistoryMismatchError
from pensieve_jax.history import HistoryReader, TurnRecord, copying, open_store
from pensieve_jax.history.copying import contents, copy_history, fingerprint_at
from pensieve_jax.history.server_tables.changes import DeleteResponse, QueueResponse
from tests.history.conftest import FINGERPRINT
from tests.history.endless_commits import named, planned
from tests.history.server_tables.test_responses import append_to, begin_conversation, draft, message, turn
from tests.history.test_response_trees import respond

OTHER = "model:z tokenizer:b"


def fill(store):
    """Add rows to every table, with characters that are difficult for either database."""
    begin_conversation(store, "conv_1", "ann", message("a", "\u4e2d\0"))
    begin_conversation(store, "Conv_1", "ann")
    root = turn(chain=b"\0\1", output_text="a\0b\x1bN", seed=2**64 - 1)
    assert store.commit([root], [draft(root, conversation=append_to())]) == {}
    for index in range(3):
        child = turn(root, created_at_s=0.1 + index)
        assert store.commit([child], [draft(child)]) == {}
    queued = turn(root)
    store.apply(QueueResponse(draft=draft(queued, background=True), job=b"\0job", parent_id=root.turn_id))
    store.apply(DeleteResponse(owner="ann", response_id=f"resp_{child.turn_id}"), in_use={child.turn_id})
    for number in range(12):
        plans = [
            plan for plan in planned(number) if plan.draft.conversation is None and not plan.draft.background
        ]
        store.commit([plan.turn for plan in plans], [plan.draft for plan in plans])
        store.commit([named(number)])
    store.fork("alice", "bob", 7)
    respond(store, 1.0, "hi")
    respond(store, 1.0, "at the same time")
    store.keep_note("experience", '{"a": 1}')
    return root


def told(location):
    """Return everything that a history's readers can see, lists in order."""
    with open_store(location, fingerprint=FINGERPRINT) as store:
        said = [store.load(info.conversation_id) for info in store.conversations()]
        listed = [(one.conversation_id, one.turns, one.token_ids.tolist()) for one in said]
        held, note = store.read(contents), store.note("experience")
        with HistoryReader(location, fingerprint=FINGERPRINT) as reader:
            trees = [(row.root, reader.tree("ann", row.root)) for row in reader.trees("ann")]
            found = reader.find_chain("ann", b"\1"), reader.unfinished_background()
    return listed, held, note, trees, found


@pytest.fixture
def filled(tmp_path):
    path = tmp_path / "chats.sqlite"
    with open_store(path, fingerprint=FINGERPRINT) as store:
        fill(store)
    return path


@pytest.mark.parametrize("way", ["by Postgres", "by a file"])
def test_a_copy_there_and_back_is_the_same(filled, tmp_path, postgres, way):
    between = postgres.url() if way == "by Postgres" else tmp_path / "between.sqlite"
    back = tmp_path / "back.sqlite"
    progress: list[tuple[int, int]] = []
    copied = copy_history(filled, between, progress=lambda *numbers: progress.append(numbers))
    assert copied.num_rows["turns"] > 20 and all(copied.num_rows.values())
    assert progress[-1] == (sum(copied.num_rows.values()),) * 2
    assert copy_history(between, back) == copied
    before = told(filled)
    assert told(between) == before and told(back) == before
    with open_store(between, fingerprint=FINGERPRINT) as store:  # the copy can be continued
        assert store.commit([named(12)]) == {}
        respond(store, 1.0, "the last")
    with HistoryReader(between, fingerprint=FINGERPRINT) as reader:
        assert len(reader.trees("ann")) == len(before[3]) + 1


def test_the_target_must_be_empty_or_of_the_same_model(filled, postgres, tmp_path):
    for make in (postgres.url, lambda: tmp_path / "target.sqlite"):
        target = make()
        open_store(target, fingerprint=FINGERPRINT).close()
        copy_history(filled, target)  # an empty one of the same model
        held = told(target)
        with pytest.raises(HistoryMismatchError, match=r"which holds .* already"):
            copy_history(filled, target)
        assert told(target) == held
    for target in (postgres.url(), tmp_path / "other.sqlite"):
        with open_store(target, fingerprint=OTHER) as store:
            store.commit([TurnRecord("alice", 0, (1,), (2,), 0, "stop", 1.0)])
        with pytest.raises(HistoryMismatchError, match="model:z"):
            copy_history(filled, target)
        assert fingerprint_at(target) == OTHER


def test_invalid_sources_are_refused(filled, postgres, tmp_path):
    with sqlite3.connect(tmp_path / "recipes") as connection:
        connection.execute("CREATE TABLE recipes(name)")
    connection.close()
    (tmp_path / "text").write_text("what is this")
    for source in (tmp_path / "missing", tmp_path / "recipes", tmp_path / "text", postgres.url()):
        with pytest.raises(HistoryError):
            copy_history(source, tmp_path / "target")
        assert not (tmp_path / "target").exists()
    with pytest.raises(ConfigError, match="another place"):
        copy_history(filled, filled)
    with open_store(filled, fingerprint=FINGERPRINT), pytest.raises(HistoryLockedError):
        copy_history(filled, postgres.url())


@pytest.mark.parametrize("what", ["a row less", "another value"])
def test_a_wrong_copy_is_detected_and_discarded(filled, postgres, monkeypatch, what):
    from pensieve_jax.history.postgres_connection import PostgresConnection

    executemany = PostgresConnection.executemany

    def wrong(self, statement, rows):
        rows = list(rows)
        if "INTO items" in statement and what == "a row less":
            rows = rows[1:]
        elif "INTO items" in statement:
            rows[0] = (*rows[0][:-1], "{}")
        executemany(self, statement, rows)

    monkeypatch.setattr(PostgresConnection, "executemany", wrong)
    target = postgres.url()
    with pytest.raises(HistoryError, match=r"differs from the source.*Nothing was stored"):
        copy_history(filled, target)
    monkeypatch.undo()
    copy_history(filled, target)
    assert told(target) == told(filled)


def test_every_column_of_every_table_is_copied():
    from pensieve_jax.history import schema

    columns = {table.name: set(table.columns) for table in copying._TABLES}
    counted_by_triggers = {"stored_amounts": schema.newest_columns()["stored_amounts"]}
    assert columns | counted_by_triggers == schema.newest_columns()
