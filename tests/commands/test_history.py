"""`pensieve history`: what it does, says, and refuses in a line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pensieve_jax.history import TurnRecord, open_store
from tests.launching import ROOT
from tests.postgres_server import PASSWORD

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
PROGRAM = "from pensieve_jax.commands.main import main; main()"


def pensieve_history(*words):
    command = [sys.executable, "-c", PROGRAM, "history", *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_copy_to_postgres_and_one_that_is_refused(tmp_path, postgres):
    path, url = tmp_path / "chats.sqlite", postgres.url(user=f"locked:{PASSWORD}")
    with open_store(path, fingerprint="f") as store:
        store.commit([TurnRecord("alice", 0, (1,), (2,), 0, "stop", 1.0)])
    status, out, err = pensieve_history("copy", path, url, "--progress")
    assert status == 0 and out.startswith("copied 1 turns, 1 conversations to postgresql://locked@"), err
    assert "2/2" in err and PASSWORD not in out + err
    with open_store(url, fingerprint="f") as store:
        assert store.load("alice").token_ids.tolist() == [1, 2]
    status, out, err = pensieve_history("copy", path, url)
    assert (status, out) == (2, "") and "holds 1 rows of turns already" in err and err.count("\n") == 1
    assert PASSWORD not in err
    status, out, err = pensieve_history("migrate", url)
    assert status == 0 and out.endswith("is of schema version 2\n"), err


@pytest.mark.parametrize("words", [(), ("migrate", "chats.sqlite")])
def test_what_is_none_of_it_is_told_in_a_line(words):
    status, out, err = pensieve_history(*words)
    assert (status, out) == (2, "") and err.startswith("error: ConfigError: ") and err.count("\n") == 1
