"""SIGKILL during commits: a turn is there with all of its attachments, or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pensieve_jax.history import HistoryReader, open_store
from tests.deadlines import wait_until
from tests.history import endless_commits
from tests.history.endless_commits import FINGERPRINT, NUM_LANES, OWNER, latecomer, planned
from tests.history.test_database_file import PREAMBLE
from tests.seeds import enough, new_seed

PROGRAM = f"{PREAMBLE}import runpy\nrunpy.run_path({endless_commits.__file__!r}, run_name='__main__')\n"


def live_and_die(path: Path | str, first: int, num_reports: int, rng: np.random.Generator) -> int:
    """Run a process that commits from `first` on; kill it after its reports; return the last one, or -1."""
    command = [sys.executable, "-c", PROGRAM, os.fspath(path), str(first)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    told = -1
    for _ in range(num_reports):
        told = int(child.stdout.readline())
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(rng.uniform(0, 0.003))
    child.send_signal(signal.SIGKILL)
    rest, _ = child.communicate()
    assert child.returncode == -signal.SIGKILL
    return max([told, *(int(line) for line in rest.split(b"\n")[:-1])])


def names(connection, query):
    return {row[0] for row in connection.execute(query)}


def check(path: Path | str, told: int) -> int:
    """Check that the file holds whole commits and nothing else; return how many."""
    with open_store(path, fingerprint=FINGERPRINT) as store:
        connection = store._connection
        number = sum(info.num_turns for info in store.conversations())
        plans = [plan for before in range(number) for plan in planned(before)]
        ids = {plan.turn.turn_id for plan in plans}
        assert names(connection, f"SELECT turn_id FROM turns WHERE owner = '{OWNER}'") == ids
        responses = "SELECT turn_id FROM responses WHERE status IN ('completed', 'incomplete')"
        assert names(connection, responses) == ids
        keys = {plan.draft.idempotency.key for plan in plans if plan.draft.idempotency is not None}
        items = {item_id for plan in plans for item_id in plan.item_ids}
        assert names(connection, "SELECT item_id FROM items") == items
        late = {late.turn.turn_id for before in range(number + 1) if (late := latecomer(before)) is not None}
        assert not late & ids
        # A queued response was queued for the next commit, with its key, in a separate transaction.
        queued = names(connection, "SELECT response_id FROM responses WHERE status = 'queued'")
        following = [plan.draft for plan in planned(number) if plan.draft.response_id in queued]
        assert {draft.response_id for draft in following} == queued
        keys |= {draft.idempotency.key for draft in following}
        assert names(connection, "SELECT key FROM idempotency") == keys
        versions = connection.execute(
            "SELECT version, (SELECT count(*) FROM items WHERE items.conversation_id = "
            "conversations.conversation_id) FROM conversations WHERE metadata IS NOT NULL"
        ).fetchall()
        assert all(num_items == 2 * version for version, num_items in versions)
        if number:
            assert len(store.load("alice").turns) == number
            for plan in planned(number - 1):
                assert store.load_turn(OWNER, plan.turn.turn_id).turns[-1] == plan.turn
    assert number - 1 in (told, told + 1)
    return number


def is_left_alone(location: Path | str, request: pytest.FixtureRequest) -> bool:
    """Tell whether no session remains: Postgres ends those of dead clients with a delay."""
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname IS NOT NULL AND pid <> pg_backend_pid()"
    return isinstance(location, Path) or request.getfixturevalue("postgres").run_sql(sessions) == [(0,)]


@pytest.mark.parametrize(
    ("location", "num_kills"),
    [
        ("file", 3),
        pytest.param("file", enough(16, 200), marks=pytest.mark.long),
        pytest.param("postgres", enough(8, 100), marks=pytest.mark.long),
    ],
    indirect=["location"],
)
def test_a_turn_is_stored_with_all_attachments_or_not_at_all(location, num_kills, record_property, request):
    rng, path = np.random.default_rng(new_seed()), location
    number = num_untold = 0
    for num_reports in rng.permutation(np.linspace(0, 30, num_kills, dtype=int)):
        told = max(live_and_die(path, number, num_reports, rng), number - 1)
        wait_until(lambda: is_left_alone(path, request))
        number = check(path, told)
        num_untold += number - 1 > told
    record_property("note", f"{number * NUM_LANES} turns, {num_untold} commits made and not told of")
    assert number >= 14 * num_kills
    with open_store(path, fingerprint=FINGERPRINT) as store:  # it can be continued
        assert store.commit([endless_commits.named(number)]) == {}
        with HistoryReader(path, fingerprint=FINGERPRINT) as reader:
            last = planned(number - 1)[0]
            assert reader.response(OWNER, last.draft.response_id).turn_id == last.turn.turn_id
