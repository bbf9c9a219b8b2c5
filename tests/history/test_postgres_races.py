"""Replicas that share a history, and a Postgres that goes away and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pensieve_jax.core.errors import (
    ConversationChangedError,
    HistoryUnavailableError,
    PensieveError,
    UnknownRecordError,
    UnknownTurnError,
)
from pensieve_jax.core.turn_node import new_turn_id
from pensieve_jax.history import HistoryReader, TurnRecord, named_conversations, open_store
from pensieve_jax.history.postgres_location import parse
from pensieve_jax.history.server_tables.changes import AppendItems, DeleteResponse, Expire
from tests.deadlines import TIMEOUT_S, wait_until
from tests.history import racing_commits
from tests.history.racing_commits import FINGERPRINT, behind, race
from tests.history.server_tables.test_responses import (
    append_to,
    begin_conversation,
    commit,
    draft,
    message,
    turn,
)
from tests.history.test_database_file import PREAMBLE
from tests.seeds import enough, new_seed

psycopg = pytest.importorskip("psycopg", reason="needs the extra `postgres`")
PROGRAM = f"{PREAMBLE}import runpy\nrunpy.run_path({racing_commits.__file__!r}, run_name='__main__')\n"


@pytest.fixture
def url(postgres):
    return postgres.url()


@pytest.fixture
def replicas(url):
    with open_store(url, fingerprint=FINGERPRINT) as one, open_store(url, fingerprint=FINGERPRINT) as other:
        yield one, other


def turn_ids(store, name="alice"):
    return [one.turn_id for one in store.load(name).turns]


def num_turns(store):
    return store.read(lambda connection: connection.execute("SELECT count(*) FROM turns").fetchone()[0])


def both(replicas, work):
    """Return the results of `work` for each replica, run at the same time."""
    barrier = threading.Barrier(2)

    def at_once(number):
        barrier.wait(TIMEOUT_S)
        return work(number, replicas[number])

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(at_once, range(2)))


# --- races


def test_exactly_one_of_two_continuations_of_a_head_wins(replicas):
    for number in range(150):
        turns = [behind(store, "alice") for store in replicas]
        refused = both(replicas, lambda number, store, turns=turns: store.commit([turns[number]]))
        assert sorted(map(len, refused)) == [0, 1], number
        (why,) = (why for found in refused for why in found.values())
        assert isinstance(why, ConversationChangedError)
        winner = turns[[bool(found) for found in refused].index(False)]
        assert replicas[0].head("alice") == winner.turn_id
    assert len(turn_ids(replicas[1])) == num_turns(replicas[0]) == 150


def test_a_head_that_moves_without_a_comparison_is_detected(replicas, monkeypatch):
    anyhow = named_conversations._MOVE.replace("AND num_turns = ?", "AND ? >= 0")
    anyhow = anyhow.replace("AND head_turn = ?", "AND ? <> ''")
    monkeypatch.setattr(named_conversations, "_MOVE", anyhow)
    with pytest.raises((AssertionError, PensieveError)):
        test_exactly_one_of_two_continuations_of_a_head_wins(replicas)


@pytest.mark.long
def test_two_processes_lose_and_double_no_turn(url, replicas, record_property):
    number = enough(1200, 5000)
    command = [sys.executable, "-c", PROGRAM, url, "alice", str(number)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 2
        for child in children:
            child.stdin.write("go\n")
            child.stdin.flush()
        won, lost = set(), set()
        for turn_id, kept in race(replicas[0], "alice", number):
            (won if kept else lost).add(turn_id)
        for child in children:
            for line in child.communicate()[0].splitlines():
                (won if line[0] == "+" else lost).add(line[2:])
            assert child.returncode == 0
    finally:
        for child in children:
            child.kill()
            child.wait()
    kept = turn_ids(replicas[1])
    assert len(kept) == len(set(kept)) and set(kept) == won and not won & lost
    assert num_turns(replicas[0]) == len(won) and len(won) + len(lost) == 3 * number
    record_property("note", f"{len(won)} commits of three replicas were kept, {len(lost)} lost a race")
    assert lost, "no two commits met"


def test_exactly_one_of_two_responses_to_one_version_is_stored(replicas, url):
    begin_conversation(replicas[0])
    with HistoryReader(url, fingerprint=FINGERPRINT) as reader:
        for version in range(60):
            turns = [turn(), turn()]

            def send(number, store, turns=turns, version=version):
                append = append_to("conv_1", version, message(f"in_{version}_{number}"))
                return commit(store, turns[number], conversation=append)

            refused = both(replicas, send)
            assert sorted(map(len, refused)) == [0, 1], version
            loser = turns[0] if refused[0] else turns[1]
            with pytest.raises(UnknownRecordError):
                reader.response("ann", f"resp_{loser.turn_id}")
        row, items = reader.all_items("ann", "conv_1")
    assert row.version == 60 and [item.position for item in items] == list(range(120))
    assert num_turns(replicas[0]) == 60


@pytest.mark.long
def test_items_that_two_clients_append_are_all_stored_in_some_order(replicas):
    begin_conversation(replicas[0])

    def send(number, store):
        won = []
        for attempt in range(200):
            items = json.dumps([message(f"{number}_{attempt}")])
            version = store.read(
                lambda connection: connection.execute("SELECT version FROM conversations").fetchone()[0]
            )
            change = AppendItems(owner="ann", conversation_id="conv_1", expected_version=version, items=items)
            try:
                store.apply(change)
                won.append(f"{number}_{attempt}")
            except ConversationChangedError:
                pass
        return won

    won = both(replicas, send)
    query = "SELECT item_id FROM items ORDER BY position"
    rows = replicas[0].read(lambda connection: connection.execute(query).fetchall())
    assert sorted(item_id for (item_id,) in rows) == sorted(won[0] + won[1])


@pytest.mark.long
def test_a_turn_and_the_removal_of_its_parent(replicas):
    """Either the turn is stored with its parent, or it is refused: no path ever lacks a turn."""
    outcomes = set()
    for _ in range(150):
        root = turn()
        commit(replicas[0], root)
        child = turn(root)

        def work(number, store, root=root, child=child):
            if number:
                return commit(store, child)
            return store.apply(DeleteResponse(owner="ann", response_id=f"resp_{root.turn_id}"))

        refused = both(replicas, work)[1]
        outcomes.add(bool(refused))
        if refused:
            assert isinstance(refused[0], UnknownTurnError)
            assert not replicas[0].has_turn("ann", root.turn_id)
        else:
            assert replicas[1].load_turn("ann", child.turn_id).turns == (root, child)
    assert outcomes  # a machine with one core may see only one of them


def test_a_transaction_that_postgres_aborts_in_a_deadlock_is_repeated(postgres, replicas, url):
    """The session that has waited longer detects the deadlock: here the store's."""
    store = replicas[0]
    for name in ("conv_1", "conv_2"):
        begin_conversation(store, name)
    touch = b"UPDATE conversations SET created_at_s = created_at_s WHERE conversation_id = %s"
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with ThreadPoolExecutor(1) as threads, psycopg.connect(parse(url).url) as other:
        other.execute(f"SET search_path = {parse(url).namespace}".encode())
        other.commit()  # otherwise the first rollback below would undo it
        for version in range(20):  # on a busy machine, one attempt in ten comes too late
            turns = [turn(), turn()]
            drafts = [
                draft(one, conversation=append_to(name, version))
                for one, name in zip(turns, ("conv_1", "conv_2"), strict=True)
            ]
            other.execute(touch, ("conv_2",))
            committing = threads.submit(store.commit, turns, drafts)
            wait_until(lambda: postgres.run_sql(waiting) != [(0,)])
            try:
                other.execute(touch, ("conv_1",))  # returns when the store's transaction was aborted
            except psycopg.errors.DeadlockDetected:  # it came so late that it detected the deadlock itself
                other.rollback()
                assert committing.result(TIMEOUT_S) == {}
                continue
            assert not committing.done()
            other.rollback()
            assert committing.result(TIMEOUT_S) == {}
            break
        else:
            pytest.fail("the store's transaction was never aborted")
    assert num_turns(store) == 2 * (version + 1)


