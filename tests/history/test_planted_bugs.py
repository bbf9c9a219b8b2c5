"""Bugs planted in commits and removals; the tests of this folder detect each of them."""

from __future__ import annotations

import inspect

import pytest

from pensieve_jax.core.errors import PensieveError
from pensieve_jax.history import HistoryReader, named_conversations, open_store, table_store, turns_table
from pensieve_jax.history.server_tables import responses_table, server_conversations
from tests.history import test_trees as trees
from tests.history.server_tables import test_responses as responses


def replaced(text: str, old: str, new: str) -> str:
    """Return the statement with this change; fail if it no longer has the text that the bug changes."""
    assert old in text, f"the bug is out of date: {old!r} is not in {text!r}"
    return text.replace(old, new, 1)


def without_savepoint(monkeypatch):
    """Keep what was written of a refused turn before its refusal."""
    append_all = table_store.append_all

    class Deaf:
        def __init__(self, connection):
            self._connection = connection

        def execute(self, statement, *values):
            return self._connection.execute(
                statement if "TO SAVEPOINT" not in statement else "SELECT 1", *values
            )

        def execute_changing(self, *arguments):
            self._connection.execute_changing(*arguments)

    monkeypatch.setattr(
        table_store, "append_all", lambda connection, *rest: append_all(Deaf(connection), *rest)
    )


def unchecked_version(monkeypatch):
    """Let the last writer append, whatever has changed."""
    anyhow = replaced(server_conversations._ADVANCE, "version = ?", "? >= 0")
    monkeypatch.setattr(server_conversations, "_ADVANCE", anyhow)


def refusal_fails_the_step(monkeypatch):
    """Let one turn's refusal fail all."""
    append_all = table_store.append_all

    def strict(*arguments):
        for refusal in append_all(*arguments).values():
            raise refusal
        return {}

    monkeypatch.setattr(table_store, "append_all", strict)


def background_comes_back(monkeypatch):
    """Complete a response although it was cancelled or deleted while it ran."""
    complete = responses_table.complete

    def forgiving(connection, draft, *rest):
        try:
            complete(connection, draft, *rest)
        except PensieveError:
            responses_table._insert(connection, draft, "completed")

    monkeypatch.setattr(responses_table, "complete", forgiving)


def nothing_is_removed(monkeypatch):
    """Keep tokens that nothing needs any more."""
    monkeypatch.setattr(turns_table, "collect", lambda *arguments: [])


def only_the_last_is_removed(monkeypatch):
    """Keep the turns before a removed one."""
    monkeypatch.setattr(
        turns_table, "_UNNEEDED", replaced(turns_table._UNNEEDED, "SELECT parent_id", "SELECT NULL")
    )


def needed_by(what):
    def bug(monkeypatch):
        lines = [line for line in turns_table._UNNEEDED.split("\n") if f"FROM {what} WHERE" not in line]
        monkeypatch.setattr(turns_table, "_UNNEEDED", "\n".join(lines))

    bug.__name__ = f"removed_though_{what}_need_it"
    return bug


def in_use_is_ignored(monkeypatch):
    """Let a deletion take the tokens of a running turn's parent."""
    collect = turns_table.collect
    monkeypatch.setattr(
        turns_table,
        "collect",
        lambda connection, owner, turn_id, in_use=(): collect(connection, owner, turn_id),
    )


def released_is_forgotten(monkeypatch):
    """Keep forever what was once in use."""
    monkeypatch.setattr(turns_table, "collect_released", lambda *arguments: [])


def wrong_count(monkeypatch):
    """Let a turn count its own tokens only."""
    own = replaced(turns_table._INSERT_AFTER_PARENT, "before.num_tokens + ?", "0 * before.num_tokens + ?")
    monkeypatch.setattr(turns_table, "_INSERT_AFTER_PARENT", own)


def fork_moves_the_source(monkeypatch):
    """Let a cut for a fork cut its source as well."""
    fork = named_conversations.fork

    def greedy(connection, conversation_id, new_conversation_id, num_tokens, at_s):
        number = fork(connection, conversation_id, new_conversation_id, num_tokens, at_s)
        if num_tokens is not None:
            named_conversations.truncate(connection, conversation_id, num_tokens)
        return number

    monkeypatch.setattr(named_conversations, "fork", greedy)


def head_without_compare(monkeypatch):
    """Let the last writer set the head, whatever it was."""
    anyhow = replaced(named_conversations._MOVE, "AND num_turns = ?", "AND ? >= 0")
    anyhow = replaced(anyhow, "AND head_turn = ?", "AND ? <> ''")
    monkeypatch.setattr(named_conversations, "_MOVE", anyhow)


def any_owner(monkeypatch):
    """Read a path for any owner who knows its id."""
    monkeypatch.setattr(
        turns_table,
        "_PATH_ROWS",
        replaced(turns_table._PATH_ROWS, "WHERE owner = ? AND", "WHERE ? <> ' ' AND"),
    )


BUGS = {
    without_savepoint: responses.test_only_the_turn_that_lost_a_race_is_refused,
    unchecked_version: responses.test_only_the_turn_that_lost_a_race_is_refused,
    refusal_fails_the_step: responses.test_only_the_turn_that_lost_a_race_is_refused,
    background_comes_back: responses.test_a_deleted_background_response_does_not_come_back,
    nothing_is_removed: responses.test_a_deleted_response_takes_its_tokens_unless_another_continues_them,
    only_the_last_is_removed: (
        responses.test_a_deleted_response_takes_its_tokens_unless_another_continues_them
    ),
    needed_by("turns"): responses.test_a_deleted_response_takes_its_tokens_unless_another_continues_them,
    needed_by("conversations"): responses.test_a_conversation_keeps_the_tokens_of_deleted_responses,
    needed_by("responses"): responses.test_a_deleted_conversation_leaves_its_responses,
    in_use_is_ignored: responses.test_a_turn_in_use_stays_until_its_last_continuation_ends,
    released_is_forgotten: (
        responses.test_a_turn_that_was_in_use_is_removed_when_the_turn_that_used_it_was_cancelled
    ),
    wrong_count: trees.test_a_placed_turn_is_read_as_it_was_written,
    fork_moves_the_source: trees.test_a_fork_of_a_part_copies_at_most_a_cut_turn,
    head_without_compare: trees.test_only_a_turn_that_continues_an_older_head_is_refused,
    any_owner: trees.test_missing_turns_and_another_owners_are_unknown,
}
FIXTURES = {"num_tokens": 6, "num_turns_then": 2, "num_rows": 3}


@pytest.mark.parametrize("kind", ["file", "postgres"])
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_the_bug_is_detected(bug, kind, tmp_path, monkeypatch, request):
    noticing = BUGS[bug]
    for name in ("sound", "with the bug"):
        where = tmp_path / name if kind == "file" else request.getfixturevalue("postgres").url()
        with (
            open_store(where, fingerprint=responses.FINGERPRINT) as store,
            HistoryReader(where, fingerprint=responses.FINGERPRINT) as reader,
        ):
            given = {**FIXTURES, "store": store, "reader": reader}
            arguments = {key: given[key] for key in inspect.signature(noticing).parameters}
            if name == "sound":
                noticing(**arguments)
                continue
            bug(monkeypatch)
            with pytest.raises((AssertionError, PensieveError, pytest.fail.Exception)):
                noticing(**arguments)
