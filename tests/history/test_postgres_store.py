"""Errors of an unusable database, and statements to a usable one."""

from __future__ import annotations

import dataclasses
import traceback

import numpy as np
import pytest

from pensieve_jax.core.errors import (
    ConfigError,
    ConversationChangedError,
    HistoryDeniedError,
    HistoryError,
    HistoryMismatchError,
    HistoryMissingError,
    HistoryUnavailableError,
    InvalidRequestError,
)
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.history import HistoryReader, TurnRecord, open_store, table_store
from pensieve_jax.history.opening import absolute, shown
from pensieve_jax.history.postgres_location import parse
from tests.history.conftest import FINGERPRINT
from tests.history.server_tables.test_responses import append_to, begin_conversation, draft, turn
from tests.postgres_server import PASSWORD

psycopg = pytest.importorskip("psycopg", reason="needs the extra `postgres`")


@pytest.fixture
def url(postgres):
    return postgres.url()


def opened(url, fingerprint=FINGERPRINT, **options):
    return open_store(url, fingerprint=fingerprint, **options)


def namespace_of(url):
    return parse(url).namespace


# --- refused with a name


def test_another_models_history_is_refused_and_unchanged(url):
    with opened(url) as store:
        store.commit([TurnRecord("alice", 0, (1,), (2,), 0, "stop", 1.0)])
    for call in (opened, lambda url, name: HistoryReader(url, fingerprint=name)):
        with pytest.raises(HistoryMismatchError, match=r"written by 'model:a tokenizer:b', but .*'model:z'"):
            call(url, "model:z")
    with opened(url) as store:
        assert store.load("alice").token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("version", ["1", "9"])
def test_another_schema_version_is_refused_with_its_number(postgres, url, version):
    opened(url).close()
    postgres.run_sql(f"UPDATE {namespace_of(url)}.meta SET value = '{version}' WHERE key = 'schema_version'")
    for call in (opened, lambda url: HistoryReader(url, fingerprint=FINGERPRINT)):
        with pytest.raises(
            HistoryMismatchError, match=f"schema version {version}, but .* version 4; use the"
        ):
            call(url)