def test_turns_that_one_replica_released_are_removed_by_any(replicas):
    begin_conversation(replicas[0])
    turns = [turn(), turn()]
    for version, one in enumerate(turns):
        commit(replicas[version], one, conversation=append_to("conv_1", version))
    replicas[0].apply(DeleteResponse(owner="ann", response_id=f"resp_{turns[0].turn_id}"))
    replicas[1].apply(Expire(now_s=0.0))
    assert not replicas[0].has_turn("ann", turns[0].turn_id)
    assert replicas[0].has_turn("ann", turns[1].turn_id)


# --- lost sessions


def lose_sessions(postgres):
    """End all sessions, and wait until they are gone."""
    postgres.run_sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )


def test_a_session_that_was_lost_between_calls_is_replaced(postgres, replicas, url):
    store = replicas[0]
    one = turn()
    with HistoryReader(url, fingerprint=FINGERPRINT) as reader:
        for call in (
            lambda: commit(store, one),
            lambda: store.load_turn("ann", one.turn_id),
            lambda: reader.response("ann", f"resp_{one.turn_id}"),
            lambda: begin_conversation(store),
            lambda: store.truncate("alice", 0),
        ):
            store.commit([behind(store, "alice")])
            lose_sessions(postgres)
            call()
    assert len(turn_ids(store)) == 0 and num_turns(store) == 1


