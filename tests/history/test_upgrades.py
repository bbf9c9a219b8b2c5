"""Histories of earlier versions: a store changes them to the newest one, a reader asks for that."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest

from pensieve_jax.core.errors import HistoryMismatchError
from pensieve_jax.history import HistoryReader, open_store, schema
from pensieve_jax.history.copying import contents
from pensieve_jax.history.postgres_location import parse
from pensieve_jax.history.server_tables.changes import QueueResponse
from tests.history.amounts import check_amounts
from tests.history.conftest import FINGERPRINT
from tests.history.server_tables.test_responses import commit, draft, turn
from tests.history.test_copying import fill

COUNTED = ("turns", "conversations", "items", "responses", "idempotency")


def older_file(path, version: int) -> None:
    """Give a file the schema of an earlier version."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        for statement in (
            "DROP TABLE stored_amounts",
            "DROP INDEX kept_by_activity",
            "ALTER TABLE responses DROP COLUMN starts",
            f"PRAGMA user_version = {version}",
        ):
            connection.execute(statement)


def older_schema(postgres, url: str, version: int) -> None:
    """Give a schema of Postgres the tables of an earlier version."""
    name = parse(url).namespace
    for table in COUNTED:
        postgres.run_sql(f"DROP FUNCTION {name}.count_{table}() CASCADE")
    postgres.run_sql(f"DROP TABLE {name}.stored_amounts")
    postgres.run_sql(f"DROP INDEX {name}.kept_by_activity")
    postgres.run_sql(f"ALTER TABLE {name}.responses DROP COLUMN starts")
    postgres.run_sql(f"UPDATE {name}.meta SET value = '{version}' WHERE key = 'schema_version'")


def version_of(location, postgres) -> int:
    if isinstance(location, str):
        where = f"{parse(location).namespace}.meta WHERE key = 'schema_version'"
        return int(postgres.run_sql(f"SELECT value FROM {where}")[0][0])
    with contextlib.closing(sqlite3.connect(location)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


@pytest.mark.parametrize("version", schema.OLDER_VERSIONS)
def test_a_store_upgrades_an_older_history_and_keeps_every_row(location, postgres, version):
    with open_store(location, fingerprint=FINGERPRINT) as store:
        fill(store)
        held, amounts = store.read(contents), check_amounts(store)
    if isinstance(location, str):
        older_schema(postgres, location, version)
    else:
        older_file(location, version)
    with pytest.raises(HistoryMismatchError, match=f"version {version}, .*open it once with a server"):
        HistoryReader(location, fingerprint=FINGERPRINT)
    assert version_of(location, postgres) == version, "a reader changes nothing"
    for _ in range(2):  # the second time it is one of the newest version
        with open_store(location, fingerprint=FINGERPRINT) as store:
            assert store.read(contents) == held and check_amounts(store) == amounts
            assert version_of(location, postgres) == schema.SCHEMA_VERSION == 4
    with open_store(location, fingerprint=FINGERPRINT) as store:
        one, queued = turn(), turn()
        assert commit(store, one) == {}
        store.apply(QueueResponse(draft=draft(queued, background=True), job=b"job"))
        assert check_amounts(store)["ann"].num_responses == amounts["ann"].num_responses + 2
    HistoryReader(location, fingerprint=FINGERPRINT).close()


def test_a_server_of_an_earlier_release_may_write_beside_an_upgrade(postgres):
    """Replicas are updated one after the other: what the earlier release writes counts as well."""
    url = postgres.url()
    open_store(url, fingerprint=FINGERPRINT).close()
    older_schema(postgres, url, 3)
    name = parse(url).namespace
    with open_store(url, fingerprint=FINGERPRINT) as store:
        postgres.run_sql(
            f"SET search_path = {name}; INSERT INTO responses(owner, response_id, status, request, "
            "input_items, output_item_id, created_at_s, expires_at_s, background, body_sha256) VALUES "
            "('ann', 'resp_1', 'queued', '{}', '[]', 'msg_1', 1, 2, 1, '')"
        )
        assert check_amounts(store)["ann"].num_responses == 1


def test_a_kill_during_an_upgrade_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "chats.sqlite"
    with open_store(path, fingerprint=FINGERPRINT) as store:
        fill(store)
        held = store.read(contents)
    older_file(path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(schema.stored_amounts, "sqlite_triggers", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_store(path, fingerprint=FINGERPRINT)
    assert version_of(path, None) == 3
    with open_store(path, fingerprint=FINGERPRINT) as store:
        assert store.read(contents) == held
        check_amounts(store)