def test_another_applications_schema_is_refused_and_unchanged(postgres, url):
    name = namespace_of(url)
    postgres.run_sql(f"CREATE SCHEMA {name}")
    postgres.run_sql(f"CREATE TABLE {name}.recipes(name text)")
    with pytest.raises(HistoryMismatchError, match="of another application"):
        opened(url)
    postgres.run_sql(f"CREATE TABLE {name}.meta(key text, value text)")
    with pytest.raises(HistoryMismatchError, match="of another application"):
        opened(url)
    assert postgres.run_sql(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{name}'") == [(2,)]


def test_a_missing_history_is_reported_and_not_created(postgres, url):
    with pytest.raises(HistoryMissingError):
        opened(url, may_make=False)
    found = postgres.run_sql(f"SELECT count(*) FROM pg_namespace WHERE nspname = '{namespace_of(url)}'")
    assert found == [(0,)]
    with pytest.raises(HistoryMismatchError, match="there is no history"):
        HistoryReader(url, fingerprint=FINGERPRINT)
    opened(url).close()
    opened(url, may_make=False).close()


def without_password(error):
    """Return the parts of an error that may be logged."""
    texts = [str(error), repr(error), *traceback.format_exception(error)]
    return not any(part in text for text in texts for part in ("p@ss", "p%40ss", "w/rd", "w%2Frd"))


def test_a_wrong_password_is_refused_with_the_name_and_never_shown(postgres):
    right = postgres.url(user=f"locked:{PASSWORD}")
    with opened(right) as store:
        store.commit([TurnRecord("alice", 0, (1,), (2,), 0, "stop", 1.0)])
    wrong = right.replace("p%40ss", "p%40ss-")
    with pytest.raises(HistoryDeniedError, match="refuses this user or password") as raised:
        opened(wrong)
    assert without_password(raised.value) and "locked" in str(raised.value)
    with pytest.raises(HistoryDeniedError):
        opened(right.replace(f":{PASSWORD}", ""))


def test_an_unknown_user_is_refused_with_the_name(postgres):
    with pytest.raises(HistoryDeniedError, match="nobody-here"):
        opened(postgres.url(user="nobody-here"))


def test_a_user_without_permission_is_refused(postgres, url):
    opened(url).close()
    with pytest.raises(HistoryDeniedError, match="permission denied"):
        opened(url.replace("tests@", f"locked:{PASSWORD}@"))


def test_a_missing_server_or_database_is_reported(tmp_path, postgres):
    with pytest.raises(HistoryUnavailableError, match="cannot be reached"):
        opened(f"postgresql://me:{PASSWORD}@/chats?host={tmp_path}")
    with pytest.raises(HistoryError, match="no such database"):
        opened(postgres.url(database="nothing"))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:p@ss%zz@host/db",
        "postgresql://me:pa/ss@host/db",
        "postgresql://me:pa?ss@host/db",
        "postgresql://me:p a@host/db",
        "postgresql://me:pa#ss@host/db",
        "postgresql://me:pass",
        "postgresql://me:pa@pass@host/db",
        "postgresql://me:pass%00@host/db",
        "postgresql://me@host/db?namespace=Up",
        "postgresql://me@host/db?namespace=pg_x",
        'postgresql://me@host/db?namespace=a"b',
    ],
)
def test_an_invalid_url_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError) as raised:
        parse(url)
    assert "ss@host" not in str(raised.value) and "pass" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://me:secret@db:5432/chats?sslmode=require", "postgresql://me@db:5432/chats"),
        ("postgres://me:%73ecret@[::1]:1,other:2/chats", "postgres://me@[::1]:1,other:2/chats"),
        ("postgresql:///chats?host=/run&password=secret&namespace=a", "postgresql:///chats?host=/run&namespace=a"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_password(url, told):
    location = parse(url)
    assert shown(url) == location.shown == told and absolute(url) == url
    assert "secret" not in repr(location) and "namespace" not in location.url
    assert location.without_secret(f"said secret and {location.secret}") == "said *** and ***"


# --- stored content


def test_characters_that_postgres_text_cannot_hold(url):
    said = "a\0b\x1bN\x1b\x1bE\0"
    one = turn(output_text=said)
    with opened(url) as store, HistoryReader(url, fingerprint=FINGERPRINT) as reader:
        assert store.commit([one], [draft(one, body_sha256="x\0")]) == {}
        assert store.load_turn("ann", one.turn_id).turns == (one,)
        assert reader.response("ann", f"resp_{one.turn_id}").output_text == said
        assert reader.by_body("ann", "x\0", 0.0).output_text == said
        assert reader.by_body("ann", "x\x1bN", 0.0) is None


def test_a_note_is_stored_replaced_and_deleted(url):
    with opened(url) as store:
        for text in ("one", "two"):
            store.keep_note("n", text)
            assert store.note("n") == text
        store.keep_note("n", None)
        assert store.note("n") is None


def test_a_commit_is_one_round_trip_and_refusals_are_found_afterwards(url, monkeypatch):
    """This holds for any attachments; only a commit that failed is repeated statement by statement."""
    looked: list[int] = []
    append_all = table_store.append_all
    monkeypatch.setattr(
        table_store,
        "append_all",
        lambda connection, commits: looked.append(len(commits)) or append_all(connection, commits),
    )
    with opened(url) as store:
        begin_conversation(store)
        root, named_id = turn(), new_turn_id()
        named = TurnRecord("bob", 0, (1,), (2,), 0, "stop", 1.0, turn_id=named_id)
        assert store.commit([root, named], [draft(root, conversation=append_to()), None]) == {}
        behind = dataclasses.replace(named, turn_index=1, turn_id=new_turn_id(named_id), parent_id=named_id)
        sent: list[str] = []
        monkeypatch.setattr(
            psycopg.Cursor, "fetchone", lambda cursor: sent.append("waited") or pytest.fail("waited")
        )
        pipelines = []
        pipeline = psycopg.Connection.pipeline
        monkeypatch.setattr(
            psycopg.Connection, "pipeline", lambda self: pipelines.append(self) or pipeline(self)
        )
        child = turn(root)
        assert store.commit([child, behind], [draft(child, conversation=append_to("conv_1", 1)), None]) == {}
        monkeypatch.undo()
        assert not sent and not looked and len(pipelines) == 1
        assert store.load("bob").token_ids.tolist() == [1, 2, 1, 2]
        assert len(store.load_turn("ann", child.turn_id).turns) == 2
    monkeypatch.setattr(
        table_store,
        "append_all",
        lambda connection, commits: looked.append(len(commits)) or append_all(connection, commits),
    )
    with opened(url) as store:
        late, other = turn(root), turn(root)
        refused = store.commit(
            [late, other], [draft(late, conversation=append_to("conv_1", 1)), draft(other)]
        )
        assert list(refused) == [0] and isinstance(refused[0], ConversationChangedError)
        assert looked == [2]
        assert store.has_turn("ann", other.turn_id) and not store.has_turn("ann", late.turn_id)


def test_turns_that_a_head_left_behind_are_removed(url):
    with opened(url) as store:
        begin_conversation(store)
        old, new = turn(), turn()
        for version, one in enumerate((old, new)):
            assert store.commit([one], [draft(one, conversation=append_to("conv_1", version))]) == {}
            assert store.has_turn("ann", one.turn_id)
        from pensieve_jax.history.server_tables.changes import DeleteResponse, Expire

        store.apply(DeleteResponse(owner="ann", response_id=f"resp_{old.turn_id}"))
        store.apply(Expire(now_s=0.0))
        assert not store.has_turn("ann", old.turn_id) and store.has_turn("ann", new.turn_id)


# --- from one version to the next


def test_a_lock_that_is_never_released_is_an_error_of_this_call_only(postgres, url, monkeypatch):
    from pensieve_jax.history import postgres_connection

    settings = {**postgres_connection._SETTINGS, "lock_timeout": "50ms"}
    monkeypatch.setattr(postgres_connection, "_SETTINGS", settings)
    with opened(url) as store, opened(url) as stuck:
        named = TurnRecord("alice", 0, (1,), (2,), 0, "stop", 1.0, turn_id=new_turn_id())
        stuck._connection.execute("BEGIN")
        from pensieve_jax.history.postgres_schema import lock_alone

        lock_alone(stuck._connection, namespace_of(url))
        with pytest.raises(HistoryError, match=r"too busy .*nothing of this call was stored"):
            store.commit([named])
        stuck._connection.execute("ROLLBACK")
        assert store.commit([named]) == {}


def test_a_fork_gets_no_name_that_its_turns_could_not_have(url):
    """Some of these fit the index by themselves, but no turn could ever be stored on such a fork."""
    longest = "".join(map(chr, np.random.default_rng(1).integers(33, 127, 2000)))
    with opened(url) as store:
        store.commit([TurnRecord("alice", 0, (1,), (2,), 0, "stop", 1.0)])
        for name in (longest + "x", "\u4e2d" * 700, longest * 2):
            with pytest.raises(InvalidRequestError, match=r"^new_conversation_id .* at most 2000 bytes"):
                store.fork("alice", name)
        store.fork("alice", longest)
        assert store.commit([TurnRecord(longest, 1, (3,), (4,), 0, "stop", 2.0)]) == {}
        assert store.load(longest).token_ids.tolist() == [1, 2, 3, 4]