@pytest.mark.parametrize("when", ["before it was sent", "before it was kept", "after it was kept"])
@pytest.mark.parametrize("is_attached", [False, True])
def test_a_session_that_is_lost_during_a_commit(postgres, url, monkeypatch, when, is_attached):
    """The commit is found by the turns' ids: it is stored once, whatever was lost."""
    from pensieve_jax.history.postgres_connection import PipelinedConnection

    execute, num_lost = PipelinedConnection.execute, []

    def losing(self, statement, *values):
        moments = {"before it was sent": "BEGIN", "before it was kept": "COMMIT"}
        if moments.get(when) == statement and not num_lost:
            num_lost.append(1)
            if when == "before it was kept":
                self._raw.execute(b"SELECT 1").fetchone()  # everything sent so far has been executed
            lose_sessions(postgres)
        found = execute(self, statement, *values)
        if when == "after it was kept" and statement == "COMMIT" and not num_lost:
            num_lost.append(1)
            execute(self, "SELECT 1").fetchone()
            lose_sessions(postgres)
        return found

    with open_store(url, fingerprint=FINGERPRINT) as store:
        store.commit([behind(store, "alice")])
        begin_conversation(store)
        monkeypatch.setattr(PipelinedConnection, "execute", losing)
        one = turn()
        if is_attached:
            assert commit(store, one, conversation=append_to("conv_1", 0, message("a"))) == {}
        else:
            assert store.commit([behind(store, "alice"), one]) == {}
        assert num_lost == [1]
        assert len(turn_ids(store)) == (1 if is_attached else 2)
        assert store.load_turn("ann", one.turn_id).turns == (one,)


def test_a_refusal_survives_a_lost_session(postgres, replicas, monkeypatch):
    """It is repeated statement by statement, and the session is lost at the commit."""
    from pensieve_jax.history.postgres_connection import PostgresConnection

    store = replicas[0]
    begin_conversation(store)
    execute, num_commits = PostgresConnection.execute, []

    def losing(self, statement, *values):
        found = execute(self, statement, *values)
        if statement == "COMMIT" and not num_commits:
            num_commits.append(1)
            lose_sessions(postgres)
            execute(self, "SELECT 1")  # raises, since it is gone
        return found

    late, good = turn(), turn()
    drafts = [draft(late, conversation=append_to("conv_1", 9)), draft(good)]
    monkeypatch.setattr(PostgresConnection, "execute", losing)
    refused = store.commit([late, good], drafts)
    assert num_commits and list(refused) == [0] and isinstance(refused[0], ConversationChangedError)
    assert store.has_turn("ann", good.turn_id) and not store.has_turn("ann", late.turn_id)


