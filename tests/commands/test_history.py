"""`pensieve history`: its effects, output, and refusals in one line."""

from __future__ import annotations

import os

import pytest

from pensieve_jax.history import TurnRecord, open_store
from tests.commands.starts import start_all
from tests.launching import ROOT
from tests.postgres_server import PASSWORD

ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
PROGRAM = "from pensieve_jax.commands.main import main; main()"


def pensieve_history(*commands):
    """Return status, output and errors of each command, run one after the other."""
    starts = [("-c", PROGRAM, "history", *map(str, words)) for words in commands]
    return list(start_all(starts, root=ROOT, environment=ENVIRONMENT).values())


@pytest.mark.long
def test_a_copy_to_postgres_and_one_that_is_refused(tmp_path, postgres):
    path, url = tmp_path / "chats.sqlite", postgres.url(user=f"locked:{PASSWORD}")
    with open_store(path, fingerprint="f") as store:
        store.commit([TurnRecord("alice", 0, (1,), (2,), 0, "stop", 1.0)])
    copied, refused = pensieve_history(("copy", path, url, "--progress"), ("copy", path, url))
    status, out, err = copied
    assert status == 0 and out.startswith("copied 1 turns, 1 conversations to postgresql://locked@"), err
    assert "2/2" in err and PASSWORD not in out + err
    with open_store(url, fingerprint="f") as store:
        assert store.load("alice").token_ids.tolist() == [1, 2]
    status, out, err = refused
    assert (status, out) == (2, "") and "holds 1 rows of turns already" in err and err.count("\n") == 1
    assert PASSWORD not in err


def test_invalid_arguments_are_reported_in_a_line():
    half = ("copy", f"postgresql://ada:{PASSWORD}@localhost/chats")
    *others, copied = pensieve_history((), ("migrate", "chats.sqlite"), half)
    for status, out, err in (*others, copied):
        assert (status, out) == (2, "") and err.startswith("error: ConfigError: ") and err.count("\n") == 1
    assert "what to do is 'copy postgresql://ada@localhost/chats', but must be copy SRC DST" in copied[2]
