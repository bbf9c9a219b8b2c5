"""The outcome of commits whose session was lost, of repeated reads, and of claims."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

from pensieve_jax.core.errors import HistoryError, HistoryUnavailableError, InvalidRequestError
from pensieve_jax.history import copying, named_conversations, open_store
from pensieve_jax.history.postgres_location import parse
from tests.deadlines import TIMEOUT_S, wait_until
from tests.history.racing_commits import FINGERPRINT, behind
from tests.history.server_tables.test_responses import append_to, begin_conversation, commit, draft, turn
from tests.postgres_server import PASSWORD

psycopg = pytest.importorskip("psycopg", reason="needs the extra `postgres`")

from pensieve_jax.history import postgres_connection  # noqa: E402  # of that extra
from pensieve_jax.history.postgres_claims import PostgresClaims  # noqa: E402
from pensieve_jax.history.postgres_connection import PipelinedConnection, PostgresConnection  # noqa: E402
from pensieve_jax.history.postgres_store import PostgresHistoryStore  # noqa: E402
from tests.history.test_postgres_races import lose_sessions  # noqa: E402


@pytest.fixture
def url(postgres):
    return postgres.url()


@pytest.fixture
def replicas(url):
    with open_store(url, fingerprint=FINGERPRINT) as one, open_store(url, fingerprint=FINGERPRINT) as other:
        yield one, other


def once_at_begin(monkeypatch, work):
    """Run `work` as the first commit begins."""
    execute, num = PipelinedConnection.execute, []

    def losing(self, statement, *values):
        if statement == "BEGIN" and not num:
            num.append(1)
            work()
        return execute(self, statement, *values)

    monkeypatch.setattr(PipelinedConnection, "execute", losing)


def once_behind(monkeypatch, work):
    """Run `work` on the session once the first commit was stored."""
    pipelined, num = PostgresConnection.pipelined, []

    @contextlib.contextmanager
    def behind_it(self):
        with pipelined(self) as connection:
            yield connection
        if not num:
            num.append(1)
            work(self)

    monkeypatch.setattr(PostgresConnection, "pipelined", behind_it)


def test_a_turn_that_another_server_stored_does_not_prove_the_others(postgres, replicas, monkeypatch):
    """A background response has the same turn on every server that runs it."""
    one, other = replicas
    shared, own = turn(), turn()

    def meanwhile() -> None:
        lose_sessions(postgres)
        commit(other, shared)

    once_at_begin(monkeypatch, meanwhile)
    assert one.commit([shared, own], [draft(shared), draft(own)]) == {}
    assert one.has_turn("ann", own.turn_id) and one.has_turn("ann", shared.turn_id)


def test_an_error_of_the_client_library_does_not_prove_that_nothing_was_stored(postgres, url, monkeypatch):
    """It may hide the server's last messages, while the session still looks healthy."""
    hides = psycopg.OperationalError("cannot exit pipeline mode while busy")

    def hide(session) -> None:
        raise hides

    def hide_and_stay_away(session) -> None:
        postgres.stop()
        raise hides

    one, other = turn(), turn()
    with open_store(url, fingerprint=FINGERPRINT) as store:
        with monkeypatch.context() as patch:
            once_behind(patch, hide)
            assert commit(store, one) == {}
            assert store.load_turn("ann", one.turn_id).turns == (one,)
        once_behind(monkeypatch, hide_and_stay_away)
        try:
            with pytest.raises(HistoryUnavailableError, match="not known") as raised:
                commit(store, other)
        finally:
            postgres.start()
        assert raised.value.may_be_kept and store.has_turn("ann", other.turn_id)


def test_a_protocol_error_is_a_lost_session(url, monkeypatch):
    """libpq's own errors have no code, and no class."""

    def lose(session) -> None:
        raise psycopg.DatabaseError("lost synchronization with server")

    once_behind(monkeypatch, lose)
    one = turn()
    with open_store(url, fingerprint=FINGERPRINT) as store:
        assert commit(store, one) == {} and store.has_turn("ann", one.turn_id)