# --- Postgres stops


class Load:
    """Replicas that commit until they are told to stop, whatever happens to them."""

    def __init__(self, url, num_replicas):
        self._url = url
        self._is_over = threading.Event()
        self.kept, self.maybe, self.not_kept = set(), set(), set()
        self.num_since = [0] * num_replicas
        self._threads = [threading.Thread(target=self._work, args=(n,)) for n in range(num_replicas)]
        self.problems = []
        for thread in self._threads:
            thread.start()

    def end(self):
        self._is_over.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        assert not self.problems and not any(thread.is_alive() for thread in self._threads)

    def count_anew(self):
        self.num_since = [0] * len(self.num_since)

    def _work(self, number):
        try:
            with open_store(self._url, fingerprint=FINGERPRINT) as store:
                parent = None
                while not self._is_over.is_set():
                    one = turn(parent, turn_index=0 if parent is None else parent.turn_index + 1)
                    try:
                        refused = commit(store, one)
                    except HistoryUnavailableError as error:
                        (self.maybe if error.may_be_kept else self.not_kept).add(one.turn_id)
                        parent = None
                        self._is_over.wait(0.01)
                        continue
                    assert refused == {}
                    self.kept.add(one.turn_id)
                    self.num_since[number] += 1
                    parent = one
        except Exception as error:
            self.problems.append(error)


@pytest.mark.long
def test_postgres_stops_and_starts_under_load(postgres, url, record_property):
    """Errors are typed, no acknowledged commit is lost, and service continues."""
    rng = np.random.default_rng(new_seed())
    open_store(url, fingerprint=FINGERPRINT).close()
    load = Load(url, 3)
    try:
        with HistoryReader(url, fingerprint=FINGERPRINT) as reader:
            for _ in range(enough(5, 20)):
                load.count_anew()
                least = int(rng.integers(5, 60))
                wait_until(lambda least=least: min(load.num_since) > least or load.problems)
                postgres.stop(str(rng.choice(["immediate", "fast"])))
                with pytest.raises(HistoryUnavailableError):
                    reader.has_turn("ann", "0" * 32)
                num_before = len(load.not_kept)
                wait_until(lambda before=num_before: len(load.not_kept) > before)
                postgres.start()
                assert not reader.has_turn("ann", "0" * 32)
    finally:
        load.end()
    with open_store(url, fingerprint=FINGERPRINT) as store:
        query = "SELECT turn_id FROM turns JOIN responses USING (owner, turn_id)"
        rows = store.read(lambda connection: connection.execute(query).fetchall())
    there = {turn_id for (turn_id,) in rows}
    assert not load.kept - there
    assert not load.not_kept & there
    assert there <= load.kept | load.maybe
    unknown = len(load.maybe & there), len(load.maybe - there)
    record_property("note", f"{len(load.kept)} kept, {len(load.not_kept)} not, unknown: {unknown}")


def test_a_commit_while_postgres_is_away_is_a_typed_error_at_once(postgres, url):
    with open_store(url, fingerprint=FINGERPRINT) as store:
        postgres.stop()
        try:
            one = TurnRecord("alice", 0, (1,), (2,), 0, "stop", 1.0, turn_id=new_turn_id())
            with pytest.raises(HistoryUnavailableError, match="cannot be reached"):
                store.commit([one])
            with pytest.raises(HistoryUnavailableError) as raised:
                store.commit([one])
            assert not raised.value.may_be_kept
            with pytest.raises(HistoryUnavailableError):
                store.conversations()
        finally:
            postgres.start()
        assert store.commit([one]) == {} and turn_ids(store) == [one.turn_id]
