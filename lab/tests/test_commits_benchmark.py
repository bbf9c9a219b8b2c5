"""The benchmark of commits: both histories get the same turns, and only one counts them."""

from __future__ import annotations

import json

import pytest

from pensieve_jax.history import open_store
from pensieve_lab.programs.benchmark_commits import drop_triggers, new_commit
from tests.history.conftest import location  # noqa: F401

PROGRAM = "pensieve_lab.programs.benchmark_commits"


def test_without_triggers_nothing_is_counted(location):  # noqa: F811
    with open_store(location, fingerprint="test") as store:
        assert store.commit(*new_commit(2, "ann")) == {}
        counted = store.read(lambda connection: connection.execute("SELECT * FROM stored_amounts").fetchall())
        drop_triggers(store)
        assert store.commit(*new_commit(1, "bob")) == {}
        after = store.read(lambda connection: connection.execute("SELECT * FROM stored_amounts").fetchall())
    assert after == counted and [row[0] for row in counted] == ["ann"] and counted[0][2] == 2


@pytest.mark.parametrize("where", ["file", pytest.param("postgres", marks=pytest.mark.long)])
def test_commits_with_and_without_counting_are_timed(launch, tmp_path, request, where):
    document = tmp_path / "found.json"
    flags = {"num_commits": 16, "num_windows": 1, "window_s": 0.1, "json": document}
    if where == "postgres":
        url, _, _ = request.getfixturevalue("postgres").url().rpartition("&")
        flags["history"] = url
    assert launch(PROGRAM, shared_llm=False, **flags) == 0
    found = json.loads(document.read_text())["results"]
    assert [row["turns"] for row in found["commits"]] == [1, 8]
    assert all(row["counted_us"] > 0 and row["ratio"] > 0 for row in found["commits"])
    assert [row["owners"] for row in found["two_sessions"]] == ([1, 2] if where == "postgres" else [])