def test_an_outcome_that_cannot_be_queried_after_the_second_try_is_unknown(postgres, replicas, monkeypatch):
    store = replicas[0]
    begin_conversation(store)
    late, good = turn(), turn()
    once_at_begin(monkeypatch, lambda: lose_sessions(postgres))
    has = PostgresHistoryStore._has

    def away(self, one):
        postgres.stop()
        try:
            return has(self, one)
        finally:
            postgres.start()

    monkeypatch.setattr(PostgresHistoryStore, "_has", away)
    with pytest.raises(HistoryError) as raised:
        store.commit([late, good], [draft(late, conversation=append_to("conv_1", 9)), draft(good)])
    assert raised.value.may_be_kept and store.has_turn("ann", good.turn_id)


def test_without_permission_to_query_the_outcome_is_unknown(postgres, monkeypatch):
    url = postgres.url(user=f"locked:{PASSWORD}")

    def lose(session) -> None:
        postgres.run_sql("ALTER ROLE locked PASSWORD 'rotated'")
        session.close()
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    one = turn()
    with open_store(url, fingerprint=FINGERPRINT) as store:
        once_behind(monkeypatch, lose)
        try:
            with pytest.raises(HistoryError) as raised:
                commit(store, one)
        finally:
            postgres.run_sql("ALTER ROLE locked PASSWORD 'p@ss:w/rd'")
        assert raised.value.may_be_kept and store.has_turn("ann", one.turn_id)


def test_a_repeated_read_sees_one_snapshot(postgres, replicas, monkeypatch):
    one, other = replicas
    one.commit([behind(one, "alice")])
    info, num = named_conversations.info, []

    def between(connection, conversation_id):
        found = info(connection, conversation_id)
        if not num:
            num.append(1)
            other.commit([behind(other, "alice")])
        return found

    lose_sessions(postgres)
    other.head("alice")
    monkeypatch.setattr(named_conversations, "info", between)
    assert len(one.load("alice").turns) == 1


def test_a_copy_may_take_longer_than_the_idle_timeout(url, tmp_path, monkeypatch):
    with open_store(url, fingerprint=FINGERPRINT) as store:
        store.commit([behind(store, "alice")])
    monkeypatch.setitem(postgres_connection._SETTINGS, "idle_in_transaction_session_timeout", "50ms")
    contents, late = copying.contents, threading.Event()

    def slow(connection):
        late.wait(0.3)
        return contents(connection)

    monkeypatch.setattr(copying, "contents", slow)
    assert copying.copy_history(url, tmp_path / "h.sqlite").num_rows["turns"] == 1


@pytest.mark.parametrize("name", ["user", "order"])
def test_a_namespace_may_be_a_keyword_of_sql(postgres, name):
    with open_store(postgres.url(name), fingerprint=FINGERPRINT) as store:
        commit(store, turn())


def test_only_a_name_that_no_index_can_hold_is_refused(url):
    letters = np.random.default_rng(0).integers(97, 123, 9000)
    with open_store(url, fingerprint=FINGERPRINT) as store:
        refused = store.commit([behind(store, "alice"), behind(store, "".join(map(chr, letters)))])
        assert list(refused) == [1] and isinstance(refused[1], InvalidRequestError)
        assert len(store.load("alice").turns) == 1


# --- claims


@pytest.fixture
def servers(url):
    one, other = PostgresClaims(parse(url)), PostgresClaims(parse(url))
    with contextlib.closing(one), contextlib.closing(other):
        yield one, other


def test_a_server_that_polls_in_time_keeps_claims_that_a_restart_lost(postgres, servers):
    one, other = servers
    assert one.take("a") and not other.take("a")
    lose_sessions(postgres)
    assert one.take("a") and not other.take("a")


def test_a_closed_server_takes_no_claim(servers):
    one, other = servers
    one.close()
    with pytest.raises(HistoryError, match="closed"):
        one.take("a")
    assert other.take("a")


def test_closing_does_not_wait_for_an_answer(servers):
    one, other = servers
    assert one.take("a")
    pid = one._session._raw.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        asking = threading.Thread(target=one.take, args=("b",), daemon=True)
        asking.start()
        wait_until(one._asking.locked)
        closing = threading.Thread(target=one.close, daemon=True)
        closing.start()
        closing.join(TIMEOUT_S)
        assert not closing.is_alive() and not one.holds("a")
    finally:
        os.kill(pid, signal.SIGCONT)
    asking.join(TIMEOUT_S)
    wait_until(lambda: other.take("a"))  # the asking client has ended the session
